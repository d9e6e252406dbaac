#!/usr/bin/env bash
# diffusers 0.42.1, peft 0.21.2, torch 2.13.0
# Expected: load_lora_adapter() of the GLM-Image DiT opens the folder that PEFT saved for that
#   DiT and adds the trained change, or stops with an error.
# Seen: with the default prefix nothing is loaded (one log line, no error). With PEFT's own prefix
#   the keys match, but lora_alpha of adapter_config.json is not read: alpha becomes the rank. An
#   adapter of rank 16 and alpha 32 acts at half its strength. PEFT opens the folder exactly.
# Output:
#   diffusers 0.42.1 peft 0.21.2
#   saved: rank 16, alpha 32; loaded: rank 16 alpha 16
#   PeftModel: 1.0 of the trained change
#   default prefix: 0.0 of the trained change
#   PEFT's prefix: 0.56 of the trained change
#   PEFT's prefix, weight 2: 1.0 of the trained change
# For GRPO on GLM-Image: a trained adapter served this way shows half of what was trained, or the
#   untrained model. Open it with PeftModel.from_pretrained, or scale it by alpha / rank.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 peft==0.21.2 transformers==5.23.0
FOLDER=$folder/adapter "$folder/venv/bin/python" - <<'PY'
import os
import diffusers, peft, torch
from diffusers import GlmImageTransformer2DModel
from peft import LoraConfig, PeftModel, get_peft_model

folder, file = os.environ["FOLDER"], "adapter_model.safetensors"


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


@torch.no_grad()
def change(net):
    return net(**batch, return_dict=False)[0] - base(**batch, return_dict=False)[0]


base = model()
lora = LoraConfig(r=16, lora_alpha=32, target_modules=["to_q", "to_k", "to_v"],
                  init_lora_weights=False)
trained = get_peft_model(model(), lora)
trained.save_pretrained(folder)
right = change(trained)
default, prefixed = model(), model()
default.load_lora_adapter(folder, weight_name=file)
prefixed.load_lora_adapter(folder, weight_name=file, prefix="base_model.model", adapter_name="rl")
config = prefixed.peft_config["rl"]
share = {"PeftModel": change(PeftModel.from_pretrained(model(), folder)),
         "default prefix": change(default), "PEFT's prefix": change(prefixed)}
prefixed.set_adapters(["rl"], 2.0)
share["PEFT's prefix, weight 2"] = change(prefixed)
share = {name: round((x.norm() / right.norm()).item(), 2) for name, x in share.items()}
print("diffusers", diffusers.__version__, "peft", peft.__version__)
print("saved: rank 16, alpha 32; loaded: rank", config.r, "alpha", config.lora_alpha)
for name, x in share.items():
    print(f"{name}: {x} of the trained change")
assert (config.r, config.lora_alpha) == (16, 16)
assert share["PeftModel"] == share["PEFT's prefix, weight 2"] == 1
assert share["default prefix"] == 0 and 0.4 < share["PEFT's prefix"] < 0.6
PY
