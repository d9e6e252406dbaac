"""The sampling loop records its log-probs; a run in which scoring gives others stops."""

import json

import pytest
import torch
from helpers import small_model
from PIL import Image

from glm_grpo.data.basics import refusal
from glm_grpo.model import sampler
from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.training.agreement import LOOP_KL
from glm_grpo.training.callbacks import JsonlLogger, ProgressLines
from glm_grpo.training.trainer import MinimalGRPOTrainer

TINY = small_model()
# an edit has no preview, so its tokens are sampled in 16 steps and not in 272
BATCH = {"prompts": ["make it red"], "source_images": [[Image.new("RGB", (128, 128), "olive")]]}
SMALL = {"height": 128, "width": 128, "num_inference_steps": 2, "guidance_scale": 1.0}
HOT = {"temperature": 1.5, "top_p": 1.0}
score_tokens, sample_tokens = sampler.score_tokens, sampler.sample_tokens


def greenness(images):
    return images[:, 1].mean((1, 2))


def trainer_of(component="ar", dtype="float32", **changes):
    lora = {"lora": {"rank": 4}, "device": "cpu", "torch_dtype": dtype}
    model = GLMImageWrapper(TINY, component, **lora)
    options = SMALL | HOT | {"group_size": 2, "callbacks": (), "learning_rate": 1e-3}
    options |= {"mode": "i2i"} | changes
    return MinimalGRPOTrainer(model, [BATCH], greenness, **options)


def spoil_scoring(monkeypatch, change):
    "Old and new log-probs have the same error, so their ratio is 1."
    monkeypatch.setattr(sampler, "score_tokens", lambda *args: change(score_tokens(*args)))


def heat_the_loop(monkeypatch, factor):
    "The sampling loop divides its logits by another temperature than scoring."

    def hot_loop(model, inputs, index, uniforms, temperature, top_p):
        return sample_tokens(model, inputs, index, uniforms, factor * temperature, top_p)

    monkeypatch.setattr(sampler, "sample_tokens", hot_loop)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_card_has_a_row_of_the_loop(dtype):
    card = trainer_of("both", dtype).measure_agreement(BATCH)
    assert set(card.loops) == {"ar"}  # the denoising loop's log-probs are the old ones
    assert 0 < card.loops["ar"].kl < LOOP_KL[dtype == "bfloat16"] / 2
    assert not card.problem() and not card.warning()
    assert "ar: scoring and the sampling loop" in str(card)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "fault, changes",
    [("shifted", {}), ("times 1.3", {"mini_batches": 2}), ("hot loop", {"updates_per_rollout": 2})],
)
def test_an_error_in_one_of_the_two_stops_before_any_weight_changes(
    monkeypatch, fault, dtype, changes
):
    if fault == "hot loop":
        heat_the_loop(monkeypatch, 1.5)
    else:
        shift = fault == "shifted"
        spoil_scoring(monkeypatch, lambda x: x.roll(1, 1) if shift else 1.3 * x)
    trainer = trainer_of(dtype=dtype, **changes)
    before = [weight.detach().clone() for weight in trainer.model.get_trainable_parameters()]
    message = refusal(trainer.train, 1)
    assert "ar: scoring and the sampling loop differ" in message and "allow_ratio_gap" in message
    assert all(map(torch.equal, trainer.model.get_trainable_parameters(), before))
    assert trainer.step == 0 and trainer.agreement is None


def test_one_percent_of_temperature_stops_in_float32(monkeypatch):
    heat_the_loop(monkeypatch, 1.01)
    assert "sampling loop" in refusal(trainer_of().train, 1)


def test_an_adapter_that_is_lost_later_is_found_in_its_step(monkeypatch):
    "Sampling goes on without the adapter, as if its weights had not reached the loop."
    trainer = trainer_of(lr_scheduler="constant", learning_rate=0.1)
    assert len(trainer.train(2)) == 2
    learned = [weight.detach().clone() for weight in trainer.model.get_trainable_parameters()]

    def stale(model, *args):
        with trainer.model.reference():
            return sample_tokens(model, *args)

    monkeypatch.setattr(sampler, "sample_tokens", stale)
    assert "sampling loop" in refusal(trainer.train, 1)
    assert all(map(torch.equal, trainer.model.get_trainable_parameters(), learned))


def test_allow_ratio_gap_warns_once_and_trains(monkeypatch, tmp_path, capsys):
    heat_the_loop(monkeypatch, 1.05)
    log = JsonlLogger(tmp_path / "metrics.jsonl")
    trainer = trainer_of(callbacks=[ProgressLines(), log], allow_ratio_gap=True)
    with pytest.warns(UserWarning, match="ar: scoring and the sampling loop differ") as warned:
        lines = trainer.train(2)
    assert len(warned) == 1 and capsys.readouterr().out.count("ar: scoring and the sampling") == 1
    assert lines[0]["loop_gap_kl"] == trainer.agreement.loops["ar"].kl > LOOP_KL[0]
    written = (tmp_path / "metrics.jsonl").read_text().splitlines()
    for line, text in zip(lines, written):  # every step measures it
        assert line["loop_gap"] > line["loop_gap_mean"] > 0.01
        assert json.loads(text)["loop_gap_kl"] == line["loop_gap_kl"]


def test_a_rollout_that_is_not_scored_has_the_logprobs_of_the_loop():
    model = GLMImageWrapper(TINY, "ar", lora={"rank": 4}, device="cpu")
    rollout = model.generate_with_tracking(["a cat", "a cat"], decode=False, score=False, **SMALL)
    assert rollout.token_logprobs is None
    assert rollout.sampling_logprobs.shape == rollout.token_ids.shape
