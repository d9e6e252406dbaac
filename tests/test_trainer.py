"""What must hold for the trainer, on the toy painter: no transformers, no diffusers, seconds."""

import copy
import random
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from glm_grpo.data.rollout import Terms
from glm_grpo.data.basics import refusal
from glm_grpo.data.loader import make_dataloader
from glm_grpo.maths.advantages import compare_rewards, gdpo_advantages
from glm_grpo.maths.loss import LEVELS, LOSSES, compute_grpo_loss
from glm_grpo.rewards.calling import RewardError
from glm_grpo.rewards.weighted import WeightedReward
from glm_grpo.training.callbacks import Callback, ImageStatistics, ProgressLines
from glm_grpo.training.interrupts import NotFinite
from glm_grpo.training.ranks import Ranks
from glm_grpo.toy import ICONS, ToyPainter, ToyStudio, TokenTable, icon_images, nearness
from glm_grpo.training.trainer import MinimalGRPOTrainer

PROMPTS = list(ICONS)
TARGETS = icon_images(PROMPTS)
BATCH = {"prompts": PROMPTS, "target_images": TARGETS}


def toy_trainer(batches=None, reward=nearness, model=None, **changes):
    options = {"group_size": 8, "learning_rate": 0.3, "lr_scheduler": "constant"}
    options |= {"callbacks": ()} | changes
    return MinimalGRPOTrainer(model or ToyPainter(PROMPTS), batches or [BATCH], reward, **options)


def studio_trainer(reward=nearness, **changes):
    return toy_trainer(reward=reward, model=ToyStudio(PROMPTS), **changes)


def table(trainer):
    return trainer.policies["ar"].table


def perturb(trainer, size=0.3):
    "Move the weights, so that ratios leave 1."
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in trainer.model.weights():
            weight += size * torch.randn(weight.shape, generator=generator)


def keep_gradients(trainer):
    "The optimizer's steps note the gradients of all policies and move nothing."
    found = []

    def note():
        found.append([weight.grad.clone() for weight in trainer.model.weights()])

    trainer.optimizer.step = note
    return found


def difference(a, b):
    return ((a - b).norm() / b.norm()).item()


def heart_is_flat(images, prompts):
    "The first prompt's rewards are all equal."
    hearts = torch.tensor([prompt == "a red heart" for prompt in prompts])
    return torch.where(hearts, torch.tensor(0.5), images[:, 0].mean((1, 2)))


def constant(images):
    return torch.full((len(images),), 0.1)


def blueness(images):
    return images[:, 2].mean((1, 2)) - images[:, :2].mean((1, 2, 3))


def narrowly_blue(images):
    return blueness(images) / 20


# ratio and gradient


@pytest.mark.parametrize("size", [1, 3, 7, None])
def test_every_ratio_is_1_before_the_first_update(size):
    (line,) = studio_trainer(micro_batch_size=size).train(1)
    for name in ("ar", "dit"):
        assert abs(line[f"{name}/ratio_mean"] - 1) < 1e-6
        assert line[f"{name}/ratio_std"] < 1e-6 and line[f"{name}/old_new_gap"] < 1e-6
        assert line[f"{name}/clip_fraction"] == 0
    assert line["ar/entropy"] > 1  # the tokens are not certain


def test_one_wrong_decision_shows_in_the_gap():
    "It is the maximum over all decisions of the first optimizer step, not a mean."
    changes = {"updates_per_rollout": 2, "learning_rate": 1e-9, "allow_ratio_gap": True}
    trainer = toy_trainer(micro_batch_size=5, **changes)
    experience = trainer.collect(BATCH)
    samples = experience.samples["ar"]
    wrong = samples.old_logprobs.clone()
    wrong[13, 7] += 0.5
    experience.samples["ar"] = replace(samples, old_logprobs=wrong)
    with pytest.warns(UserWarning, match="ar: new and old differ by up to 0.5"):
        line = trainer.learn(experience)
    assert line["old_new_gap"] == pytest.approx(0.5, abs=1e-5)
    assert line["old_new_gap_mean"] == pytest.approx(0.5 / 32 / 25, abs=1e-6)
    assert trainer.agreement.policies["ar"].largest == line["old_new_gap"]


def score_wrongly(trainer, factor=1.02):
    "All new log-probs are too large, as with a wrong temperature in scoring."
    for policy in trainer.policies.values():
        score = policy.score
        policy.terms = lambda samples, *rest, score=score: Terms(factor * score(samples))
    return trainer


