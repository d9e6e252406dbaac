"""What a step consists of, at the published sizes and from shapes alone."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft.tuners.lora import Linear as PeftLinear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from glm_grpo.model.adapters import LoraOptions, add_lora
from glm_grpo.model.denoise import make_conditions, predict_velocity
from glm_grpo.model.memory import PUBLISHED, build_part, layout_of
from glm_grpo.run.command_line import parse_args
from glm_grpo.run.plan import Step, forward_flop

IMAGES, SIDE = 8, 32  # of a denoising step; tokens of the large grid, each way


class Count(TorchDispatchMode):
    "The bytes of the inputs and outputs of all operators but views."

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not function.is_view:
            leaves = tree_leaves((args, kwargs, out))
            self.bytes += sum(x.nbytes for x in leaves if isinstance(x, torch.Tensor))
        return out


def build_dit(layers=30):
    return build_part("dit", PUBLISHED["dit"] | {"num_layers": layers}, dtype=torch.bfloat16)


@torch.no_grad()
def denoise(dit, counter):
    "One denoising step with guidance, which is one forward pass of twice as many rows."
    large = torch.empty(IMAGES, SIDE**2, dtype=torch.long, device="meta")
    glyph = torch.empty(1, dit.config.text_embed_dim, device="meta", dtype=dit.dtype)
    parts = SimpleNamespace(transformer=dit, vae_scale_factor=8)
    conditions = make_conditions(parts, large, (SIDE, SIDE), [glyph] * IMAGES, glyph)
    latents = torch.empty(IMAGES, dit.config.in_channels, 4 * SIDE, 4 * SIDE, device="meta")
    with counter:
        predict_velocity(dit, conditions, latents, torch.empty((), device="meta"))
    return counter


def test_adapters_of_the_dit_move_few_bytes():
    "With PEFT's own float32 products, which this project replaces, it would notice."
    dit = build_dit(layers=1)
    plain = denoise(dit, Count()).bytes
    add_lora(dit, LoraOptions(), half="dit")
    assert plain < denoise(dit, Count()).bytes < 1.1 * plain
    for layer in dit.modules():
        if isinstance(layer, PeftLinear):
            layer.__class__ = PeftLinear
    assert denoise(dit, Count()).bytes > 1.25 * plain


@pytest.fixture(scope="module")
def recipe():
    "`real_both_80gb` with the sizes that are counted: 64 prompt tokens, 32 rows at a time."
    words = "--config configs/real_both_80gb.yaml --rollout.token_batch_size 32"
    config = parse_args([*words.split(), "--training.batch_size", "4"])
    return Step(config, layout_of(PUBLISHED))


def test_the_dry_runs_formulas_agree_with_the_counts(recipe):
    assert recipe.rows == 32
    read = (recipe.ar.weights + recipe.rows * recipe.ar.tokens * recipe.cache) * recipe.bytes
    assert read == pytest.approx(18.9e9, rel=0.05)  # data/bench/README.md
    counted = denoise(build_dit(), FlopCounterMode(display=False)).get_total_flops()
    flop = IMAGES * recipe.passes * forward_flop(recipe.dit)
    assert flop == pytest.approx(counted, rel=0.05)


def test_the_formula_of_an_ar_pass_agrees_with_the_count(recipe):
    config = copy.deepcopy(PUBLISHED["ar"])
    config["text_config"]["num_hidden_layers"] = 4
    text_model = build_part("ar", config, dtype=torch.bfloat16).model.language_model
    positions = torch.empty(3, 1, recipe.ar.tokens, dtype=torch.long, device="meta")
    embedded = torch.empty(1, recipe.ar.tokens, 4096, dtype=torch.bfloat16, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        text_model(inputs_embeds=embedded, position_ids=positions, use_cache=False)
    head = 2 * recipe.ar.tokens * 4096 * 16512
    counted = 10 * counter.get_total_flops() + head
    assert counted == pytest.approx(forward_flop(recipe.ar), rel=0.05)
