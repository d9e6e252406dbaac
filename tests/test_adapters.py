"""Adapters keep float32 parameters and compute in the model's precision."""

import copy
import json
from pathlib import Path

import pytest
import torch
from peft.tuners.lora import Linear as PeftLinear

from glm_grpo.model import adapters
from glm_grpo.model.loading import load_pipeline

FOLDER = Path(__file__).parents[1] / "data/tiny-glm-image"
PARTS = {"ar": "vision_language_encoder", "dit": "transformer"}


def adapted(half, dtype):
    "(model with a random adapter, its adapted layers)"
    options = adapters.LoraOptions(rank=4)
    model = adapters.add_lora(getattr(load_pipeline(FOLDER, dtype), PARTS[half]), options, 0, half)
    generator = torch.Generator().manual_seed(0)
    for name, weight in sorted(model.named_parameters()):
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.05
    return model, [layer for layer in model.modules() if isinstance(layer, PeftLinear)]


def answers(layer):
    "Output of a layer, and the gradients of its input and of its adapter, in float64."
    base = layer.base_layer.weight
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 7, base.shape[1], generator=generator).bfloat16().to(base.dtype)
    y = layer(x.requires_grad_())
    direction = torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype)
    weights = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    found = torch.autograd.grad((y * direction).sum(), [x, *weights])
    assert y.dtype == base.dtype
    return [t.detach().double() for t in (y, *found)]


@pytest.mark.parametrize("half", PARTS)
def test_half_precision_is_float32_to_rounding(half):
    _, layers = adapted(half, torch.bfloat16)
    assert layers and not any(type(layer) is PeftLinear for layer in layers)
    for layer in layers:
        assert layer.lora_A["default"].weight.dtype == torch.float32
        assert layer.lora_B["default"].weight.dtype == torch.float32
        exact = copy.deepcopy(layer).double()
        exact.__class__ = PeftLinear
        for ours, theirs in zip(answers(layer), answers(exact)):
            assert (ours - theirs).norm() < 2**-7 * theirs.norm()  # bfloat16 has eight bits


def out_of_place(layer, x):
    "The same products, and a copy of the layer's output."
    y = layer.base_layer(x)
    up = layer.lora_B["default"].weight * layer.scaling["default"]
    inner = torch.nn.functional.linear(x, layer.lora_A["default"].weight.to(x.dtype))
    rows = inner.flatten(0, -2), up.to(x.dtype).T
    return torch.addmm(y.flatten(0, -2), *rows).view(y.shape)


@pytest.mark.parametrize("half", PARTS)
def test_adding_in_place_changes_no_bit(half, monkeypatch):
    _, layers = adapted(half, torch.bfloat16)
    for layer in layers:
        ours = answers(layer)
        with monkeypatch.context() as patch:
            patch.setattr(type(layer), "forward", out_of_place)
            theirs = answers(layer)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("half", PARTS)
def test_float32_models_keep_pefts_layers(half):
    _, layers = adapted(half, torch.float32)
    assert layers and all(type(layer) is PeftLinear for layer in layers)


def test_other_cases_are_pefts():
    "Switched off, or merged into the weight."
    _, layers = adapted("ar", torch.bfloat16)
    layer = layers[0]
    x = torch.linspace(-1, 1, 2 * layer.base_layer.in_features).view(2, -1).bfloat16()
    base = layer.base_layer(x)
    with_adapter = layer(x)
    assert not torch.equal(with_adapter, base)
    layer.enable_adapters(False)
    assert torch.equal(layer(x), base)
    layer.enable_adapters(True)
    layer.merge()
    assert torch.equal(layer(x), layer.base_layer(x))
    assert torch.allclose(layer(x).float(), with_adapter.float(), atol=0.1)


def test_names_that_fit_another_part_are_written_in_full(tmp_path):
    "A list of ends would put adapters into the vision tower as well."

    def linear(names):
        return torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in names})

    def model():
        parts = {"visual": linear(["proj"])}
        layers = torch.nn.ModuleList([linear(["proj", "other"]) for _ in range(2)])
        parts["language_model"] = torch.nn.ModuleDict({"layers": layers})
        return torch.nn.ModuleDict(parts)

    for names, written in {
        ("other",): ["other"],
        ("proj",): [f"language_model.layers.{i}.proj" for i in range(2)],
    }.items():
        options = adapters.LoraOptions(rank=2, target_modules=names)
        wrapped = adapters.add_lora(model(), options)
        wrapped.save_pretrained(tmp_path, save_embedding_layers=False)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        assert config["target_modules"] == written and config["lora_alpha"] == 32
        adapted = [name for name, _ in wrapped.named_parameters() if "lora_A" in name]
        assert len(adapted) == 2 and all("language_model" in name for name in adapted)
        assert adapters.choose_lora(tmp_path, ["ar"]) == options
