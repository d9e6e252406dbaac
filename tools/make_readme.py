"""Make README.md from nbs/index.ipynb:  python tools/make_readme.py [--check]

`nbdev_readme` needs Quarto; this joins the notebook's Markdown cells. Links in the notebook are
relative to nbs/, in the README to the root. A table of the notebooks of a floor, with their claims,
stands where the index says <!-- notebooks of 1_maths -->. With --check nothing is written; the exit
status is 1 if something would change.
"""

import json
import posixpath
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Made from nbs/index.ipynb by tools/make_readme.py: edit the notebook. -->\n\n"


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


def table(floor: str) -> str:  # 1_maths
    "The notebooks of a floor, each with the claim of its first cell."
    rows = ["| notebook | what it shows |", "|---|---|"]
    for path in sorted((ROOT / "nbs" / floor).glob("*.ipynb")):
        claim = re.search(r"(?m)^> (.*)$", markdown_cells(path)[0])[1]
        rows.append(f"| [{path.stem}]({floor}/{path.name}) | {claim} |")
    return "\n".join(rows)


def make() -> str:
    "The README."
    text = "\n\n".join(markdown_cells(ROOT / "nbs/index.ipynb"))
    text = re.sub(r"<!-- notebooks of (\w+) -->", lambda m: table(m[1]), text)
    for link in (r"(\]\()([^)\s]+)", r'((?:src|href)=")([^"]+)'):
        text = re.sub(link, lambda m: m[1] + from_root(m[2]), text)
    return NOTE + re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def main() -> None:
    path, text = ROOT / "README.md", make()
    changed = path.read_text(encoding="utf-8") != text
    if "--check" not in sys.argv[1:]:
        path.write_text(text, encoding="utf-8")
        print("README.md:", "changed" if changed else "nothing to change")
    elif changed:
        sys.exit("README.md: not in step with nbs/index.ipynb; run: python tools/make_readme.py")


if __name__ == "__main__":
    main()
