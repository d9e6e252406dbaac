"""Layout of prompts: what `prepare_prompts` refuses, and how many positions a prompt needs."""

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from glm_grpo.data.basics import refusal
from glm_grpo.data.prompts import I2IDataset, T2IDataset
from glm_grpo.model.tokens import check_prompt_lengths, layout_positions, prepare_prompts

DATA = Path(__file__).parents[1] / "data"
PROMPTS = ["a cat in the top left on a red ground", "three cats on a blue ground"]


@pytest.fixture(scope="module")
def model():
    folder = DATA / "tiny-glm-image"
    ar = GlmImageForConditionalGeneration.from_pretrained(
        folder, subfolder="vision_language_encoder", dtype=torch.float32
    )
    processor = GlmImageProcessor.from_pretrained(folder, subfolder="processor")
    return SimpleNamespace(ar=ar.eval(), processor=processor)


def prepare(model, *args, **kwargs):
    return prepare_prompts(model.processor, model.ar, *args, **kwargs)


def blank(height=128, width=128):
    return Image.fromarray(np.zeros((height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    "args, start, end",
    [
        ((["a cat"], 100, 128), "height is 100, but must be a multiple of 32", "take 96"),
        ((["a cat"], 128, 0), "width is 0, but must be a multiple of 32", "take 32"),
        ((["a cat"], 128, 64.5), "width is 64.5", "take 64"),
        ((["a cat", " "], 128, 128), "prompt 1 is empty (' ')", "write what the image shows"),
        ((["a cat", None], 128, 128), "prompt 1 is empty (None)", "write what the image shows"),
        (([], 128, 128), "no prompts: pass at least one", ""),
        ((["a <|image|>"], 128, 128), "prompt 0 ('a <|image|>') contains '<|image|>'", "width)"),
        ((["a<sop>"], 128, 128), "prompt 0 ('a<sop>') contains '<sop>'", "width)"),
        ((["a<eop>"], 128, 128), "prompt 0 ('a<eop>') contains '<eop>'", "width)"),
        ((["a cat"], 32, 9600), "32x9600 is too narrow", "ratio is below 256"),
        ((PROMPTS, 128, 128, [[]]), "2 prompts need 2 lists of source images", "not [0]"),
        ((PROMPTS, 128, 128, [[], [blank()]]), "2 prompts need 2 lists", "not [0, 1]"),
    ],
)
def test_refused(model, args, start, end):
    message = refusal(prepare, model, *args)
    assert message.startswith(start) and message.endswith(end)


def test_start_and_end_marks_of_images_are_refused(model):
    config = model.ar.config
    ids = [config.image_start_token_id, config.image_end_token_id]
    for mark in model.processor.tokenizer.convert_ids_to_tokens(ids):
        assert f"contains {mark!r}, a mark" in refusal(prepare, model, [f"a{mark}"], 128, 128)


def test_layout_is_the_pipelines(model):
    "The pipeline passes the size outside `processor_kwargs`, with a warning."
    messages = [[{"role": "user", "content": [{"type": "text", "text": p}]}] for p in PROMPTS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = model.processor.apply_chat_template(
            messages,
            tokenize=True,
            padding=True,
            target_h=128,
            target_w=160,
            return_dict=True,
            return_tensors="pt",
        )
    ours = prepare(model, PROMPTS, 128, 160)
    assert torch.equal(ours.input_ids, theirs["input_ids"])
    assert torch.equal(ours.attention_mask, theirs["attention_mask"])
    assert ours.grids == [tuple(grid) for grid in theirs["image_grid_thw"][:2, 1:].flip(0).tolist()]


@pytest.mark.parametrize("grid", ((3, 2), (2, 3)))
def test_counting_goes_on_behind_the_longer_side(grid):
    assert layout_positions([1, grid, 2])[:, -2:].tolist() == [[4, 5]] * 3


def test_padding_moves_no_position(model):
    together = prepare(model, PROMPTS, 128, 128)
    alone = prepare(model, PROMPTS[1:], 128, 128)
    num_real = alone.input_ids.shape[1]
    padding = together.input_ids.shape[1] - num_real
    assert padding > 0 and together.attention_mask[1].tolist() == [0] * padding + [1] * num_real
    assert torch.equal(together.position_ids[:, 1, padding:], alone.position_ids[:, 0])
    assert torch.equal(together.decode_position_ids[:, 1], alone.decode_position_ids[:, 0])
    assert torch.equal(
        torch.cat((alone.position_ids, alone.decode_position_ids), 2)[:, 0],
        layout_positions([num_real, *alone.grids]),
    )


def test_sources_stay_with_their_prompt(model):
    images = [[blank(128, 192)], [blank(256, 128)]]
    inputs = prepare(model, PROMPTS, 128, 128, images)
    assert inputs.grids == [(4, 4)]
    assert [sources[0][1] for sources in inputs.sources] == [(4, 6), (8, 4)]
    config = model.ar.config
    for ids, [(tokens, (h, w))] in zip(inputs.input_ids, inputs.sources):
        first = ids.tolist().index(config.image_start_token_id) + 1
        assert torch.equal(ids[first : first + h * w], tokens) and len(tokens) == h * w
        assert ids[first + h * w] == config.image_end_token_id
    assert inputs.rows([1]).sources == [inputs.sources[1]]


def test_edits_need_no_preview(model):
    edits = I2IDataset(DATA / "i2i/train/prompts.jsonl", None)
    lengths = [len(model.processor.tokenizer(prompt).input_ids) for prompt in edits.prompts]
    longest = int(np.argmax(lengths))
    inputs = prepare(model, [edits.prompts[longest]], 128, 128, [edits[longest]["source"]])
    needed = inputs.input_ids.shape[1] + inputs.num_tokens
    assert check_prompt_lengths(model, edits, 128, 128) == needed


def test_the_last_position_may_be_used(model):
    prompts = T2IDataset(DATA / "t2i/train/prompts.txt")
    needed = check_prompt_lengths(model, prompts, 128, 128)
    config = copy.deepcopy(model.ar.config)
    ar = SimpleNamespace(config=config, device=model.ar.device)
    short = SimpleNamespace(processor=model.processor, ar=ar)
    config.text_config.max_position_embeddings = needed
    assert check_prompt_lengths(short, prompts, 128, 128) == needed
    config.text_config.max_position_embeddings = needed - 1
    assert f"the model has {needed - 1:,}" in refusal(
        check_prompt_lengths, short, prompts, 128, 128
    )


def test_too_long_prompt_is_named_with_file_and_line(model, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("a cat\n" + "a cat and a dog " * 900 + "\na dog\n")
    message = refusal(check_prompt_lengths, model, T2IDataset(file), 128, 128)
    assert "long.txt, line 2: 14,399 characters" in message
    assert message.endswith("Shorten the prompt.")
