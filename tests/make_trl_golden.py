"""Makes data/golden/trl_loss.json: losses, gradients and metrics that TRL's own GRPOTrainer._compute_loss gives for a small batch.

In an environment of its own (TRL needs packages that this project does not):
    pip install torch==2.13.0 transformers==5.23.0 trl==1.16.0 && python tests/make_trl_golden.py
The notebook 02_loss compares compute_grpo_loss with the file; TRL is not needed for that.
"""
import itertools, json, math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
import torch, trl
from trl import GRPOConfig, GRPOTrainer

DEFAULT = {k: f.default for k, f in GRPOConfig.__dataclass_fields__.items()}


class Standin(SimpleNamespace):
    "What _compute_loss asks of `self`; the log-probs are a leaf tensor instead of a model's output."
    def _get_per_token_logps_and_entropies(self, *args, **kwargs): return self.logprobs, torch.zeros_like(self.logprobs), None


def trl_loss(logprobs, inputs, o, num_decisions, accumulation=1):
    "TRL's loss and metrics for options under this project's names."
    self = Standin(
        logprobs=logprobs, model=SimpleNamespace(training=True), loss_type=o["loss_type"], beta=o.get("beta", 0.0),
        importance_sampling_level=o.get("importance_sampling_level", "token"), epsilon_low=o.get("clip_range", DEFAULT["epsilon"]),
        max_completion_length=o.get("max_length", logprobs.shape[1]), current_gradient_accumulation_steps=accumulation,
        args=SimpleNamespace(use_bias_correction_kl=o.get("bias_correction_kl", False), delta=o.get("delta"), steps_per_generation=accumulation,
                             sapo_temperature_pos=DEFAULT["sapo_temperature_pos"], sapo_temperature_neg=DEFAULT["sapo_temperature_neg"]),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)))
    self.epsilon_high = o.get("clip_range_high", self.epsilon_low)
    ids = torch.zeros_like(inputs["mask"])
    loss = GRPOTrainer._compute_loss(self, None, dict(
        prompt_ids=ids[:, :0], prompt_mask=ids[:, :0], completion_ids=ids, completion_mask=inputs["mask"], advantages=inputs["advantages"],
        old_per_token_logps=inputs["old_logprobs"], ref_per_token_logps=inputs["ref_logprobs"], num_items_in_batch=torch.tensor(float(num_decisions))))
    return loss, self._metrics["train"]


def record(inputs, o):
    "One case: TRL's loss, gradient, clip fraction and KL."
    lp = inputs["new_logprobs"].clone().requires_grad_()
    loss, m = trl_loss(lp, inputs, o, o.get("num_decisions", inputs["mask"].sum()))
    loss.backward()
    clip = m.get("clip_ratio/region_mean", m.get("cispo_clip_ratio", [0.0]))[0]
    return dict(options=o, loss=loss.item(), grad=lp.grad.tolist(), clip_fraction=clip, kl=m["kl"][0] if "kl" in m else 0.0)


def record_halves(inputs, o):
    "The same batch as two micro-batches of an accumulation window: the sum of losses and the gradients."
    lp = inputs["new_logprobs"].clone().requires_grad_()
    n, total = len(lp) // 2, 0.0
    for rows in (slice(0, n), slice(n, 2 * n)):
        loss, _ = trl_loss(lp[rows], {k: v[rows] for k, v in inputs.items()}, o, inputs["mask"].sum(), accumulation=2)
        loss.backward(); total += loss.item()
    return dict(options=o, loss=total, grad=lp.grad.tolist())


def rounded(x):
    if isinstance(x, float): return float(f"{x:.10g}")
    if isinstance(x, list): return [rounded(v) for v in x]
    return {k: rounded(v) for k, v in x.items()} if isinstance(x, dict) else x


def main():
    g = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.round(torch.randn(*size, generator=g, dtype=torch.float64), decimals=3)
    N, T = 4, 3
    old = -draw(N, T).abs() - 1
    inputs = dict(new_logprobs=old + 0.5 * draw(N, T), old_logprobs=old, ref_logprobs=old + 0.3 * draw(N, T),
                  advantages=torch.tensor([1.2, -0.9, 0.0, -1.4], dtype=torch.float64), mask=torch.ones(N, T, dtype=torch.long))
    ragged = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 1, 1]])     # row 2 has no decision at all
    high = dict(cispo=1.1)                                                  # for cispo the ceiling of the ratio itself
    cases = []
    for loss_type, level, wide, kl, delta, mask in itertools.product(
            ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"), ("token", "sequence"), (False, True),
            ({}, dict(beta=0.04), dict(beta=0.04, bias_correction_kl=True)), (None, 1.5), ("full", "ragged")):
        if delta and loss_type in ("cispo", "sapo"): continue               # they have no two-sided clipping
        o = dict(loss_type=loss_type, importance_sampling_level=level, **kl)
        if wide: o["clip_range_high"] = high.get(loss_type, 0.28)
        if delta: o["delta"] = delta
        if wide and loss_type == "dr_grpo": o["max_length"] = 7
        if wide and loss_type in ("dapo", "cispo"): o["num_decisions"] = 20
        cases.append(dict(mask=mask) | record(inputs | (dict(mask=ragged) if mask == "ragged" else {}), o))
    halves = [record_halves(inputs, dict(loss_type=t, beta=0.04)) for t in ("grpo", "dr_grpo", "dapo", "cispo", "sapo")]
    out = dict(command="python tests/make_trl_golden.py", trl=trl.__version__, torch=torch.__version__.split("+")[0],
               inputs={k: v.tolist() for k, v in inputs.items()} | dict(ragged=ragged.tolist()), cases=cases, halves=halves)
    assert all(math.isfinite(c["loss"]) for c in cases + halves)
    path = Path(__file__).parents[1] / "data" / "golden" / "trl_loss.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = lambda v: "[\n" + ",\n".join(json.dumps(rounded(c)) for c in v) + "\n]" if v in (cases, halves) else json.dumps(rounded(v))
    text = "{\n" + ",\n".join(f'"{k}": {lines(v)}' for k, v in out.items()) + "\n}\n"      # a case a line: readable diffs
    json.loads(text); path.write_text(text)
    print(f"{path}: {len(cases)} cases, {len(halves)} in two micro-batches, {len(text) // 1000} kB")


if __name__ == "__main__": main()
