"""Sphinx configuration of the site, made from the committed notebooks, which are not run:

sphinx-build -c tools/site nbs _site
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from api import write_pages  # noqa: E402

project = "glm_grpo"
copyright = "2026, the glm_grpo contributors"  # noqa: A001
html_title = "glm_grpo"
root_doc = "contents"
extensions = ["myst_nb", "sphinx.ext.githubpages"]
exclude_patterns = ["**/.ipynb_checkpoints", "README.md", "*/README.md"]

nb_execution_mode = "off"  # the committed outputs are shown
nb_merge_streams = True
nb_ipywidgets_js = {}  # scripts from elsewhere, for widgets that would need a kernel
myst_enable_extensions = ["dollarmath"]
myst_dmath_double_inline = True  # $$ directly below a line of text
myst_heading_anchors = 3
suppress_warnings = ["myst.header", "myst.xref_missing", "mystnb.unknown_mime_type"]
highlight_language = "text"  # of a block that names none

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def only_plots(code: str) -> bool:
    "Whether a cell draws, and at least half of its lines are about that."
    lines = [line for line in code.splitlines() if line.strip()]
    about = r"\b(plt|ShownFigure|fig|figure|ax|axis|axes|grid)\b"
    draws = re.search(r"\bplt\.|\bShownFigure\(", code)
    return bool(draws) and 2 * sum(bool(re.search(about, line)) for line in lines) >= len(lines)


API = """
```{toctree}
:caption: Reference
:titlesonly:

api/index
```
"""


def without_directives(app, name, source) -> None:
    """A notebook without hidden cells and nbdev's directives, with the code of plots folded and a
    link to the file; nbdev_clean drops its language."""
    if name == root_doc:
        source[0] += API
    if not source[0].startswith("{"):
        return
    book = json.loads(source[0])
    cells = [c for c in book["cells"] if not re.match(r"#\|\s*hide\b", "".join(c["source"]))]
    for cell in cells:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code":
            if not re.match(r"#\|\s*export", code) and only_plots(code):
                cell["metadata"].setdefault("tags", []).append("hide-input")
            cell["source"] = re.sub(r"(?m)^#\|.*\n?", "", code)
    file = f"{name.rpartition('/')[2]}.ipynb"
    link = f"\n\nThis page is the notebook {{download}}`nbs/{name}.ipynb <{file}>`."
    cells[0]["source"] = "".join(cells[0]["source"]) + link
    book["cells"] = [c for c in cells if "".join(c["source"]).strip()]
    book["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    source[0] = json.dumps(book)


def setup(app):
    write_pages(Path(app.srcdir) / "api")  # which git ignores
    app.connect("source-read", without_directives)
