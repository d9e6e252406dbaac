"Each notebook says under its claim whether it is on the main road, and what comes next."

import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "tools/site"))
import marks  # noqa: E402
from contents import ROAD, notebooks  # noqa: E402

FLOORS = ("00_grpo_in_an_hour", "1_maths", "2_data")


def lines_of(name):
    return marks.first_cell(name).splitlines()


@pytest.mark.parametrize("name", notebooks())
def test_a_mark_agrees_with_the_list_of_the_main_road(name):
    found = [line for line in lines_of(name) if line.startswith(("*Main road", "*Appendix"))]
    assert found in ([marks.mark(name)], []), "run: python tools/site/marks.py"
    if name.startswith(FLOORS):
        assert found, "run: python tools/site/marks.py"


def test_the_next_part_is_a_link_from_the_notebook_itself():
    for name, following in zip(ROAD, ROAD[1:]):
        target = marks.mark(name).rsplit("](", 1)[1].removesuffix(").*")
        assert ((marks.NBS / name).parent / target).resolve() == marks.NBS / f"{following}.ipynb"
    assert "Next" not in marks.mark(ROAD[-1])


def test_marking_keeps_the_rest_of_the_cell():
    for cell in ("# A\n> b", "# A\n\n> b\n\nc\n\nd", f"# A\n> b\n\n{marks.APPENDIX}\n\nc\n\nd"):
        once = marks.marked(cell, "*Main road, part 1 of 2.*")
        assert once == marks.marked(once, "*Main road, part 1 of 2.*")
        assert once.startswith("# A\n> b\n\n*Main road, part 1 of 2.*")
        assert once.count("*") == 2 and once.endswith("d") == cell.endswith("d")
