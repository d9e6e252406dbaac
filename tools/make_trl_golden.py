"""Makes tests/golden/trl_loss.json: losses, gradients and metrics that TRL's own
GRPOTrainer._compute_loss gives for a small batch.

In an environment of its own (TRL needs packages that this project does not):
    pip install torch==2.13.0 transformers==5.23.0 trl==1.16.0
    python tools/make_trl_golden.py

The notebook 1_maths/03_loss compares compute_grpo_loss with the file; TRL is not needed for that.
"""

import itertools
import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from trl import GRPOConfig, GRPOTrainer

PATH = Path(__file__).parents[1] / "tests" / "golden" / "trl_loss.json"
DEFAULT = {name: f.default for name, f in GRPOConfig.__dataclass_fields__.items()}
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
KL_OPTIONS = ({}, {"beta": 0.04}, {"beta": 0.04, "bias_correction_kl": True})
WIDE = {"cispo": 1.1}  # clip_range_high: for cispo the ceiling of the ratio itself, else 0.28
RAGGED = [[1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 1, 1]]  # row 2 has no decision at all


class Standin(SimpleNamespace):
    "What _compute_loss asks of `self`; the log-probs are a leaf tensor, not a model's output."

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return self.logprobs, torch.zeros_like(self.logprobs), None


def make_standin(logprobs, options):
    "A trainer with options under this project's names."
    low = options.get("clip_range", DEFAULT["epsilon"])
    arguments = SimpleNamespace(
        use_bias_correction_kl=options.get("bias_correction_kl", False),
        delta=options.get("delta"),
        steps_per_generation=1,
        sapo_temperature_pos=DEFAULT["sapo_temperature_pos"],
        sapo_temperature_neg=DEFAULT["sapo_temperature_neg"],
    )
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    return Standin(
        logprobs=logprobs,
        model=SimpleNamespace(training=True),
        loss_type=options["loss_type"],
        beta=options.get("beta", 0.0),
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        epsilon_low=low,
        epsilon_high=options.get("clip_range_high", low),
        max_completion_length=options.get("max_length", logprobs.shape[1]),
        current_gradient_accumulation_steps=1,
        args=arguments,
        accelerator=accelerator,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


def trl_loss(logprobs, inputs, options, num_decisions):
    "TRL's loss and metrics."
    standin = make_standin(logprobs, options)
    ids = torch.zeros_like(inputs["mask"])
    batch = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": ids[:, :0],
        "completion_ids": ids,
        "completion_mask": inputs["mask"],
        "advantages": inputs["advantages"],
        "old_per_token_logps": inputs["old_logprobs"],
        "ref_per_token_logps": inputs["ref_logprobs"],
        "num_items_in_batch": torch.tensor(float(num_decisions)),
    }
    loss = GRPOTrainer._compute_loss(standin, None, batch)
    return loss, standin._metrics["train"]


def record(inputs, options):
    "One case: TRL's loss, gradient, clip fraction and KL."
    logprobs = inputs["new_logprobs"].clone().requires_grad_()
    num_decisions = options.get("num_decisions", inputs["mask"].sum())
    loss, metrics = trl_loss(logprobs, inputs, options, num_decisions)
    loss.backward()
    clip = metrics.get("clip_ratio/region_mean", metrics.get("cispo_clip_ratio", [0.0]))
    return {
        "options": options,
        "loss": loss.item(),
        "grad": logprobs.grad.tolist(),
        "clip_fraction": clip[0],
        "kl": metrics["kl"][0] if "kl" in metrics else 0.0,
    }


def make_inputs():
    "A batch of 4 rows of 3 decisions."
    g = torch.Generator().manual_seed(0)

    def sample(*size):
        numbers = torch.randn(*size, generator=g, dtype=torch.float64)
        return torch.round(numbers, decimals=3)

    rows, decisions = 4, 3
    old = -sample(rows, decisions).abs() - 1
    return {
        "new_logprobs": old + 0.5 * sample(rows, decisions),
        "old_logprobs": old,
        "ref_logprobs": old + 0.3 * sample(rows, decisions),
        "advantages": torch.tensor([1.2, -0.9, 0.0, -1.4], dtype=torch.float64),
        "mask": torch.ones(rows, decisions, dtype=torch.long),
    }


def make_options(loss_type, level, wide, kl, delta):
    "The options of a case, under this project's names."
    options = {"loss_type": loss_type, "importance_sampling_level": level, **kl}
    if wide:
        options["clip_range_high"] = WIDE.get(loss_type, 0.28)
    if delta:
        options["delta"] = delta
    if wide and loss_type == "dr_grpo":
        options["max_length"] = 7
    if wide and loss_type in ("dapo", "cispo"):
        options["num_decisions"] = 20
    return options


def make_cases(inputs):
    "All combinations that TRL has."
    cases = []
    ragged = inputs | {"mask": torch.tensor(RAGGED)}
    choices = (
        LOSS_TYPES,
        ("token", "sequence"),
        (False, True),
        KL_OPTIONS,
        (None, 1.5),
        ("full", "ragged"),
    )
    for loss_type, level, wide, kl, delta, mask in itertools.product(*choices):
        if delta and loss_type in ("cispo", "sapo"):
            continue  # they have no two-sided clipping
        options = make_options(loss_type, level, wide, kl, delta)
        case = record(ragged if mask == "ragged" else inputs, options)
        cases.append({"mask": mask, **case})
    return cases


def rounded(x):
    "Ten digits of each number."
    if isinstance(x, float):
        return float(f"{x:.10g}")
    if isinstance(x, list):
        return [rounded(v) for v in x]
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    return x


def main():
    inputs = make_inputs()
    cases = make_cases(inputs)
    assert all(math.isfinite(case["loss"]) for case in cases)
    lists = {name: tensor.tolist() for name, tensor in inputs.items()}
    parts = {
        "command": json.dumps("python tools/make_trl_golden.py"),
        "trl": json.dumps(trl.__version__),
        "torch": json.dumps(torch.__version__.split("+")[0]),
        "inputs": json.dumps(rounded(lists | {"ragged": RAGGED})),
        "cases": "[\n"
        + ",\n".join(json.dumps(rounded(case)) for case in cases)
        + "\n]",  # readable diffs
    }
    text = "{\n" + ",\n".join(f'"{k}": {v}' for k, v in parts.items()) + "\n}\n"
    json.loads(text)
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(text)
    size = len(text) // 1000
    print(f"{PATH}: {len(cases)} cases, {size} kB")


if __name__ == "__main__":
    main()
