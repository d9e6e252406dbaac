"""The card's row of the sampling loop: rounding passes without a warning, a wrong loop warns."""

import json

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT

from glm_grpo.data.rollout import Samples
from glm_grpo.model import policies, sampling
from glm_grpo.model.scoring import logprob_gap
from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.training.callbacks import JsonlLogger, ProgressBar
from glm_grpo.training.metrics import LOOP_KL
from glm_grpo.training.trainer import MinimalGRPOTrainer

TINY = str(ROOT / "data/tiny-glm-image")
BATCH = {"prompts": ["a cat in the middle on a red ground"]}
SMALL = {"height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 1.0}
HOT = {"temperature": 1.5, "top_p": 1.0}
in_loop = policies.loop_logprobs


def greenness(images):
    return images[:, 1].mean((1, 2))


def trainer_of(component="ar", dtype="float32", **changes):
    lora = {"lora": {"rank": 4}, "device": "cpu", "torch_dtype": dtype}
    model = GLMImageWrapper(TINY, component, **lora)
    options = SMALL | HOT | {"group_size": 2, "callbacks": ()} | changes
    return MinimalGRPOTrainer(model, [BATCH], greenness, **options)


def heat_the_loop(monkeypatch, factor):
    "The loop divides its logits by another temperature than scoring."

    def hot_loop(ar, inputs, prompt_index, token_ids, temperature, kept):
        return in_loop(ar, inputs, prompt_index, token_ids, factor * temperature, kept)

    monkeypatch.setattr(policies, "loop_logprobs", hot_loop)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_card_has_a_row_of_the_loop(dtype):
    card = trainer_of("both", dtype).measure_agreement(BATCH)
    assert set(card.loops) == {"ar"}  # the denoising loop computes its log-probs itself
    gap = card.loops["ar"]
    assert 0 < gap.kl < LOOP_KL[dtype == "bfloat16"] / 2 and gap.samples == 2
    assert not card.warning() and "ar: sampling loop" in str(card)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_temperature_in_the_loop_shows(dtype, monkeypatch):
    heat_the_loop(monkeypatch, 1.05)
    card = trainer_of(dtype=dtype).measure_agreement(BATCH)
    assert card.loops["ar"].mean > 0.02
    assert not card.problem() and "sampling loop differ" in card.warning()


def test_one_percent_shows_in_float32(monkeypatch):
    heat_the_loop(monkeypatch, 1.01)
    assert "sampling loop differ" in trainer_of().measure_agreement(BATCH).warning()


def test_a_run_reports_it_once_and_goes_on(monkeypatch, tmp_path, capsys):
    heat_the_loop(monkeypatch, 1.05)
    log = JsonlLogger(tmp_path / "metrics.jsonl")
    trainer = trainer_of(callbacks=[ProgressBar(), log])
    with pytest.warns(UserWarning, match="ar: log-probs of the sampling loop differ") as warned:
        first, second = trainer.train(2)
    assert len(warned) == 1 and capsys.readouterr().out.count("ar: sampling loop") == 1
    assert first["loop_gap_kl"] == trainer.agreement.loops["ar"].kl > LOOP_KL[0]
    assert {"loop_gap", "loop_gap_mean"} <= set(first) and "loop_gap" not in second
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["loop_gap_kl"] == first["loop_gap_kl"]


def test_zero_samples_measure_nothing(monkeypatch):
    monkeypatch.setattr(policies, "loop_logprobs", None)
    trainer = trainer_of(loop_samples=0)
    (line,) = trainer.train(1)
    assert trainer.agreement.loops == {} and "loop_gap" not in line


def test_it_changes_no_number_of_the_run():
    found = []
    for count in (0, 2):
        trainer = trainer_of(loop_samples=count, learning_rate=1e-3)
        found.append((trainer.train(2), trainer.model.get_trainable_parameters()))
    (lines, weights), (with_loop, same_weights) = found
    assert all(map(torch.equal, weights, same_weights))
    for line, more in zip(lines, with_loop):
        for name, value in line.items():
            assert name.startswith(("seconds", "memory")) or more[name] == value


class FloatHead(torch.nn.Module):
    "A head that computes in float32."

    def __init__(self, head):
        super().__init__()
        self.weight, self.out_features = head.weight.float(), head.out_features

    def forward(self, x):
        return F.linear(x.float(), self.weight)


@torch.no_grad()
def test_most_of_the_gap_arises_before_the_head(monkeypatch):
    "So there is no option for the precision of the head."
    model = GLMImageWrapper(TINY, "ar", lora={"rank": 4}, device="cpu", torch_dtype="bfloat16")
    prompts = [*BATCH["prompts"], "a dog", "a blue bird on a green ground"]
    sizes = {"height": 128, "width": 128, "num_inference_steps": 1, "decode": False}
    rollout = model.generate_with_tracking(prompts, **sizes, temperature=1.0, top_p=1.0)
    policy, samples = model.policies["ar"], Samples(rollout, rollout.token_logprobs, 1)
    gaps = [logprob_gap(policy.score_in_loop(samples), policy.score(samples))]
    whole = model.ar.get_base_model() if hasattr(model.ar, "get_base_model") else model.ar
    joined, head = sampling.joint_product, FloatHead(whole.lm_head)
    monkeypatch.setattr(whole, "lm_head", head)

    def keep_head(layers, merge):
        return head if layers == [head] else joined(layers, merge)

    monkeypatch.setattr(sampling, "joint_product", keep_head)
    gaps.append(logprob_gap(policy.score_in_loop(samples), policy.score(samples)))
    assert gaps[0]["kl"] < LOOP_KL[1] / 3
    assert 0.7 * gaps[0]["mean"] < gaps[1]["mean"] < gaps[0]["mean"]
