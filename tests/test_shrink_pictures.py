"""tools/shrink_pictures.py: pictures in notebooks get a palette, and nothing else changes."""

import base64
import importlib.util
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

FILE = Path(__file__).resolve().parent.parent / "tools/shrink_pictures.py"
spec = importlib.util.spec_from_file_location("shrink_pictures", FILE)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def picture(png: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(png)))


def test_pictures_get_smaller_and_nothing_else_changes(tmp_path):
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
    small = picture(found["cells"][0]["outputs"][0]["data"].pop("image/png"))
    assert small.mode == "P" and small.size == (96, 96)
    assert np.abs(np.asarray(small.convert("RGB"), int) - pixels).mean() < 8
    output["data"].pop("image/png")
    assert found == notebook


def test_a_second_time_changes_nothing():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    once = tool.shrink_png(buffer.getvalue())
    assert len(once) < len(buffer.getvalue()) and tool.shrink_png(once) == once
