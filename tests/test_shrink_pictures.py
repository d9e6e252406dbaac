"""tools/shrink_pictures.py: images in notebooks get a palette, and nothing else changes."""

import base64
import io
import json
import sys

import numpy as np
from helpers import ROOT
from PIL import Image

sys.path.insert(0, str(ROOT / "tools"))
import shrink_pictures as tool  # noqa: E402


def test_images_get_smaller_and_nothing_else_changes(tmp_path):
    slope = np.linspace(0, 255, 96)
    pixels = np.stack([*np.meshgrid(slope, slope), np.full((96, 96), 99.0)], -1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
    output = {"output_type": "display_data", "metadata": {}}
    output["data"] = {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": "ü"}
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": "x", "outputs": [output]}
    notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    before, after = tool.shrink_notebook(path)
    assert after < before / 2
    found = json.loads(path.read_text(encoding="utf-8"))
    once = base64.b64decode(found["cells"][0]["outputs"][0]["data"].pop("image/png"))
    small = Image.open(io.BytesIO(once))
    assert small.mode == "P" and small.size == (96, 96) and tool.shrink_png(once) == once
    assert np.abs(np.asarray(small.convert("RGB"), int) - pixels).mean() < 8
    output["data"].pop("image/png")
    assert found == notebook
