"""Mark every notebook as a part of the main road or as an appendix:  python tools/site/marks.py

Writes one line under the claim of each notebook, from the list in `contents.py`. Run it after a
change of the list; a notebook that has the right line stays as it is.

python tools/site/marks.py 1_maths/02_advantages ...   (without names: all notebooks)
"""

import json
import posixpath
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from contents import NBS, ROAD, notebooks  # noqa: E402

APPENDIX = "*Appendix: read it when you need it.*"
_OLD = re.compile(r"(?m)^\*(Main road, part|Appendix:).*\*\n*")


def first_cell(name: str) -> str:  # 1_maths/02_advantages
    "Source of the first cell of a notebook."
    cells = json.loads((NBS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return "".join(cells[0]["source"])


def title(name: str) -> str:
    "Title of a notebook."
    return re.search(r"(?m)^# (.*)$", first_cell(name))[1]


def link(name: str, folder: str) -> str:
    "A Markdown link to a notebook, from a notebook in this folder of nbs."
    return f"[{title(name)}]({posixpath.relpath(f'{name}.ipynb', folder or '.')})"


def mark(name: str) -> str:
    "The line that says where a notebook stands."
    if name not in ROAD:
        return APPENDIX
    number = ROAD.index(name) + 1
    text = f"Main road, part {number} of {len(ROAD)}."
    if number < len(ROAD):
        text += f" Next: {link(ROAD[number], posixpath.dirname(name))}."
    return f"*{text}*"


def marked(cell: str, line: str) -> str:
    "The first cell with this line under its claim, in place of an older one."
    title_line, claim, rest = re.fullmatch(
        r"(?s)(# .*?\n)\n*(> [^\n]*)\n*(.*)", _OLD.sub("", cell)
    ).groups()
    return "\n\n".join(part for part in (f"{title_line}{claim}", line, rest.strip()) if part)


def main(names: list[str]) -> None:
    "Mark the named notebooks, or all; print those that changed."
    for name in names or notebooks():
        path = NBS / f"{name}.ipynb"
        book = json.loads(path.read_text(encoding="utf-8"))
        new = marked(first_cell(name), mark(name))
        if new == first_cell(name):
            continue
        book["cells"][0]["source"] = new.splitlines(keepends=True)
        text = json.dumps(book, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        path.write_text(text, encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
