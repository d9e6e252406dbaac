"""Each option of the trainer changes what it says it changes, and nothing else.

A row has a value of the option, what a run needs so that the value matters, and the names of all
that then differs from a run with the same needs and the option's default.
"""

import functools
import sys
from dataclasses import fields, is_dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from helpers import coarse_compile, read_json, small_model
from PIL import Image

from glm_grpo.data.basics import UserError
from glm_grpo.model import sampler
from glm_grpo.model.latents import decode_latents
from glm_grpo.model.sampling import sample_tokens
from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.rewards.calling import RewardError
from glm_grpo.rewards.weighted import Rewards, WeightedReward
from glm_grpo.training.experience import compare_samples
from glm_grpo.training.options import TrainerOptions
from glm_grpo.toy import ICONS, ToyStudio, icon_images, nearness
from glm_grpo.training.trainer import MinimalGRPOTrainer

PROMPTS = list(ICONS)[:3]
BATCH = {"prompts": PROMPTS, "target_images": icon_images(PROMPTS)}
BOTH = {"ar", "dit"}  # the weights and gradient norms of the two policies


RUNS = {}  # needs of a row, and what else counts -> its run with the default


class Row(NamedTuple):
    "An option's value, what differs, and what else both runs are given."

    value: Any
    differs: set[str]
    needs: dict = {}


def flat_for_one(images, prompts):
    "All rewards of the first prompt are equal."
    first = torch.tensor([prompt == PROMPTS[0] for prompt in prompts])
    return torch.where(first, torch.tensor(0.5), images[:, 0].mean((1, 2)))


def gaps(images, prompts):
    "One image of the first prompt has no score."
    rewards = images[:, 0].mean((1, 2))
    rewards[prompts.index(PROMPTS[0])] = float("nan")
    return rewards


def weighted():
    "Two parts, the second with a wide range."
    parts = {"near": nearness, "wide": lambda images: 9 * images[:, 2].mean((1, 2))}
    return WeightedReward(parts, {"near": 1.0, "wide": 1.0})


# ratios far from 1
FAR = {"updates_per_rollout": 16, "learning_rate": 1.0, "dit_learning_rate": 4e-4}
TWO_STEPS = {"steps": 2}
NOT_FINITE = {"scores": float("nan"), "steps": 5, "updates_per_rollout": 1, "allow_ratio_gap": True}


def signs(rewards, group_size):
    "Advantages of plus and minus one."
    groups = rewards.view(-1, group_size)
    return (groups - groups.mean(1, keepdim=True)).sign().flatten()


