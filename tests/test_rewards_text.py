"""The OCR reward: fonts and sizes that must be legible, and what the engine is given."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

from glm_grpo.data.basics import refusal
from glm_grpo.data.images import pil_to_tensor
from glm_grpo.rewards.text import TextReader, text_likeness

pytest.importorskip("rapidocr")

FONTS = (
    "DejaVuSans DejaVuSans-Bold DejaVuSansMono DejaVuSerif STIXGeneral cmr10 cmss10 cmtt10".split()
)
WORDS = ["HELLO", "Open", "2026", "Sale 50"]
COLOURS = [("white", "black"), ("white", "#b22222"), ("#ffd700", "#000080"), ("#707070", "#808080")]


@pytest.fixture(scope="module")
def reader():
    return TextReader()


def write(word, side=128, font="DejaVuSans-Bold", ink="black", paper="white"):
    "[1, 3, side, side]: 70 % of the side wide."
    file = f"{get_data_path()}/fonts/ttf/{font}.ttf"
    size = min(70 * side / ImageFont.truetype(file, 100).getlength(word), side / 2)
    image = Image.new("RGB", (side, side), paper)
    letters, middle = ImageFont.truetype(file, size), (side / 2, side / 2)
    ImageDraw.Draw(image).text(middle, word, fill=ink, font=letters, anchor="mm")
    return pil_to_tensor([image])


def is_read(reader, word, **style):
    return text_likeness(reader.read(write(word, **style))[0], [word], exact=True) == 1


def test_fonts_sides_and_colours(reader):
    fonts = [is_read(reader, word, font=font) for font in FONTS for word in WORDS[1:3]]
    sides = [is_read(reader, w, side=s) for w, s in zip(WORDS * 2, [64, 128, 256, 1024] * 2)]
    colours = [is_read(reader, "2026", ink=ink, paper=paper) for ink, paper in COLOURS]
    assert np.mean(fonts) > 0.95 and np.mean(sides) > 0.8 and all(colours)


def test_the_engine_gets_blue_first(reader):
    image = torch.tensor([1.0, 0.5, 0.0]).view(1, 3, 1, 1).expand(-1, -1, 300, 300)
    with mock.patch.object(reader, "_engine", wraps=reader._engine) as engine:
        reader.read(image)
    (given,) = engine.call_args.args
    assert given.shape == (300, 300, 3)  # no border around a large image
    assert given[0, 0].tolist() == [0, 128, 255]


def test_two_threads_read_each_image_once_and_another_batch_anew(reader):
    images = torch.cat([write("tea"), write("SALT")])
    with mock.patch.object(reader, "_read_image", wraps=reader._read_image) as counted:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(reader.read, [images, images])
    assert counted.call_count == 2 and first is second
    assert first == [["tea"], ["SALT"]] and reader.read(images[1:]) == [["SALT"]]


def test_missing_weights():
    with mock.patch.object(TextReader, "models", {"Det": "none.onnx"}):
        assert "none.onnx" in refusal(TextReader)


@pytest.mark.parametrize("turns", [1, 3])
def test_a_sign_on_its_side_is_not_read_as_upright(reader, turns):
    for word in ("OPEN", "HELLO", "Monday to"):
        for side in (128, 512):
            turned = write(word, side=side).rot90(turns, (2, 3))
            assert text_likeness(reader.read(turned)[0], [word]) <= 0.25, (word, side)


def test_a_high_letter_stands_as_it_is(reader):
    assert is_read(reader, "I", side=512)


@pytest.mark.parametrize("count", [1, 5, 6, 20, 100])
def test_the_order_of_any_number_of_texts_does_not_count(count):
    rng = random.Random(count)
    texts = ["".join(rng.choices("abcdefghij", k=rng.randint(3, 8))) for _ in range(2 * count)]
    wanted = [f"{a} {b}" for a, b in zip(texts[::2], texts[1::2])]
    read = rng.sample(wanted, count)
    start = time.process_time()
    assert text_likeness(read, wanted) == text_likeness(" ".join(read).split(), wanted) == 1
    assert time.process_time() - start < 0.4  # two scores
    read[0] = "Z" + read[0][1:]  # one wrong letter
    letters = len("".join(wanted).replace(" ", ""))
    assert text_likeness(read, wanted) == pytest.approx(1 - 1 / letters)
