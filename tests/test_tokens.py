"""Layout of prompts: what `prepare_prompts` refuses, and how many positions a prompt needs."""

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from glm_grpo.data.basics import refusal
from glm_grpo.data.prompts import T2IDataset
from glm_grpo.model.tokens import check_prompt_lengths, prepare_prompts

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


@pytest.mark.parametrize(
    "args, words",
    [
        ((["a cat"], 100, 128), "height is 100"),
        ((["a cat"], 128, 64.5), "width is 64.5"),
        ((["a cat", " "], 128, 128), "a prompt is empty"),
    ],
)
def test_refused(model, args, words):
    assert words in refusal(prepare, model, *args)


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{%"]
)
def test_a_chat_template_that_does_not_work_is_named(model, template):
    "The sandbox refuses the first, as a template from elsewhere may try to reach the program."
    processor = copy.copy(model.processor)
    processor.chat_template = template
    message = refusal(prepare_prompts, processor, model.ar, PROMPTS, 128, 128)
    assert "chat_template.jinja: this chat template does not work" in message


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