TOY = {
    "height": Row(64, {"size"}),
    "width": Row(96, {"size"}),
    "normalise": Row("group", BOTH, {"reward": weighted}),
    "max_bad_steps": Row(2, BOTH | {"rollout", "scored", "lines", "end"}, NOT_FINITE),
    "micro_batch_size": Row(5, {"scored", "scored at sampling"}),
    "updates_per_rollout": Row(2, BOTH | {"scored"}),
    "mini_batches": Row(2, BOTH | {"scored"}),
    "allow_ratio_gap": Row(True, BOTH | {"end", "scored", "lines"}, {"scores": 1.3}),
    "seed": Row(1, BOTH | {"rollout"}),
    "mode": Row("i2i", {"checkpoint"}),
    "learning_rate": Row(0.1, {"ar", "lines"}),
    "dit_learning_rate": Row(1e-5, {"dit", "lines"}),
    "lr_scheduler": Row("linear", BOTH | {"lines"}, TWO_STEPS),
    "warmup_steps": Row(3, BOTH | {"lines"}),
    "adam_epsilon": Row(1.0, {"ar"}),
    "dit_adam_epsilon": Row(1.0, {"dit"}),
    "weight_decay": Row(0.5, BOTH),
    "optimizer": Row("adamw_8bit", BOTH),
    "max_grad_norm": Row(1e-6, BOTH),
    "ema_decay": Row(0.5, {"average"}),
    "slow_copy_decay": Row(0.5, {"slow copy"}),
    "group_size": Row(3, BOTH | {"rollout", "scored"}),
    "images_per_sample": Row(3, BOTH | {"rollout", "scored"}),
    "equal": Row("drop", BOTH | {"scored"}, {"reward": lambda: flat_for_one}),
    "scale": Row("batch", BOTH),
    "advantages": Row(f"{__file__}:signs", BOTH),
    "advantage_clip": Row(0.1, BOTH),
    "advantage_epsilon": Row(0.2, BOTH | {"scored"}),
    "missing_scores": Row("stop", BOTH | {"end", "scored", "lines"}, {"reward": lambda: gaps}),
    "entropy_share": Row(0.3, {"ar"}, {"steps": 2}),
    "clip_range": Row(0.01, {"ar"}),
    "dit_clip_range": Row(0.01, {"dit"}),
    "clip_range_high": Row(0.01, {"ar"}),
    "dit_clip_range_high": Row(0.01, {"dit"}),
    # tokens of one place share their probability: only there a ratio rises against its advantage
    "delta": Row(1.5, {"ar"}, FAR),
    "dit_delta": Row(1.0002, {"dit"}, FAR | {"dit_clip_range": 1e-4}),
    "loss_type": Row("cispo", BOTH),
    "divergence": Row(1e-9, BOTH, {"loss_type": "dppo", "dit_clip_range": 1e-4}),
    "importance_sampling_level": Row("sequence", BOTH),
    "beta": Row(0.5, BOTH),
    "dit_beta": Row(0.5, {"dit"}),
    "kl_estimator": Row("k2", BOTH, {"beta": 0.5}),
    "bias_correction_kl": Row(True, BOTH, {"beta": 0.5}),
}
MATCHING = {"dit_objective": "matching", "num_inference_steps": 4, "matching_times": 2}
REAL = {
    "dit_kl": Row("velocity", {"dit"}, {"beta": 0.5}),
    "num_inference_steps": Row(4, {"images", "decisions", "dit"}),
    "guidance_scale": Row(1.5, {"images", "dit"}),
    "guided_share": Row(0.5, {"images"}, {"guidance_scale": 2.0}),
    "temperature": Row(3.0, {"tokens", "ar", "images", "dit"}),
    "top_p": Row(0.7, {"tokens", "ar", "images", "dit"}),
    "noise_level": Row(0.2, {"images", "dit"}),
    "sde_type": Row("dance", {"images", "dit"}),
    "window": Row(1, {"images", "decisions", "dit"}),
    "window_kind": Row("first", {"images", "decisions", "dit"}, {"window": 1}),
    "ratio_norm": Row(True, {"dit"}),
    "dit_objective": Row("matching", {"images", "decisions", "dit"}, {"matching_times": 1}),
    "matching_times": Row(1, {"decisions", "dit"}, MATCHING),
    "matching_weight": Row("uniform", {"dit"}, MATCHING),
    "matching_guidance": Row(2.0, {"dit"}, MATCHING),
    "pairs_churn": Row(0.5, {"images", "dit"}, {"dit_objective": "pairs", "pairs_churn": 0.1}),
    "shared_noise": Row(False, {"images", "dit"}),
    "batch_size": Row(3, {"image batches"}),
    "token_batch_size": Row(3, {"token batches"}),
    "compile": Row(True, {"images"}),  # the last step is no decision
    "float8": Row(True, {"images"}),
}


def test_each_option_has_a_row():
    names = set()
    for f in fields(TrainerOptions):
        names |= {inner.name for inner in fields(f.type)} if is_dataclass(f.type) else {f.name}
    # they act from the second update or step on: tests/test_matching.py
    elsewhere = {"dit_pull", "dit_pull_slow", "slow_copy_growth", "slow_copy_flat", "nft_mix"}
    elsewhere |= {"pairs_clip", "preview_share"}  # tests/test_methods.py, 3_model/12_policies
    assert names == set(TOY) | set(REAL) | elsewhere