@pytest.mark.parametrize("make", [toy_trainer, studio_trainer])
def test_a_run_whose_ratio_is_not_1_stops_before_its_first_update(make, tmp_path):
    kept = []
    callback = Callback()
    callback.on_step_end = lambda *step: kept.append(step)
    trainer = score_wrongly(make(callbacks=[callback]))
    before = [weight.detach().clone() for weight in trainer.model.weights()]
    message = refusal(trainer.train, 3)
    assert "ar: new and old differ" in message
    assert "training.allow_ratio_gap true" in message
    assert all(map(torch.equal, trainer.model.weights(), before))
    assert trainer.step == 0 and not trainer.half_done and not kept and trainer.agreement is None
    assert refusal(trainer.train, 1) == message  # a second try does not get past it


def test_a_gap_on_one_rank_stops_all():
    def run(ranks):
        trainer = toy_trainer(ranks=ranks)
        return refusal((score_wrongly(trainer) if ranks.rank else trainer).train, 1)

    messages = on_ranks(2, run)
    assert messages[0] == messages[1] and "new and old differ" in messages[0]


def test_the_gap_is_that_of_the_first_optimizer_step():
    trainer = toy_trainer(updates_per_rollout=3, mini_batches=2)
    lines = trainer.train(3)
    assert [line["old_new_gap"] for line in lines] == [0] * 3 and lines[-1]["ratio_std"] > 0


def rollout_gradient(size, **changes):
    "Gradient and metrics of an update whose ratios are not 1."
    changes |= {"max_grad_norm": 1e9, "allow_ratio_gap": True}
    trainer = studio_trainer(micro_batch_size=size, beta=0.1, **changes)
    found, experience = keep_gradients(trainer), trainer.collect(BATCH)
    perturb(trainer)
    line = trainer.learn(experience)
    return found[0], line


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_gradient_does_not_depend_on_the_micro_batch(loss_type, level):
    if (loss_type, level != "token") == ("dppo", True):
        return  # refused, tests/test_methods.py
    changes = {"loss_type": loss_type, "importance_sampling_level": level}
    whole, whole_line = rollout_gradient(None, **changes)
    for size in (1, 5, 12):
        chunks, line = rollout_gradient(size, **changes)
        assert max(map(difference, chunks, whole)) < 1e-5
        for k in ("loss", "ratio_mean", "ratio_std", "kl", "grad_norm", "old_new_gap"):
            assert line[f"ar/{k}"] == pytest.approx(whole_line[f"ar/{k}"], abs=1e-5)
    assert whole_line["ar/kl"] > 0 and whole_line["ar/old_new_gap"] > 0.1


