"""What a step consists of, at the published sizes and from shapes alone."""

from collections import Counter
from types import SimpleNamespace

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm_grpo.model.adapters import LoraOptions, add_lora
from glm_grpo.model.decode_step import lay_together, linears_of
from glm_grpo.model.denoise import make_conditions, predict_velocity
from glm_grpo.model.memory import PUBLISHED, build_part
from glm_grpo.model.sampling import sample_tokens
from glm_grpo.model.tokens import PromptInputs

IMAGES, SIDE = 8, 32  # of a denoising step; tokens of the large grid, each way
ROWS, PROMPT = 32, 64  # of a decode step; tokens of the prompt
LAYERS = PUBLISHED["ar"]["text_config"]["num_hidden_layers"]
aten = torch.ops.aten


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


# ---- a decode step


class Kernels(TorchFunctionMode):
    """Counts operators by name, without views. A norm and attention are one each; a norm of rows
    that do not lie one behind the other copies them first."""

    def __init__(self):
        super().__init__()
        self.names, self.inside = Counter(), False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if self.inside or name not in ("rms_norm", "scaled_dot_product_attention"):
            return function(*args, **(kwargs or {}))
        self.inside = True
        out = function(*args, **(kwargs or {}))
        self.inside = False
        self.names[name] += 1
        if name == "rms_norm" and not args[0].is_contiguous():
            self.names["copy in rms_norm"] += 1
        return out

    def warm_up(self, step, times):
        "As a recorder of `sample_tokens`: there are no numbers to prepare."

    def record(self, step):
        with Operators(self), self:
            step()
        return lambda: None


class Operators(TorchDispatchMode):
    "Counts what is not part of a function that `Kernels` has counted."

    def __init__(self, kernels):
        super().__init__()
        self.kernels = kernels

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operator = function.overloadpacket
        if not (self.kernels.inside or function.is_view or operator is aten._unsafe_view):
            self.kernels.names[operator.__name__] += 1
        return function(*args, **(kwargs or {}))


def kernels_of_a_token(layers, rank, together):
    "Operator -> how often it runs for a token of all rows."
    sizes = {"text_config": PUBLISHED["ar"]["text_config"] | {"num_hidden_layers": layers}}
    sizes["vision_config"] = PUBLISHED["ar"]["vision_config"] | {"depth": 1}  # reads no tokens
    ar = build_part("ar", PUBLISHED["ar"] | sizes, dtype=torch.bfloat16)
    if rank:
        add_lora(ar, LoraOptions(rank))
    for layer in ar.model.language_model.layers if together else ():
        for linears in linears_of(layer):
            lay_together(linears)
    grids = [(16, 16), (SIDE, SIDE)]
    tokens = sum(h * w for h, w in grids)
    ids = torch.ones(1, PROMPT, dtype=torch.long, device="meta")
    positions = [ids.new_empty(3, 1, n) for n in (PROMPT, tokens)]
    inputs, kernels = PromptInputs(ids, ids, *positions, grids, [PROMPT]), Kernels()
    uniforms = torch.empty(ROWS, tokens, device="meta")
    sample_tokens(ar, inputs, [0] * ROWS, uniforms, fixed_shapes=True, recorder=kernels)
    return kernels.names


def count_token(rank, together):
    "Operators of a token in all layers, and copies within them, from those of one and two layers."
    one, two = (kernels_of_a_token(layers, rank, together) for layers in (1, 2))
    totals = {name: one[name] + (LAYERS - 1) * (two[name] - one[name]) for name in two}
    copies = totals.pop("copy in rms_norm", 0)
    return sum(totals.values()), copies


def test_a_token_is_few_kernels():
    "Per layer 20 where weights lie together, 27 where they do not; 20 for the rest of a step."
    assert count_token(LoraOptions.rank, together=False) == (27 * LAYERS + 20, 0)
    operators, copies = count_token(LoraOptions.rank, together=True)
    assert operators == 20 * LAYERS + 20 and copies == 2 * LAYERS
    assert operators + copies <= 900


if __name__ == "__main__":
    print(f"a token of {ROWS} rows, {LAYERS} layers: operators, and copies within norms")
    for rank in (0, LoraOptions.rank):
        for together in (False, True):
            where = "weights together" if together else "weights apart"
            print(f"rank {rank}, {where}: {count_token(rank, together)}")