def test_options_and_single_values_are_not_mixed():
    "It would be open which one counts."
    for single in ({"group_size": 16}, {"beta": 0.1}, {"micro_batch_size": None}):
        with pytest.raises(UserError, match=f"together with {next(iter(single))}"):
            MinimalGRPOTrainer(
                ToyStudio(PROMPTS), [BATCH], nearness, options=TrainerOptions(), **single
            )
    trainer = MinimalGRPOTrainer(ToyStudio(PROMPTS), [BATCH], nearness, options=TrainerOptions())
    assert trainer.group_size == TrainerOptions().grpo.group_size


def toy_run(folder, steps=1, reward=lambda: nearness, scores=1.0, **options):
    "What a training of the toy studio leaves. scores: a factor of the log-probs in the update."
    base = {"group_size": 4, "learning_rate": 0.3, "dit_learning_rate": 1e-4}
    base |= {"dit_clip_range": 0.2, "lr_scheduler": "constant", "updates_per_rollout": 4}
    base |= {"callbacks": ()}
    trainer = MinimalGRPOTrainer(ToyStudio(PROMPTS), [BATCH], reward(), **base | options)
    scored, sizes, first = [], set(), set()
    generate = trainer.model.generate_with_tracking

    def note_terms(policy):
        terms = policy.terms

        def noted(chunk, *rest):
            scored.append((policy.name, len(chunk)))
            found = terms(chunk, *rest)
            return replace(found, logprobs=found.logprobs * scores)

        policy.terms = noted

    def noted_generate(*given, height, width, score_batch_size, **more):
        sizes.add((height, width))
        first.add(score_batch_size)
        return generate(*given, **more)

    for policy in trainer.policies.values():
        note_terms(policy)
    trainer.model.generate_with_tracking = noted_generate
    end = ""
    try:
        trainer.train(steps)
    except (UserError, RewardError) as e:
        end = type(e).__name__
    rollout, found = trainer.collector.last_rollout, {}
    for name, policy in trainer.policies.items():
        norms = [line.get(f"{name}/grad_norm", 0.0) for line in trainer.history]
        found[name] = torch.cat([policy.parameters()[0].detach().flatten(), torch.tensor(norms)])
    averages = {"average": trainer.optimizer.ema, "slow copy": trainer.optimizer.slow}
    trainer.learner.half_done = False
    trainer.save_checkpoint(folder)
    return found | {
        "rollout": torch.cat([rollout.token_ids.flatten().float(), rollout.denoising.flatten()]),
        "size": sizes,
        "scored": scored,
        "scored at sampling": first,
        "lines": [
            (line["ar/learning_rate"], line["dit/learning_rate"]) for line in trainer.history
        ],
        "end": (trainer.step, end),
        **{k: v and [p.tolist() for p in v.shadow_params] for k, v in averages.items()},
        "checkpoint": read_json(folder / "trainer.json")["made_by"]["mode"],
    }


def differences(one, other, rounding=1e-5):
    "The names of what differs by more than rounding."
    names = set()
    for name, value in one.items():
        if not isinstance(value, torch.Tensor):
            same = value == other[name]
        else:
            same = value.shape == other[name].shape and torch.allclose(
                value, other[name], atol=rounding, rtol=rounding, equal_nan=True
            )
        if not same:
            names.add(name)
    return names


class Descent(torch.optim.SGD):
    "In place of AdamW, which turns the rounding of a zero gradient into a whole step."

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad *= 100
        super().step()


