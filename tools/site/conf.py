"""Sphinx configuration of the site; `python tools/site` runs it."""

from latex2mathml.converter import convert

project = "glm_grpo"
copyright = "2026, the glm_grpo contributors"  # noqa: A001
html_title = "glm_grpo"
root_doc = "index"
extensions = ["myst_nb", "sphinx.ext.githubpages"]
templates_path = []

nb_execution_mode = "off"  # the committed outputs are shown
nb_merge_streams = True
nb_ipywidgets_js = {}  # scripts from elsewhere, for widgets that would need a kernel
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
myst_all_links_external = False
suppress_warnings = ["myst.header"]
add_module_names = False
python_display_short_literal_types = True
highlight_language = "text"  # of a block that names none

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def show_math(self, node) -> None:
    "A formula as MathML, which browsers draw themselves: no script, no font from elsewhere."
    self.body.append(convert(node.astext()))
    raise_skip()


def show_math_block(self, node) -> None:
    mathml = convert(node.astext(), display="block")
    self.body.append(f'<div class="math">{mathml}</div>')
    raise_skip()


def raise_skip():
    from docutils.nodes import SkipNode

    raise SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (show_math, None), (show_math_block, None))
