"""Make README.md from nbs/index.ipynb, and nbs/README.md from nbs/contents.md:

python tools/make_readme.py [--check]

`nbdev_readme` needs Quarto; this joins the notebook's Markdown cells. Links in the notebook are
relative to nbs/, in the README to the root. nbs/README.md has a table for each shelf of
nbs/contents.md: questions with notebooks, or notebooks with their claims. With --check nothing is
written; the exit status is 1 if something would change.
"""

import json
import posixpath
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Made from nbs/index.ipynb by tools/make_readme.py: edit the notebook. -->\n\n"
SHELVES = """<!-- Made from nbs/contents.md by tools/make_readme.py. -->

# The notebooks

The folders, here and in the package, are the floors of its architecture: each imports only from those with a lower number. `README.md` in each folder says what it is for.

## Main road

About three hours, in this order:

{Main road}

## Look up

When you have the question:

{Look up}

## Internals

The other notebooks that make up the package:

{Internals}
"""  # noqa: E501


def from_root(link: str) -> str:
    "A link as seen from nbs/ -> the same link as seen from the root."
    if re.match(r"[a-z]+:|#|/", link):  # to another place
        return link
    path, mark, place = link.partition("#")
    slash = "/" if path.endswith("/") else ""
    return posixpath.normpath(f"nbs/{path}") + slash + mark + place


def markdown_cells(path: Path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]


def claim_of(name: str) -> str:  # 1_maths/03_loss
    "The line of a notebook's first cell that begins with `>`."
    return re.search(r"(?m)^> (.*)$", markdown_cells(ROOT / f"nbs/{name}.ipynb")[0])[1]


def shelf(caption: str) -> str:  # Look up
    "The notebooks under a caption of nbs/contents.md: questions with answers, or claims."
    contents = (ROOT / "nbs/contents.md").read_text(encoding="utf-8")
    entries = re.search(rf":caption: {caption}\n:titlesonly:\n\n([^`]*)", contents)[1]
    rows, head = [], "| notebook | what it shows |"
    for entry in entries.splitlines():
        question, name = re.fullmatch(r"(?:(.*) <)?(.*?)>?", entry).groups()
        link = f"[{name}]({name}.ipynb)"
        if question:
            head = "| question | notebook |"
        if name != "index":
            rows.append(
                f"| {question} | {link} |" if question else f"| {link} | {claim_of(name)} |"
            )
    return "\n".join([head, "|---|---|", *rows])


def make() -> dict[str, str]:
    "The files: name -> text."
    text = "\n\n".join(markdown_cells(ROOT / "nbs/index.ipynb"))
    for link in (r"(\]\()([^)\s]+)", r'((?:src|href)=")([^"]+)'):
        text = re.sub(link, lambda m: m[1] + from_root(m[2]), text)
    shelves = re.sub(r"\{(.+?)\}", lambda m: shelf(m[1]), SHELVES)
    return {"README.md": NOTE + text.strip() + "\n", "nbs/README.md": shelves}


def main() -> None:
    for name, text in make().items():
        path = ROOT / name
        changed = not path.exists() or path.read_text(encoding="utf-8") != text
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
            print(f"{name}:", "changed" if changed else "nothing to change")
        elif changed:
            sys.exit(f"{name}: not in step with nbs; run: python tools/make_readme.py")


if __name__ == "__main__":
    main()
