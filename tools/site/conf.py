"""Sphinx configuration of the site, made from the committed notebooks, which are not run:

sphinx-build -c tools/site nbs _site
"""

import json
import re

project = "glm_grpo"
copyright = "2026, the glm_grpo contributors"  # noqa: A001
html_title = "glm_grpo"
root_doc = "contents"
extensions = ["myst_nb", "sphinx.ext.githubpages"]
exclude_patterns = ["**/.ipynb_checkpoints", "*/README.md"]

nb_execution_mode = "off"  # the committed outputs are shown
nb_merge_streams = True
nb_ipywidgets_js = {}  # scripts from elsewhere, for widgets that would need a kernel
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header", "myst.xref_missing", "mystnb.unknown_mime_type"]
highlight_language = "text"  # of a block that names none

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def without_directives(app, name, source) -> None:
    "A notebook without hidden cells and nbdev's directives; nbdev_clean drops its language."
    if not source[0].startswith("{"):
        return
    book = json.loads(source[0])
    cells = [c for c in book["cells"] if not re.match(r"#\|\s*hide\b", "".join(c["source"]))]
    for cell in cells:
        if cell["cell_type"] == "code":
            cell["source"] = re.sub(r"(?m)^#\|.*\n?", "", "".join(cell["source"]))
    book["cells"] = [c for c in cells if "".join(c["source"]).strip()]
    book["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    source[0] = json.dumps(book)


def setup(app):
    app.connect("source-read", without_directives)
