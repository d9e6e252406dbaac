"""What a step consists of, at the published sizes and from shapes alone."""

from types import SimpleNamespace

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm_grpo.model.adapters import LoraOptions, add_lora
from glm_grpo.model.denoise import make_conditions, predict_velocity
from glm_grpo.model.memory import PUBLISHED, build_part

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
