"Figures with sliders: the picture, the sliders and their values that stand there at first."

import json
import re

import pytest
from helpers import ROOT
from PIL import Image

from glm_grpo.maths.frames import sliders

POSITIONS = {"red": [0, 128, 255], "green": [0, 255]}


def square(red, green):
    return Image.new("RGB", (8, 8), (red, green, 0))


@pytest.mark.parametrize("start", [(0, 0), (2, 0), (1, 1)])
def test_the_sliders_start_where_the_picture_does(start):
    html = sliders(POSITIONS, square, start).html
    inputs = re.findall(r'max="(\d+)" value="(\d+)" aria-valuetext="(\d+)"', html)
    names = [str(values[i]) for values, i in zip(POSITIONS.values(), start)]
    assert inputs == [("2", str(start[0]), names[0]), ("1", str(start[1]), names[1])]
    assert re.findall(r"<output[^>]*>(\d+)</output>", html) == names
    stored = re.search('data-frames="([^"]*)"', html)[1].split()
    shown = re.search('src="data:image/png;base64,([^"]*)"', html)[1]
    assert len(stored) == 6 and stored.index(shown) == 2 * start[0] + start[1]
    assert 'alt="red, green: a figure"' in html


def test_the_notebook_on_the_loss_moves_type_clip_range_and_ratio():
    cells = json.loads((ROOT / "nbs/1_maths/03_loss.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pages = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    labels = [re.findall(r'<span style="min-width: 7em">([^<]*)</span>', page) for page in pages]
    assert ["clip range"] in labels and ["loss type", "clip range", "ratio"] in labels