@pytest.mark.filterwarnings("ignore:The ratio new/old", "ignore:No score")
@pytest.mark.parametrize("name", TOY)
def test_an_option_of_training_acts(name, tmp_path, monkeypatch):
    if name == "optimizer":  # a stand-in for bitsandbytes
        stand_in = ModuleType("bitsandbytes.optim")
        stand_in.AdamW8bit = stand_in.PagedAdamW8bit = lambda groups, **_: Descent(groups)
        monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
        monkeypatch.setitem(sys.modules, "bitsandbytes.optim", stand_in)
    elif "epsilon" not in name:
        monkeypatch.setattr("torch.optim.AdamW", Descent)
    row = TOY[name]
    key = torch.optim.AdamW, repr(row.needs)
    if key not in RUNS:
        RUNS[key] = toy_run(tmp_path / "before", **row.needs)
    after = toy_run(tmp_path / "after", **row.needs | {name: row.value})
    assert differences(RUNS[key], after) == row.differs


def test_a_sample_whose_advantage_is_exactly_zero_is_counted_with_its_group():
    rewards = torch.tensor([0.0, 0.5, 1.0, 2.0, 2.0, 2.0])
    options = TrainerOptions().with_changes(equal="drop")
    _, advantages, counted = compare_samples(Rewards(rewards), None, 3, 1, options)
    assert advantages[1] == 0 and counted.tolist() == [True] * 3 + [False] * 3


@functools.cache
def tiny():
    "Both policies, moved away from their reference."
    model = GLMImageWrapper(small_model(), "both", lora={"rank": 4}, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.get_trainable_parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return model


# an edit has no preview, so its tokens are sampled in 4 steps and not in 260
SOURCES = [[Image.new("RGB", (64, 64), colour)] for colour in ("olive", "navy")]


def real_run(monkeypatch, **options):
    "What a rollout and its gradient have; the advantages are always the same."
    base = {"group_size": 2, "height": 64, "width": 64, "guidance_scale": 1.0, "callbacks": ()}
    base |= {"temperature": 1.5, "top_p": 1.0, "micro_batch_size": None, "mode": "i2i"}
    decoded, sampled = [], []

    def noted_decode(pipe, latents):
        decoded.append(len(latents))
        return decode_latents(pipe, latents)

    def noted_sample(ar, inputs, index, *more):
        sampled.append(len(index))
        return sample_tokens(ar, inputs, index, *more)

    monkeypatch.setattr(sampler, "decode_latents", noted_decode)
    monkeypatch.setattr(sampler, "sample_tokens", noted_sample)
    trainer = MinimalGRPOTrainer(
        tiny(), [], lambda images: images.mean((1, 2, 3)), **base | options
    )
    experience = trainer.collect({"prompts": ["make it red", "two dogs"], "source_images": SOURCES})
    for name, samples in experience.samples.items():
        alternating = 1 - 2.0 * (torch.arange(len(samples)) % 2)
        experience.samples[name] = samples.with_advantages(alternating, samples.counted)
    trainer.last_experience = experience
    metrics = trainer.learner.gradients(next(trainer.learner.minibatches(experience, trainer.step)))
    trainer.optimizer.zero_grad()
    rollout = experience.rollout
    return {
        "tokens": rollout.token_ids.tolist(),
        "images": rollout.image_tensors,
        "decisions": list(rollout.denoising.decisions),
        "image batches": decoded,
        "token batches": sampled,
        "ar": torch.tensor([metrics["ar"][key] for key in ("grad_norm", "kl")]),
        "dit": torch.tensor([metrics["dit"][key] for key in ("grad_norm", "kl")]),
    }


@pytest.mark.parametrize("name", REAL)
def test_an_option_of_the_rollout_acts(name, monkeypatch):
    row = REAL[name]
    key = repr(row.needs)
    if key not in RUNS:
        RUNS[key] = real_run(monkeypatch, **row.needs)
    with monkeypatch.context() as context:
        context.setattr(torch, "compile", coarse_compile)
        context.setattr(tiny(), "compiled", None)
        after = real_run(monkeypatch, **row.needs | {name: row.value})
    assert differences(RUNS[key], after, rounding=1e-3) == row.differs
