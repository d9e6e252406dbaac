"""Where in the DiT do independent batches pull the same way? Writes data/halves_runs/agreement.json, which notebook 13 shows.

    python tools/gradient_agreement.py

For each kind of weight: the mean cosine between the policy gradients of independent batches of 64 pictures, before any training. 1: one batch says all; 0: noise.
About three minutes on an idle core.
"""
import json, re
import torch
from glm_grpo.advantages import compute_advantages
from glm_grpo.data import atomic_write, read_lines
from glm_grpo.glm import GLMImageWrapper, slice_rollout
from glm_grpo.rewards import DetailCheck

BATCHES, PROMPTS, GROUP = 10, 8, 8
torch.set_num_threads(1)
model, reward = GLMImageWrapper("data/tiny-glm-image", "dit", torch_dtype="float32", device="cpu"), DetailCheck("data/drawings")
policy, prompts = model.policies["dit"], read_lines("data/words/train/prompts.txt")
weights = [(name, p) for name, p in model.dit.named_parameters() if p.requires_grad]
gradients = []
for step in range(BATCHES):
    few = [p for p in (prompts[(PROMPTS * step + i) % len(prompts)] for i in range(PROMPTS)) for _ in range(GROUP)]
    rollout = model.generate_with_tracking(few, seed=0, step=step, height=128, width=128, num_inference_steps=3, guidance_scale=2.0, noise_level=0.7, sde_type="cps", score_batch_size=GROUP)
    advantages = compute_advantages(reward(rollout["image_tensors"]), GROUP, "group")
    for start in range(0, len(few), GROUP):
        rows = slice(start, start + GROUP)
        for piece in policy.pieces(slice_rollout(rollout, rows)): (policy.score(piece)[:, 0] * advantages[rows]).sum().backward()
    gradients.append([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().clone() for _, p in weights])
    model.dit.zero_grad(set_to_none=True)
    print(f"batch {step + 1} of {BATCHES}", flush=True)

def agreement(rows):
    "Mean cosine of all pairs of [B, D] gradients."
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return ((unit @ unit.T).sum().item() - len(rows)) / (len(rows) * (len(rows) - 1))

kinds = {}
for i, (name, p) in enumerate(weights):
    if p.dim() > 1: kinds.setdefault(re.sub(r"transformer_blocks\.\d+", "blocks", name).removesuffix(".weight"), []).append(i)
gather = lambda indices: torch.stack([torch.cat([g[i] for i in indices]) for g in gradients])
found = dict(pictures=PROMPTS * GROUP, batches=BATCHES, all=agreement(gather(range(len(weights)))), kinds={k: dict(agreement=agreement(gather(v)), numbers=sum(weights[i][1].numel() for i in v)) for k, v in kinds.items()})
with atomic_write("data/halves_runs/agreement.json") as f: json.dump(found, f, indent=1)
for k, v in sorted(found["kinds"].items(), key=lambda kv: -kv[1]["agreement"]): print(f"{v['agreement']:6.3f}  {v['numbers']:8,}  {k}")
print(f"{found['all']:6.3f}  all together")