def test_credit_for_some_decisions_moves_only_those():
    trainer = toy_trainer(micro_batch_size=3)
    experience = trainer.collect(BATCH)
    samples = experience.samples["ar"]
    credit = torch.zeros(32, 25)
    credit[:, 10:15] = samples.advantages[:, None]
    experience.samples["ar"] = samples.with_advantages(credit, samples.counted)
    trainer.learn(experience)
    moved = table(trainer).detach().abs().amax((0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == [10, 11, 12, 13, 14]


def test_only_the_most_uncertain_tokens_learn():
    "The threshold is that of the whole step, however it is split."
    found = []
    for size in (3, None):
        trainer = toy_trainer(entropy_share=0.2, micro_batch_size=size)
        perturb(trainer, 2.0)
        samples = trainer.collect(BATCH).samples["ar"]
        entropies = trainer.policies["ar"].entropies(samples)
        learns = samples.advantages != 0
        found.append(samples.advantages)
        assert learns.float().mean() == pytest.approx(0.2)
        assert entropies[learns].min() > entropies[~learns].max()
    assert torch.equal(*found)


# a loss of one's own


def doubled(new, old, advantages, **options):
    loss, metrics = compute_grpo_loss(new, old, advantages, **options)
    return 2 * loss, metrics | {"own": 3.0}


def test_a_loss_that_wraps_ours_and_adds_a_metric():
    plain, _ = first_gradients(micro_batch_size=3)
    twice, line = first_gradients(micro_batch_size=3, loss=doubled)
    assert torch.allclose(twice, 2 * plain) and line["own"] == 3 and line["ratio_std"] < 1e-6


def test_a_loss_with_no_metrics_at_all():
    def reinforce(new, old, advantages, num_samples, **options):
        return -(advantages[:, None] * new).mean(1).sum() / num_samples, {}

    callbacks = [ProgressLines()]  # the console's line takes what there is
    own, line = first_gradients(micro_batch_size=3, loss=reinforce)
    toy_trainer(loss=reinforce, callbacks=callbacks).train(2)
    ours, _ = first_gradients(loss_type="reinforce")
    assert torch.allclose(own, ours, atol=1e-8) and "ratio_mean" not in line
    assert line["old_new_gap"] == 0 and line["grad_norm"] > 0


@pytest.mark.parametrize("loss", ["dapo", {"dti": doubled}, {"ar": 1}])
def test_a_loss_that_cannot_be_called_is_refused(loss):
    assert "loss: give a function" in refusal(studio_trainer, loss=loss)


def test_each_policy_can_have_its_own_loss():
    norms = []
    for loss in (None, {"dit": doubled}):
        trainer = studio_trainer(max_grad_norm=1e9, loss=loss)
        line = trainer.train_step(BATCH)
        norms.append([line["ar/grad_norm"], line["dit/grad_norm"]])
    assert norms[1] == pytest.approx([norms[0][0], 2 * norms[0][1]])


# groups that teach nothing


def test_equal_rewards_move_nothing():
    "Not even through AdamW's state of earlier steps."
    trainer = toy_trainer()
    trainer.train(3)
    before = table(trainer).detach().clone()
    trainer.collector.rewards = {"ar": constant}
    (line,) = trainer.train(1)
    assert torch.equal(table(trainer), before)
    assert line["equal_groups"] == 1 and line["grad_norm"] == 0 == line["skipped"]


def first_gradients(**changes):
    trainer = toy_trainer(reward=heart_is_flat, max_grad_norm=1e9, **changes)
    found = keep_gradients(trainer)
    line = trainer.train_step(BATCH)
    return torch.stack([gradients[0] for gradients in found]), line


def test_equal_drop_takes_the_mean_over_the_other_groups():
    (kept, keep), (dropped, drop) = first_gradients(), first_gradients(equal="drop")
    assert not kept[0, 0].any() and kept[0, 1:].any(2).any(1).all()
    assert torch.allclose(dropped, 4 / 3 * kept, atol=1e-9)
    assert keep["equal_groups"] == drop["equal_groups"] == 0.25
    in_chunks, _ = first_gradients(equal="drop", micro_batch_size=3)
    assert torch.allclose(in_chunks, dropped, atol=1e-8)


def test_the_reference_does_not_pull_at_a_dropped_group():
    def second_gradient(equal):
        trainer = toy_trainer(reward=heart_is_flat, beta=0.5, equal=equal, allow_ratio_gap=True)
        experience = trainer.collect(BATCH)
        perturb(trainer)
        found = keep_gradients(trainer)
        trainer.learn(experience)
        return found[0][0]

    assert not second_gradient("drop")[0].any() and second_gradient("drop")[1].any()
    assert second_gradient("keep")[0].any()


def test_where_all_groups_are_dropped_nothing_moves():
    trainer = toy_trainer(reward=constant, equal="drop", beta=0.5)
    perturb(trainer)
    before = table(trainer).detach().clone()
    (line,) = trainer.train(1)
    assert line["grad_norm"] == 0 and torch.equal(table(trainer), before)


def test_micro_batches_of_equal_groups_are_not_scored_again(monkeypatch):
    score = TokenTable.score

    def scored_again(size):
        trainer, sizes = toy_trainer(reward=heart_is_flat, micro_batch_size=size), []
        experience = trainer.collect(BATCH)
        with monkeypatch.context() as patch:

            def noted(policy, samples):
                sizes.append(len(samples))
                return score(policy, samples)

            patch.setattr(TokenTable, "score", noted)
            trainer.learn(experience)
        return sum(sizes), table(trainer).detach()

    (all_rows, whole), (fewer, chunks) = scored_again(None), scored_again(8)
    assert (all_rows, fewer) == (32, 24) and torch.allclose(whole, chunks, atol=1e-6)


def test_the_numbers_of_images_are_those_of_all_ranks():
    def run(ranks):
        rows = slice(ranks.rank, None, ranks.world)
        batch = {"prompts": PROMPTS[rows], "target_images": TARGETS[rows]}
        (line,) = toy_trainer([batch], ranks=ranks, callbacks=[ImageStatistics()]).train(1)
        return {name: value for name, value in line.items() if name.startswith("image/")}

    alone = run(Ranks())
    assert len(alone) == 6
    for line in on_ranks(2, run):
        assert line == pytest.approx(alone)


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_a_loss_of_ones_own_also_counts_images_without_an_advantage(level):
    "It may have a bonus for all of them; here no group, or one, has different rewards."

    def with_bonus(new, old, advantages, **options):
        loss, metrics = compute_grpo_loss(new, old, advantages, **options)
        return loss + 0.1 * new.mean(1).sum() / options["num_samples"], metrics

    def some(images, prompts):
        return images[:, 0].mean((1, 2)) * torch.tensor(
            [level * (p == PROMPTS[0]) for p in prompts]
        )

    found = []
    for size in (None, 8, 3):
        trainer = toy_trainer(reward=some, micro_batch_size=size, loss=with_bonus)
        gradients = keep_gradients(trainer)
        trainer.train(1)
        found.append(gradients[0][0])
    assert found[0].abs().amax((1, 2)).min() > 0  # of each prompt
    assert all(torch.allclose(one, found[0], atol=1e-6) for one in found)


# the KL to the reference


def test_the_kl_is_zero_at_first_and_holds_back_later():
    options = {"dit_learning_rate": 0.01}
    leashes = {b: studio_trainer(beta=b, **options).train(15) for b in (0.01, 1.0)}
    for name in ("ar", "dit"):
        loose, tight = (lines[-1][f"{name}/kl"] for lines in leashes.values())
        assert all(lines[0][f"{name}/kl"] == 0 for lines in leashes.values())
        assert 0 < tight < loose / 2


# several updates, mini-batches, schedule


def global_state():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_the_same_seed_gives_the_same_run_and_no_global_state_is_touched():
    def losses(**changes):
        return [line["loss"] for line in toy_trainer(mini_batches=3, **changes).train(4)]

    first = losses()
    torch.manual_seed(123)
    random.seed(5)
    np.random.seed(7)
    state = global_state()
    again = losses()
    assert again == first and global_state() == state and any(first)
    assert losses(seed=1) != first


def test_mini_batches_follow_from_seed_step_and_pass():
    experience = toy_trainer().collect(BATCH)

    def dealt(seed, step):
        "Which samples the first mini-batch of each of two passes holds."
        trainer = toy_trainer(mini_batches=2, updates_per_rollout=2, seed=seed)
        trainer.step = step
        batches = list(trainer.learner.minibatches(experience, step))
        first = [batches[i]["ar"].samples.rollout.token_ids for i in (0, 2)]
        return [str(ids.tolist()) for ids in first]

    assert dealt(0, 0) == dealt(0, 0)
    assert len({*dealt(0, 0), *dealt(0, 1), *dealt(1, 0)}) == 6


# rewards


def test_normalised_parts_reach_the_advantages():
    weights = {"near": 1.0, "blue": 1.0}
    narrow = WeightedReward({"near": nearness, "blue": narrowly_blue}, weights)
    trainer = toy_trainer(reward=narrow, normalise="group")
    experience = trainer.collect(BATCH)
    images = experience.rollout.image_tensors
    parts = {"near": nearness(images, TARGETS.repeat_interleave(8, 0)), "blue": blueness(images)}
    expected = gdpo_advantages(parts, weights, 8)
    assert torch.allclose(experience.samples["ar"].advantages, expected, atol=1e-3)


def test_each_policy_can_have_its_own_reward():
    own = {
        "ar": WeightedReward({"flat": constant}, {"flat": 1.0}),
        "dit": WeightedReward({"blue": blueness}, {"blue": 2.0}),
    }
    trainer = studio_trainer(reward=own)
    before = [weight.detach().clone() for weight in trainer.model.weights()]
    (line,) = trainer.train(1)
    moved = [not torch.equal(a, b) for a, b in zip(before, trainer.model.weights())]
    assert moved == [False, True]  # the tokens' reward is constant
    assert line["ar/reward/flat"] == pytest.approx(0.1) and "reward/blue" not in line
    assert 2 * line["dit/reward/blue"] == pytest.approx(line["dit/reward_mean"], abs=1e-6)
    assert line["reward_mean"] == pytest.approx(0.1 + line["dit/reward_mean"], abs=1e-6)
    assert line["ar/equal_groups"] == 1 and line["dit/equal_groups"] == 0


# missing scores


def with_gaps(rows, gap=float("nan")):
    "A reward that gives these images of a call no score."

    def half_blind(images, targets):
        scores = nearness(images, targets).tolist()
        return [gap if i in rows else score for i, score in enumerate(scores)]

    return half_blind


@pytest.mark.parametrize("gap", [float("nan"), None])
def test_an_image_without_a_score_is_left_out(gap):
    "Not in the mean and spread of its group, nor in the mean of the loss; said once and counted."
    trainer = toy_trainer(reward=with_gaps({0, 3, 9}, gap))
    with pytest.warns(UserWarning, match="from half_blind for 3 of the 32 images") as told:
        experience = trainer.collect(BATCH)
        trainer.collect(BATCH)
    assert len(told) == 1
    samples = experience.samples["ar"]
    missing = experience.rewards.isnan()
    assert missing.nonzero().flatten().tolist() == [0, 3, 9]
    assert torch.equal(samples.advantages, compare_rewards(experience.rewards, 8))
    assert not samples.advantages[missing].any() and torch.equal(samples.counted, ~missing)
    gradients = keep_gradients(trainer)
    line = trainer.learn(experience)
    (minibatch,) = trainer.learner.minibatches(experience, 1)
    assert line["missing_scores"] == 3 and minibatch["ar"].count == 29
    assert line["reward_mean"] == pytest.approx(experience.rewards[~missing].mean().item())
    # the gradient of the other 29 samples alone
    logprobs = trainer.policies["ar"].score(samples)
    alone = -(logprobs.mean(1) * samples.advantages)[~missing].sum() / 29
    expected = torch.autograd.grad(alone, table(trainer))[0]
    scale = min(1.0, 1 / expected.norm().item())
    assert torch.allclose(gradients[0][0], scale * expected, atol=1e-6)


def test_a_part_without_a_score_does_not_let_its_image_win():
    parts = {"near": nearness, "gaps": with_gaps({0, 8, 17})}
    sums = {}
    for normalise in ("none", "group"):
        reward = WeightedReward(parts, {"near": 100.0, "gaps": 1.0})
        trainer = toy_trainer(reward=reward, normalise=normalise)
        with pytest.warns(UserWarning, match="from gaps for 3 of the 32 images"):
            experience = trainer.collect(BATCH)
        assert not experience.rewards.isnan().any() and experience.numbers["missing_scores"] == 3
        near = nearness(experience.rollout.image_tensors, TARGETS.repeat_interleave(8, 0))
        sums[normalise] = experience.samples["ar"].advantages
        # the order of the images is that of the first part, up to a hundredth
        for start in (0, 8, 16):
            rows = slice(start, start + 8)
            order = near[rows].argsort()
            assert sums[normalise][rows][order].diff().min() > (-0.05, -2)[normalise == "group"]
        assert experience.samples["ar"].counted.all()
    whole = toy_trainer(
        reward=WeightedReward(parts | {"gaps": nearness}, {"near": 100.0, "gaps": 1.0})
    )
    assert torch.allclose(whole.collect(BATCH).samples["ar"].advantages, sums["none"], atol=0.1)


@pytest.mark.filterwarnings("ignore:No score")
def test_two_policies_and_missing_scores():
    "A set of tokens has the mean of its images with a score; an image's group is its tokens'."
    trainer = studio_trainer(reward=with_gaps({0, 2, 3}), group_size=3, images_per_sample=2)
    experience = trainer.collect(BATCH)
    ar, dit = (experience.samples[name] for name in ("ar", "dit"))
    assert ar.counted.tolist() == [True, False] + [True] * 10 and not ar.advantages[1]
    assert dit.counted.tolist() == [False, True, False, False] + [True] * 20
    assert not dit.advantages[:4].any() and dit.advantages[4:].any()
    rewards = experience.rewards[:6]
    of_sets = torch.stack([rewards[1], rewards[1] * torch.nan, rewards[4:].mean()])
    assert torch.allclose(ar.advantages[:3], compare_rewards(of_sets, 3))


@pytest.mark.parametrize("rows, options", [(range(32), {}), ({5}, {"missing_scores": "stop"})])
def test_a_step_without_scores_ends_the_run(rows, options):
    trainer = toy_trainer(reward=with_gaps(set(rows)), **options)
    message = "in any image of this step" if len(rows) == 32 else "in image 5, prompt 'a red heart'"
    with pytest.raises(RewardError, match=f"half_blind has nothing to score {message}"):
        trainer.train(1)
    assert trainer.step == 0


@pytest.mark.filterwarnings("ignore:No score")
def test_samples_that_are_not_counted_are_not_pulled_either():
    trainer = toy_trainer(reward=with_gaps({*range(8)}), beta=0.5, mini_batches=4)
    experience = trainer.collect(BATCH)
    perturb(trainer)
    trainer.options.step.allow_ratio_gap = True
    found = keep_gradients(trainer)
    trainer.learn(experience)
    assert not any(gradients[0][0].any() for gradients in found)


# whole groups


class Comparing:
    "Wants whole groups, and notes what it gets."

    whole_groups = True

    def __init__(self):
        self.calls = []

    def __call__(self, images, prompts):
        self.calls.append(list(prompts))
        return images.mean((1, 2, 3))


@pytest.mark.parametrize("images_per_sample", [1, 2])
def test_a_reward_that_compares_gets_whole_groups(images_per_sample):
    "As a part too, beside one that gets pieces as they are sampled."
    pieces, lone = [], Comparing()

    def pieced(images):
        pieces.append(len(images))
        return images.mean((1, 2, 3))

    class Slowly(ToyStudio):
        def generate_with_tracking(self, prompts, images=None, *, on_images, **more):
            rollout = super().generate_with_tracking(prompts, images, **more)
            for start in range(0, len(rollout), 3):
                rows = list(range(start, min(start + 3, len(rollout))))
                on_images(rows, rollout.image_tensors[rows])
            return rollout

    part = Comparing()
    of_sum = WeightedReward({"part": part, "pieced": pieced}, {"part": 1.0, "pieced": 1.0})
    model = Slowly(PROMPTS) if images_per_sample == 2 else ToyPainter(PROMPTS)
    reward = {"ar": of_sum, "dit": lone} if images_per_sample == 2 else lone
    number = 4 * images_per_sample
    options = {"group_size": 4, "images_per_sample": 2}
    toy_trainer(reward=reward, model=model, **options).collect(BATCH)
    expected = [prompt for prompt in PROMPTS for _ in range(number)]
    for calls in (lone.calls, part.calls) if images_per_sample == 2 else (lone.calls,):
        assert sum(calls, []) == expected
        assert all(call.count(prompt) == number for call in calls for prompt in call)
    assert images_per_sample == 1 or max(pieces) == 3


# numbers that are not finite


class Broken(ToyPainter):
    "Goes wrong in some calls of `score`: each step scores twice, to sample and to learn."

    def __init__(self, bad, factor=float("inf")):
        super().__init__(PROMPTS)
        policy, self.calls = self.policies["ar"], 0
        right = policy.score

        def score(samples):
            self.calls += 1
            new = right(samples)
            return new + (new - new.detach()) * factor if self.calls in bad else new

        policy.score = score


# the loss is NaN; only the gradient is inf
@pytest.mark.parametrize("factor", [float("inf"), 1e38])
def test_what_is_not_finite_does_not_reach_the_weights(factor):
    trainer = toy_trainer(model=Broken({4}, factor), micro_batch_size=None)
    trainer.train(1)
    before = table(trainer).detach().clone()
    (line,) = trainer.train(1)
    assert line["skipped"] == 1 == trainer.learner.bad_steps and torch.equal(table(trainer), before)
    (line,) = trainer.train(1)
    assert line["skipped"] == 0 == trainer.learner.bad_steps and not torch.equal(
        table(trainer), before
    )


def test_a_policy_without_a_gradient_does_not_move_by_its_momentum():
    "Its groups are equal in the second step, those of the other policy are not."
    light = {"flat": False}

    def brightness(images, targets):
        return torch.zeros(len(images)) if light["flat"] else images.mean((1, 2, 3))

    trainer = studio_trainer(reward={"ar": nearness, "dit": brightness})
    trainer.train_step(BATCH)
    light["flat"] = True
    before = [policy.table.detach().clone() for policy in trainer.policies.values()]
    line = trainer.train_step(BATCH)
    assert line["dit/grad_norm"] == 0 < line["ar/grad_norm"]
    tokens, dit = (policy.table for policy in trainer.policies.values())
    assert torch.equal(dit, before[1]) and not torch.equal(tokens, before[0])


def test_three_bad_steps_in_a_row_end_the_training():
    model = Broken({2, 4, 6, 8})
    trainer = toy_trainer(model=model, micro_batch_size=None)
    with pytest.raises(NotFinite, match="Step 3.*3 times in a row.*learning rate"):
        trainer.train(9)
    assert not table(trainer).any() and model.calls == 6


# stop, go on, interrupt


def loader(batch_size=2):
    items = []
    for i, (prompt, target) in enumerate(zip(PROMPTS[:3], TARGETS)):
        items.append({"prompt": prompt, "target": target, "index": i, "metadata": {}})
    return make_dataloader(items, batch_size)


@pytest.fixture(scope="module")
def straight():
    "Ten steps in one go."
    trainer = toy_trainer(loader())
    return trainer, trainer.train(10)


def test_a_list_of_batches_goes_on_with_the_right_one(tmp_path):
    batches = []
    for prompt, target in zip(PROMPTS, TARGETS):
        batches.append({"prompts": [prompt], "target_images": target[None]})
    whole, half, resumed = (toy_trainer(batches) for _ in range(3))
    whole.train(6)
    half.train(3)
    half.save_checkpoint(tmp_path / "three")
    resumed.load_checkpoint(tmp_path / "three")
    resumed.train(3)
    assert torch.equal(table(whole), table(resumed)) and table(whole)[3].any()


def test_both_policies_go_on(tmp_path):
    options = {"updates_per_rollout": 2, "mini_batches": 2, "beta": 0.1}
    whole, half, resumed = (studio_trainer(**options) for _ in range(3))
    whole.train(4)
    half.train(2)
    half.save_checkpoint(tmp_path / "two")
    resumed.load_checkpoint(tmp_path / "two")
    resumed.train(2)
    assert all(map(torch.equal, whole.model.weights(), resumed.model.weights()))


class StopAt(Callback):
    "Asks the trainer to stop after a step."

    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, metrics, experience):
        trainer.stop = trainer.step == self.step


class Keep(Callback):
    "Notes what it is called for."

    def __init__(self, events, name="keep"):
        self.events, self.name = events, name

    def on_train_begin(self, trainer):
        self.events.append((self.name, "begin"))

    def on_step_end(self, trainer, metrics, experience):
        assert experience is trainer.last_experience and metrics["step"] == trainer.step
        self.events.append((self.name, trainer.step))

    def on_train_end(self, trainer):
        self.events.append((self.name, "end"))
        if self.name == "fails":
            raise OSError("the disk is full")


@pytest.fixture
def ctrl_c():
    "A shell's background jobs start with Ctrl+C ignored."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("where", "done"), [("reward", 3), ("learning", 4)])
