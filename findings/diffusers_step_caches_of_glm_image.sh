#!/usr/bin/env bash
# diffusers 0.42.1, torch 2.13.0, CPU
# Expected: GlmImageTransformer2DModel is a CacheMixin, so enable_cache makes some steps skip work.
# Seen: TaylorSeer, with its default patterns, is enabled and does nothing, without a word: its
#   patterns must match a name to the end ("transformer_blocks.*attn"), and the attention of this
#   model is called attn1. First-block cache and MagCache raise, as its blocks are not registered.
#   Pyramid attention broadcast works.
# Output:
#   diffusers 0.42.1
#   no cache: 24 of 24 attentions
#   TaylorSeer: 24 of 24 attentions, same output True
#   TaylorSeer, cache_identifiers ending in attn1: 12 of 24 attentions, same output False
#   pyramid attention broadcast: 12 of 24 attentions, same output False
#   first-block cache: ValueError, MagCache: ValueError
# For GRPO on GLM-Image: rollouts that were to be faster are not, and a comparison of images with
#   and without the cache finds no harm, since there is no cache.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 numpy==2.4.6
cat > "$folder/run.py" <<'PY'
import diffusers
import torch
from diffusers import GlmImageTransformer2DModel, hooks

STEPS, LAYERS = 6, 4
SIZES = {"num_attention_heads": 2, "attention_head_dim": 40, "text_embed_dim": 32}
SIZES |= {"time_embed_dim": 32, "condition_dim": 8, "prior_vq_quantizer_codebook_size": 64}


def denoise(cache):
    "The latents after six steps, and how often an attention computed its queries."
    torch.manual_seed(0)
    model = GlmImageTransformer2DModel(in_channels=16, num_layers=LAYERS, **SIZES).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.1)
    calls = []
    for block in model.transformer_blocks:
        block.attn1.to_q.register_forward_hook(lambda *call: calls.append(1))
    if cache:
        model.enable_cache(cache)
    inputs = {
        "encoder_hidden_states": torch.randn(1, 3, 32),
        "prior_token_id": torch.randint(0, 64, (1, 16)),
        "prior_token_drop": torch.zeros(1, dtype=torch.bool),
        "target_size": torch.tensor([[64.0, 64.0]]),
        "crop_coords": torch.zeros(1, 2),
    }
    latents = torch.randn(1, 16, 8, 8)
    with torch.no_grad(), model.cache_context("cond"):
        for step in range(STEPS):
            time = torch.tensor([999 - 100 * step])
            latents = latents - 0.1 * model(latents, timestep=time, **inputs).sample
    return latents, len(calls)


taylor = {"cache_interval": 3, "disable_cache_before_step": 2}
attention = [r"transformer_blocks\.\d+\.attn1"]
CACHES = {
    "TaylorSeer": hooks.TaylorSeerCacheConfig(**taylor),
    "TaylorSeer, cache_identifiers ending in attn1": hooks.TaylorSeerCacheConfig(
        **taylor, cache_identifiers=attention
    ),
    "pyramid attention broadcast": hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: 500,
    ),
}
print("diffusers", diffusers.__version__)
plain, all_calls = denoise(None)
print(f"no cache: {all_calls} of {STEPS * LAYERS} attentions")
seen = {}
for name, cache in CACHES.items():
    latents, calls = denoise(cache)
    seen[name] = calls, torch.equal(latents, plain)
    print(f"{name}: {calls} of {all_calls} attentions, same output {seen[name][1]}")
errors = []
for cache in (
    hooks.FirstBlockCacheConfig(threshold=0.5),
    hooks.MagCacheConfig(num_inference_steps=STEPS, mag_ratios=torch.ones(STEPS)),
):
    try:
        denoise(cache)
    except ValueError as error:
        errors.append(type(error).__name__)
        assert "not registered" in str(error)
print(f"first-block cache: {errors[0]}, MagCache: {errors[1]}")
silent, named, pyramid = seen.values()
assert silent == (all_calls, True)
assert named[0] < all_calls and pyramid[0] < all_calls and not (named[1] or pyramid[1])
PY
"$folder/venv/bin/python" "$folder/run.py"
