#!/usr/bin/env bash
# torch 2.13.0, diffusers 0.42.1, CPU
# Expected: blocks of GlmImageTransformer2DModel, compiled with dynamic=True, are compiled once for
#   images of all sizes.
# Seen: sizes that are equal at the first call count as one variable. If an image has as many
#   patches as the model is wide, the number of patches becomes a constant, because the width is
#   one, and other image sizes are compiled again. Without duck shapes they are not.
# Output:
#   torch 2.13.0+cpu, diffusers 0.42.1, width 80
#   first image of 72 patches: 2 graphs, then of 20 and 48 patches: 0 more
#   first image of 80 patches: 2 graphs, then of 20 and 48 patches: 2 more
#   the same without duck shapes: 2 graphs, then of 20 and 48 patches: 0 more
# For GRPO on GLM-Image: it is 4096 wide, and an image of 1024 x 1024 has 4096 patches. A run that
#   trains at one size and evaluates at the other pays for each with minutes, and for more kinds
#   with PyTorch's limit of eight.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 numpy==2.4.6
cat > "$folder/run.py" <<'PY'
import diffusers
import torch
from diffusers import GlmImageTransformer2DModel
from torch.fx.experimental import _config

SIZES = {"num_attention_heads": 2, "attention_head_dim": 40, "text_embed_dim": 32}
SIZES |= {"time_embed_dim": 32, "condition_dim": 8, "prior_vq_quantizer_codebook_size": 64}
WIDTH = 80
made = []


def backend(graph, inputs):
    "Computes a graph as it is, and counts that it was made."
    made.append(1)
    return graph


def call(model, height, width):
    "Three images of so many patches each way, with five letters."
    patches = height * width
    model(
        torch.randn(3, 16, 2 * height, 2 * width),
        encoder_hidden_states=torch.randn(3, 5, 32),
        prior_token_id=torch.randint(0, 64, (3, patches)),
        prior_token_drop=torch.zeros(3, dtype=torch.bool),
        timestep=torch.full((3,), 500),
        target_size=torch.full((3, 2), 64.0),
        crop_coords=torch.zeros(3, 2),
    )


def graphs(first, duck=True):
    "Graphs for the first size, and for two others after it."
    torch._dynamo.reset()
    model = GlmImageTransformer2DModel(in_channels=16, num_layers=2, **SIZES).eval()
    for block in model.transformer_blocks:
        block.compile(backend=backend, dynamic=True)
    made.clear()
    with torch.no_grad(), _config.patch(use_duck_shape=duck):
        call(model, *first)
        number = len(made)
        call(model, 4, 5)
        call(model, 6, 8)
    return number, len(made) - number


print(f"torch {torch.__version__}, diffusers {diffusers.__version__}, width {WIDTH}")
found = graphs((8, 9)), graphs((8, 10)), graphs((8, 10), duck=False)
names = "first image of 72 patches", "first image of 80 patches", "the same without duck shapes"
for name, (first, more) in zip(names, found):
    print(f"{name}: {first} graphs, then of 20 and 48 patches: {more} more")
assert [more for _, more in found] == [0, 2, 0]
PY
"$folder/venv/bin/python" "$folder/run.py"
