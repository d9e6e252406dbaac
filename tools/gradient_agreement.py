"""Where in the DiT do independent batches pull the same way? Writes
results/halves_runs/agreement.json, which the notebook about evaluation shows.

    python tools/gradient_agreement.py

For each kind of weight: the mean cosine between the policy gradients of independent batches of 64
images, before any training. 1: one batch says all; 0: noise. About three minutes on an idle core.
"""

import json
import re

import torch
from torch import Tensor

from glm_grpo.data.basics import atomic_write
from glm_grpo.data.prompts import read_lines
from glm_grpo.maths.advantages import compute_advantages
from glm_grpo.maths.noise import SampleNames
from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.rewards.scenes import DetailCheck

BATCHES, PROMPTS, GROUP = 10, 8, 8
OUT = "results/halves_runs/agreement.json"


def policy_gradient(model: GLMImageWrapper, reward, prompts: list[str], step: int) -> list[Tensor]:
    "The gradient of the advantage-weighted log-probs of one batch, for each weight of the DiT."
    few = [prompts[(PROMPTS * step + i) % len(prompts)] for i in range(PROMPTS)]
    rollout = model.generate_with_tracking(
        few,
        # the images of a group are made of the same tokens: only the DiT's noise differs
        names=SampleNames.grow(0, step, few, samples=1, images=GROUP),
        height=128,
        width=128,
        num_inference_steps=3,
        guidance_scale=2.0,
        noise_level=0.7,
        sde_type="cps",
        score_batch_size=GROUP,
    )
    policy = model.policies["dit"]
    samples = policy.samples(rollout, GROUP)
    advantages = compute_advantages(reward(rollout.image_tensors), GROUP, "group")
    for start in range(0, len(samples), GROUP):
        own = slice(start, start + GROUP)
        for chunk in policy.chunks(samples.rows(own)):
            (policy.score(chunk)[:, 0] * advantages[own]).sum().backward()
    gradients = []
    for p in model.dit.parameters():
        if p.requires_grad:
            gradients.append(torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().clone())
    model.dit.zero_grad(set_to_none=True)
    return gradients


def agreement(gradients: list[list[Tensor]], indices) -> float:
    "Mean cosine of all pairs of batches, over the weights with these numbers."
    rows = torch.stack([torch.cat([batch[i] for i in indices]) for batch in gradients])
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return ((unit @ unit.T).sum().item() - len(rows)) / (len(rows) * (len(rows) - 1))


def main() -> None:
    torch.set_num_threads(1)
    model = GLMImageWrapper("data/tiny-glm-image", "dit", torch_dtype="float32", device="cpu")
    reward, prompts = DetailCheck("data/drawings"), read_lines("data/words/train/prompts.txt")
    gradients = []
    for step in range(BATCHES):
        gradients.append(policy_gradient(model, reward, prompts, step))
        print(f"batch {step + 1} of {BATCHES}", flush=True)
    weights = [(name, p) for name, p in model.dit.named_parameters() if p.requires_grad]
    kinds = {}  # kind of matrix -> the numbers of its weights, those of all blocks together
    for i, (name, p) in enumerate(weights):
        if p.dim() > 1:
            kind = re.sub(r"transformer_blocks\.\d+", "blocks", name).removesuffix(".weight")
            kinds.setdefault(kind, []).append(i)
    together = agreement(gradients, range(len(weights)))
    found = {"pictures": PROMPTS * GROUP, "batches": BATCHES, "all": together, "kinds": {}}
    for kind, own in kinds.items():
        numbers = sum(weights[i][1].numel() for i in own)
        found["kinds"][kind] = {"agreement": agreement(gradients, own), "numbers": numbers}
    with atomic_write(OUT) as f:
        json.dump(found, f, indent=1)
    for kind, one in sorted(found["kinds"].items(), key=lambda item: -item[1]["agreement"]):
        print(f"{one['agreement']:6.3f}  {one['numbers']:8,}  {kind}")
    print(f"{together:6.3f}  all together")


if __name__ == "__main__":
    main()
