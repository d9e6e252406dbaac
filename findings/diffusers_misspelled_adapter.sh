#!/usr/bin/env bash
# diffusers 0.42.1, peft 0.21.2, torch 2.13.0
# Expected: set_adapters("name") of a model stops with an error where no adapter has this name.
# Seen: it returns, the only adapter that is loaded is switched off, and active_adapters() says that
#   the misspelled one is active. fuse_lora() of a model without any adapter returns as well.
# Output:
#   diffusers 0.42.1 peft 0.21.2
#   set_adapters("rl"): 1.0 of the trained change, active ['rl']
#   set_adapters("r1"): 0.0 of the trained change, active ['r1']
# For GRPO on GLM-Image: images of "the trained model" are those of the base, without a word.
#   Compare active_adapters() with peft_config, or an image with one of the base.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 peft==0.21.2 transformers==5.23.0
"$folder/venv/bin/python" - <<'PY'
import diffusers, peft, torch
from diffusers import GlmImageTransformer2DModel
from peft import LoraConfig


def model():
    torch.manual_seed(0)
    return GlmImageTransformer2DModel(
        num_attention_heads=2, attention_head_dim=32, num_layers=2, condition_dim=32,
        in_channels=16, out_channels=16, text_embed_dim=64, time_embed_dim=64,
        prior_vq_quantizer_codebook_size=64).eval()


batch = dict(
    hidden_states=torch.randn(1, 16, 8, 8), encoder_hidden_states=torch.randn(1, 4, 64),
    prior_token_id=torch.randint(64, (1, 16)), timestep=torch.tensor([500.0]),
    prior_token_drop=torch.zeros(1, 16, dtype=torch.bool),
    target_size=torch.tensor([[64.0, 64.0]]), crop_coords=torch.zeros(1, 2))
base, trained = model(), model()
lora = LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_v"], init_lora_weights=False)
trained.add_adapter(lora, adapter_name="rl")


@torch.no_grad()
def change():
    return trained(**batch, return_dict=False)[0] - base(**batch, return_dict=False)[0]


right = change().norm()
print("diffusers", diffusers.__version__, "peft", peft.__version__)
shares = []
for name in ("rl", "r1"):
    trained.set_adapters(name)
    shares.append(round((change().norm() / right).item(), 2))
    print(f'set_adapters("{name}"): {shares[-1]} of the trained change, active', end=" ")
    print(trained.active_adapters())
base.fuse_lora()
assert shares == [1.0, 0.0] and trained.active_adapters() == ["r1"]
PY