def test_an_interrupt_leaves_a_whole_step(straight, ctrl_c, where, done, monkeypatch):
    "In the fourth step: while sampling at once, while learning after the step and its log."
    calls, events, score = [], [], TokenTable.score

    def press(moment):
        calls.append(moment)
        if moment == where and calls.count(where) == 4:
            ctrl_c()

    def noted(policy, samples):
        if samples.advantages is not None:
            press("learning")
        return score(policy, samples)

    def reward(images, targets):
        press("reward")
        return nearness(images, targets)

    monkeypatch.setattr(TokenTable, "score", noted)
    trainer = toy_trainer(loader(), reward, micro_batch_size=None, callbacks=[Keep(events)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(10)
    assert trainer.step == done
    assert events == [("keep", "begin"), *(("keep", i + 1) for i in range(done)), ("keep", "end")]
    trainer.callbacks.clear()
    trainer.train(10 - done)
    assert torch.allclose(table(trainer), table(straight[0]), atol=1e-5)


def test_each_callback_hears_of_the_end_whatever_goes_wrong_in_another():
    events = []
    callbacks = [Keep(events, "first"), Keep(events, "fails"), Keep(events, "last")]
    with pytest.raises(OSError, match="the disk is full"):
        toy_trainer(callbacks=callbacks).train(1)
    assert events[-3:] == [("first", "end"), ("fails", "end"), ("last", "end")]
    assert events[:2] == [("first", "begin"), ("fails", "begin")]


def test_nothing_is_saved_in_the_middle_of_a_step(tmp_path):
    "Between two optimizer steps on one rollout there is no state worth keeping."
    trainer = toy_trainer(updates_per_rollout=2)
    trainer.train(1)
    accumulate, calls = trainer.learner.accumulate, []

    def fails_in_the_second(name, batch):
        calls.append(name)
        if len(calls) == 2:
            raise OSError("the cable is out")
        return accumulate(name, batch)

    trainer.learner.accumulate = fails_in_the_second
    with pytest.raises(OSError):
        trainer.train(1)
    assert trainer.step == 1 and trainer.half_done
    assert "between two updates of one step" in refusal(trainer.save_checkpoint, tmp_path / "half")
    assert not list(tmp_path.iterdir())
    trainer.learner.accumulate = accumulate
    trainer.train(1)
    trainer.save_checkpoint(tmp_path / "whole")


# ranks


class ThreadRanks(Ranks):
    "Ranks that are threads of this process."

    def __init__(self, rank, world, meeting, desk):
        super().__init__(rank, world)
        self.meeting, self.desk = meeting, desk

    def gather(self, thing):
        self.desk[self.rank] = copy.deepcopy(thing)  # processes share no objects
        self.meeting.wait(20)
        things = list(self.desk)
        self.meeting.wait(20)
        return things

    @torch.no_grad()
    def sum_gradients(self, parameters, loss):
        tensors = [loss]
        for weight in parameters:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            tensors.append(weight.grad)
        of_ranks = self.gather([x.detach() for x in tensors])
        for i, x in enumerate(tensors):
            x.copy_(sum(own[i] for own in of_ranks))


def on_ranks(world, work):
    "What `work(ranks)` returns on each of several ranks, or the error that it raised."
    meeting, desk, results = threading.Barrier(world), [None] * world, [None] * world

    def run(rank):
        try:
            results[rank] = work(ThreadRanks(rank, world, meeting, desk))
        except Exception as error:  # it is looked at by the test
            results[rank] = error

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def run_of_rank(ranks, prompts, **changes):
    "Gradients, lines and token ids of two steps, on a rank's share of the prompts."
    share = len(prompts) // ranks.world
    own = prompts[ranks.rank * share : (ranks.rank + 1) * share]
    batch = {"prompts": own, "target_images": icon_images(own)}
    trainer = MinimalGRPOTrainer(
        ToyStudio(PROMPTS), [batch], nearness, group_size=2, ranks=ranks, **changes
    )
    found, lines = keep_gradients(trainer), []
    for _ in range(2):
        lines.append(trainer.train_step(batch))
        perturb(trainer)
    return found, lines, trainer.last_experience.rollout.token_ids


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": "batch", "micro_batch_size": 3},
        {"mini_batches": 3, "updates_per_rollout": 2},  # some rank has no sample in a mini-batch
        {"equal": "drop", "beta": 0.2},
        {"entropy_share": 0.3, "micro_batch_size": 3},
    ],
)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_give_the_gradients_of_one_process(world, changes):
    "Also where a prompt comes twice in a step, once on each of two ranks."
    prompts = [*PROMPTS[:3], PROMPTS[0]]
    one, lines, ids = run_of_rank(Ranks(), prompts, **changes)
    results = on_ranks(world, lambda ranks: run_of_rank(ranks, prompts, **changes))
    assert torch.equal(torch.cat([result[2] for result in results]), ids)
    assert len(ids.unique(dim=0)) == len(prompts) * 2  # no sample twice: two images of each
    for gradients, rank_lines, _ in results:
        assert len(gradients) == len(one) > 1
        for there, here in zip(gradients, one):
            assert max(map(difference, there, here)) < 1e-4
        for there, here in zip(rank_lines, lines):
            for k in ("loss", "reward_mean", "equal_groups", "grad_norm", "ratio_mean", "kl"):
                assert there[f"ar/{k}"] == pytest.approx(here[f"ar/{k}"], rel=1e-3, abs=1e-5)
            assert there["reward_std"] == pytest.approx(here["reward_std"], rel=1e-4)
    perturbed = lines[1]["ar/old_new_gap"]
    assert lines[0]["ar/old_new_gap"] == 0 and perturbed < 1e-6


def test_who_is_asked_to_stop_stops_all():
    def run(ranks):
        callbacks = [StopAt(2)] if ranks.rank == 1 else []
        return len(toy_trainer(ranks=ranks, callbacks=callbacks).train(5))

    assert on_ranks(2, run) == [2, 2]
