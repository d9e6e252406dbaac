"""Make README.md from nbs/index.ipynb:  python tools/make_readme.py [--check]

`nbdev_readme` needs Quarto; this does the same with nbconvert. Links in the notebook are relative
to nbs/, in the README to the root. Images that a cell shows go to data/readme/. A table of the
notebooks of a floor, with their claims, stands where the index says <!-- notebooks of 1_maths -->.
With --check nothing is written; the exit status is 1 if something would change.
"""

import posixpath
import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
IMAGES = "data/readme"
NOTE = "<!-- Made from nbs/index.ipynb by tools/make_readme.py: edit the notebook. -->\n\n"


def from_root(link: str) -> str:
    "A link as seen from nbs/ -> the same link as seen from the root."
    outside = re.match(r"[a-z]+:|#|/", link)
    if outside or link.startswith(IMAGES):  # nbconvert names images as seen from the root
        return link
    path, mark, place = link.partition("#")
    slash = "/" if path.endswith("/") else ""
    return posixpath.normpath(f"nbs/{path}") + slash + mark + place


def move_links(text: str) -> str:
    "All links of a Markdown text."
    for link in (r"(\]\()([^)\s]+)", r'((?:src|href)=")([^"]+)'):
        text = re.sub(link, lambda m: m[1] + from_root(m[2]), text)
    return text


def read_index() -> nbformat.NotebookNode:
    "The notebook without hidden cells and directives."
    notebook = nbformat.read(ROOT / "nbs/index.ipynb", as_version=4)
    # nbdev_clean drops it, and the code fences would lose their language
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.cells = [c for c in notebook.cells if not re.match(r"#\|\s*hide\b", c.source)]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = re.sub(r"^#\|.*\n", "", cell.source, flags=re.M)
    return notebook


def table(floor: str) -> str:  # 1_maths
    "The notebooks of a floor, each with the claim of its first cell."
    rows = ["| notebook | what it shows |", "|---|---|"]
    for path in sorted((ROOT / "nbs" / floor).glob("*.ipynb")):
        first = nbformat.read(path, as_version=4).cells[0].source
        claim = re.search(r"(?m)^> (.*)$", first)[1]
        rows.append(f"| [{path.stem}]({floor}/{path.name}) | {claim} |")
    return "\n".join(rows)


def make() -> dict[str, bytes]:  # path -> content
    "Everything that is made from the notebook."
    resources = {"output_files_dir": IMAGES, "unique_key": "index"}
    text, extra = MarkdownExporter().from_notebook_node(read_index(), resources=resources)
    text = re.sub(r"<!-- notebooks of (\w+) -->", lambda m: table(m[1]), text)
    text = re.sub(r"\n{3,}", "\n\n", move_links(text)).strip() + "\n"
    images = {name: bytes(data) for name, data in extra["outputs"].items()}
    return {"README.md": (NOTE + text).encode(), **images}


def read_old() -> dict[str, bytes]:  # path -> content
    "What is there of an earlier time."
    names = ["README.md", *(f"{IMAGES}/{p.name}" for p in (ROOT / IMAGES).glob("*"))]
    return {name: (ROOT / name).read_bytes() for name in names if (ROOT / name).exists()}


def write(name: str, content: bytes | None) -> None:  # None: remove it
    path = ROOT / name
    if content is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def main() -> None:
    files, old = make(), read_old()
    changed = sorted(name for name in {*files, *old} if files.get(name) != old.get(name))
    if "--check" in sys.argv[1:]:
        if changed:
            sys.exit(
                f"not in step with nbs/index.ipynb: {', '.join(changed)}; run: "
                "python tools/make_readme.py"
            )
        return
    for name in changed:
        write(name, files.get(name))
    print("README.md:", ", ".join(changed) or "nothing to change")


if __name__ == "__main__":
    main()
