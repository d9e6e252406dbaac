"""The site: every notebook has its place, the API shows comments, and no link leads nowhere."""

import json
import posixpath
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "tools/site"))
import api
import contents

NAMES = contents.notebooks()
PART = ("1_maths/00_frames", "1_maths/03_loss", "6_run/08_explore")


def markdown(name):
    cells = json.loads((ROOT / f"nbs/{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]


# --- without sphinx


def test_every_notebook_is_in_the_table_of_contents_once():
    listed = [*contents.ROAD, *sum(contents.appendices(NAMES).values(), [])]
    on_disk = [path.relative_to(ROOT / "nbs") for path in (ROOT / "nbs").rglob("*.ipynb")]
    wanted = {path.with_suffix("").as_posix() for path in on_disk if "/." not in f"/{path}"}
    assert sorted(listed) == sorted(wanted - {"index"})


def test_the_main_road_is_short_and_starts_at_the_front_door():
    assert contents.ROAD[0] == "00_grpo_in_an_hour" and len(contents.ROAD) <= 10
    floors = [name.split("/")[0] for name in contents.ROAD]
    assert floors == sorted(floors)


def test_a_notebook_of_no_known_floor_is_not_lost():
    assert contents.appendices(["8_new/01_room"]) == {"More": ["8_new/01_room"]}


@pytest.mark.parametrize("name", NAMES)
def test_links_of_notebooks_lead_somewhere(name):
    text = re.sub(r"`[^`\n]*`|(?s:```.*?```)", "", "\n".join(markdown(name)))
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    inside = [link for link in links if link and not re.match(r"[a-z]+:", link)]
    folder = posixpath.dirname(f"nbs/{name}")
    assert [link for link in inside if not (ROOT / folder / link).exists()] == []


def test_the_api_has_the_comments_beside_parameters():
    sde = api.read_module(ROOT / "glm_grpo/maths/sde.py")
    item = next(item for item in sde.items if item.name == "sde_step")
    assert sde.notebook == "1_maths/04_sde" and item.kind == "function"
    assert "index: int,  # number of the step, 0 to K-1" in item.source
    assert item.source.endswith("# prev_sample [N, ...] float32, log_prob [N] float32, "
                                "mean [N, ...] float32, std")  # fmt: skip
    assert item.doc.startswith("One denoising step as a random decision")


def test_the_api_gives_a_class_its_fields_and_all_its_methods():
    text = """__all__ = ["Box"]
class Box(Base):
    "A box."

    side: int = 3  # in cells

    def area(self):  # cells
        return self.side**2

    def _hidden(self): pass

@patch_to(Box)
def grow(
    self,
    by: int,  # cells
) -> None:
    "Larger."
"""
    module = read_text(text)
    (box,) = module.items
    assert box.source == "class Box(Base):\n    side: int = 3  # in cells" and box.doc == "A box."
    assert [method.name for method in box.methods] == ["area", "grow"]
    assert box.methods[0].source == "def area(self):  # cells"
    assert box.methods[1].source == "def grow(\n    self,\n    by: int,  # cells\n) -> None:"


def read_text(text):
    path = api.PACKAGE / "maths/box.py"

    class Fake(type(path)):
        def read_text(self, encoding):
            return text

    return api.read_module(Fake(path))


def test_plain_words_of_a_docstring_stay_plain():
    assert api.as_markdown("a * b of `c * d`, [N, T] < $x_1") == (
        r"a \* b of `c * d`, \[N, T\] \< \$x\_1"
    )


# --- with sphinx


class Page(HTMLParser):
    "Links, pictures and anchors of a page."

    def __init__(self, text):
        super().__init__()
        self.links, self.sources, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes.get("id"), attributes.get("name")}
        self.links += [attributes["href"]] if attributes.get("href") else []
        self.sources += [attributes["src"]] if attributes.get("src") else []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "A site of three notebooks; a warning of Sphinx is an error."
    for name in ("sphinx", "myst_nb", "furo", "latex2mathml"):
        pytest.importorskip(name)
    out = tmp_path_factory.mktemp("site") / "html"
    command = [sys.executable, ROOT / "tools/site", "--strict", "--out", out, *PART]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site):
    files = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    return {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in files}


def test_pages_have_the_titles_of_their_notebooks(pages):
    for name in PART:
        title = re.search(r"(?m)^# (.*)$", markdown(name)[0])[1]
        assert f"<h1>{title}" in pages[f"nbs/{name}.html"]
    assert "<h1>glm_grpo" in pages["index.html"]


def test_links_between_pages_lead_somewhere(site, pages):
    parsed = {name: Page(text) for name, text in pages.items()}
    assert "nbs/1_maths/03_loss.html" in "".join(parsed["index.html"].links)
    broken = []
    for name, page in parsed.items():
        for link in page.links + page.sources:
            if re.match(r"[a-z]+:|//", link) or link == "#":
                continue
            target, _, anchor = unquote(link).partition("#")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target.split("?")[0]))
            path = name if not target else path
            missing = not (site / path).is_file()
            if missing or (anchor and path in parsed and anchor not in parsed[path].anchors):
                broken.append(f"{name}: {link}")
    assert broken == []


def test_names_formulas_and_outputs_are_shown(pages):
    loss = pages["nbs/1_maths/03_loss.html"]
    assert "../../api/glm_grpo.maths.loss.html#glm_grpo.maths.loss.compute_grpo_loss" in loss
    prose = re.sub(r"(?s)<(pre|script|style)\b.*?</\1>", "", loss)
    assert prose.count("<math") > 20 and prose.count('<div class="math">') > 3
    assert "$" not in prose  # what is left of a formula that was not seen as one
    assert 'class="frames"' in loss and 'type="range"' in loss
    assert "_images/" in loss and "default_exp" not in loss and "nbdev_export" not in loss


def test_nothing_is_loaded_from_elsewhere(pages):
    for name, text in pages.items():
        loaded = re.findall(r"<(?:script|link|img)\b[^>]*>", text)
        assert [tag for tag in loaded if re.search(r"(src|href)=.https?:", tag)] == [], name


def test_the_api_of_these_notebooks_is_there(pages):
    assert sorted(name for name in pages if name.startswith("api/")) == [
        "api/glm_grpo.maths.frames.html",
        "api/glm_grpo.maths.loss.html",
        "api/glm_grpo.run.explore.html",
        "api/index.html",
    ]


def test_a_folder_with_something_else_is_not_replaced(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    command = [sys.executable, ROOT / "tools/site", "--out", tmp_path, PART[0]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "something else than a site" in done.stderr
    assert (tmp_path / "mine.txt").read_text() == "keep"
