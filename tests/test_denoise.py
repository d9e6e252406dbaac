"""The DiT's side of the model and loading: what is refused, and properties that must hold.

The stories stand in the notebooks of nbs/3_model; these checks are fast.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from glm_grpo.data.basics import refusal
from glm_grpo.maths.noise import named_noise
from glm_grpo.model import adapters, loading, memory
from glm_grpo.model.denoise import ImageInputs, sample_latents
from glm_grpo.model.latents import decode_latents, encode_sources

TINY = Path(__file__).parents[1] / "data/tiny-glm-image"
PROMPTS = ['a sign "AN"', "a cat", 'a sign "LONGER"', "a dog"]
SIDE = 64  # pixels: 2 x 2 tokens
GRID = (2, 2)


@pytest.fixture(scope="module")
def pipe():
    return loading.load_pipeline(TINY)


@pytest.fixture
def empty_model(tmp_path):
    "A folder with all files of a model by name, without content but for its settings."
    folder = tmp_path / "model"
    for path in TINY.rglob("*"):
        if path.is_file():
            copy = folder / path.relative_to(TINY)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.touch()
    for name in ("model_index.json", "*/*config.json"):
        for path in TINY.glob(name):
            shutil.copy(path, folder / path.relative_to(TINY))
    return folder


@pytest.fixture
def inputs():
    ids = torch.randint(1024, (4, 4), generator=torch.Generator().manual_seed(0))
    return ImageInputs(ids, GRID, PROMPTS, num_inference_steps=3, guidance_scale=1.5)


@pytest.fixture
def start():
    return named_noise(list("abcd"), (16, SIDE // 8, SIDE // 8))


def one_source(pipe, level, side=SIDE):
    image = Image.new("RGB", (side, side), (level, 80, 160))
    tokens = torch.arange(side**2 // 32**2) + level
    return encode_sources(pipe, [image], [(tokens, (side // 32, side // 32))])[0]


# --- loading


@pytest.mark.parametrize("part", loading._PARTS)
def test_missing_files_are_named(empty_model, part):
    for file in (empty_model / part).glob("*.safetensors*"):
        file.unlink()
    message = refusal(loading.check_model_folder, empty_model)
    assert f"{part}/*.safetensors is missing: the weights." in message
    (empty_model / part / "config.json").unlink()
    assert f"{part}/config.json: " in refusal(loading.check_model_folder, empty_model)


def test_missing_shard_is_named(empty_model):
    shards = {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
    index = empty_model / "transformer/diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    (empty_model / "transformer/model-00001.safetensors").touch()
    message = refusal(loading.check_model_folder, empty_model)
    assert "transformer/model-00002.safetensors is missing" in message
    for content in ("", "[]", "{}"):
        index.write_text(content)
        assert "safetensors.index.json: " in refusal(loading.check_model_folder, empty_model)


def test_broken_files_are_a_user_error(empty_model):
    message = refusal(loading.load_pipeline, empty_model)
    assert "its files do not load" in message and "\n" not in message


# --- decoding


def test_sources_of_two_sizes_in_one_call(pipe, inputs, start):
    "Rows with sources of other sizes go into another batch."
    small, large = one_source(pipe, 30), one_source(pipe, 200, side=96)
    mixed = replace(inputs, prompts=["a cat"] * 4, sources=[[small], [large], [small], [large]])
    together = sample_latents(pipe, mixed, start)["latents"]
    for row in range(4):
        one = slice(row, row + 1)
        alone = ImageInputs(mixed.large_ids[one], GRID, ["a cat"], 3, 1.5, [mixed.sources[row]])
        latents = sample_latents(pipe, alone, start[one])["latents"]
        assert (together[one] - latents).abs().max() < 1e-4


@torch.no_grad()
def test_pixels_are_clamped(pipe):
    pixels = decode_latents(pipe, 20 * named_noise(["a"], (16, 8, 8)))
    assert pixels.min() == 0 and pixels.max() == 1 and pixels.shape == (1, 3, 64, 64)


# --- adapters


def test_an_adapter_goes_around(tmp_path):
    "Saved options are those of the adapter, also for names with a dot; no global number is used."
    state = torch.get_rng_state()
    names = ("to_out.0", "linear_1")
    options = adapters.LoraOptions(rank=3, alpha=5.0, dit_target_modules=names)
    model = adapters.add_lora(loading.load_pipeline(TINY).transformer, options, 1, "dit")
    assert torch.equal(torch.get_rng_state(), state)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    assert adapters.choose_lora(tmp_path, ["dit"]) == options
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["target_modules"] = list(names)  # as other programs write it
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert adapters.choose_lora(tmp_path, ["dit"]) == options


# --- sizes


def test_layout_needs_a_whole_model(empty_model):
    (empty_model / "vae/config.json").unlink()
    assert "vae/config.json: " in refusal(memory.model_layout, empty_model)


def test_unknown_hub_ids_have_no_layout():
    message = refusal(memory.model_layout, "nobody/no-such-model")
    assert "hf download nobody/no-such-model" in message
