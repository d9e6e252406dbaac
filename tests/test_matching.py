"The forward process: log-probs and losses as the authors publish them, and the steps chosen."

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from helpers import (
    PROMPTS,
    ROOT,
    load_weights,
    main,
    read_jsonl,
    resume,
    same_tensors,
    small,
    small_model,
    told,
)

from glm_grpo.data.basics import UserError, refuse
from glm_grpo.maths.noise import SampleNames
from glm_grpo.maths.loss import compute_grpo_loss
from glm_grpo.maths.matching import matching_logprob, nft_terms, stratified_steps
from glm_grpo.model.objectives import NFT, Matching, find_objective
from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.rewards.weighted import Rewards
from glm_grpo.run.command_line import parse_args
from glm_grpo.training.experience import compare_samples
from glm_grpo.training.metrics import LEGEND, legend_key
from glm_grpo.training.options import GRPOOptions, TrainerOptions
from glm_grpo.training.trainer import MinimalGRPOTrainer

SHAPE = (6, 4, 8, 8)


def numbers(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *SHAPE, generator=generator, dtype=torch.float64)


def published_awm(v, u, t, weight):
    "AWM's published code, in its own words: a loss for each image, negated."
    squares = ((v - u) ** 2).mean(dim=tuple(range(1, v.ndim)))
    forms = {
        "uniform": squares,
        "t": squares * t,
        "t2": squares * t**2,
        "huber": (torch.sqrt(squares + 1e-10) - 1e-5) * t,
        "ghuber": (torch.pow(squares + 1e-10, 0.25) - torch.pow(torch.tensor(1e-10), 0.25))
        * t
        / 0.25,
    }
    return -forms[weight]


@pytest.mark.parametrize("weight", ["uniform", "t", "t2", "huber", "ghuber"])
def test_log_probs_are_those_of_the_published_code(weight):
    v, u = numbers(0, 2)
    t = torch.linspace(0.05, 0.95, len(v), dtype=torch.float64)
    for error in (1.0, 1e-2, 1e-4):
        found = matching_logprob(u + error * v, u, t, weight)
        expected = published_awm(u + error * v, u, t, weight)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_the_log_prob_of_a_prediction_without_error_has_a_finite_gradient():
    v = torch.zeros(2, 4, requires_grad=True)
    for weight in ("huber", "ghuber"):
        matching_logprob(v, torch.zeros(2, 4), 0.5, weight).sum().backward()
    assert v.grad.isfinite().all()


def published_nft(v, old, x_t, x0, t, advantages, mix, clip):
    "DiffusionNFT's published code: its policy loss, without the KL term."
    r = (advantages.clamp(-clip, clip) / clip) / 2 + 0.5
    t = t.view(-1, 1, 1, 1)
    losses = []
    for prediction in (mix * v + (1 - mix) * old, (1 + mix) * old - mix * v):
        found = x_t - t * prediction
        size = (found - x0).abs().mean(dim=(1, 2, 3), keepdim=True).detach().clip(min=1e-5)
        losses.append((((found - x0) ** 2) / size).mean(dim=(1, 2, 3)))
    return ((r * losses[0] + (1 - r) * losses[1]) / mix * clip).mean()


@pytest.mark.parametrize("mix", [0.1, 1.0])
def test_nft_is_the_published_loss(mix):
    x0, noise, old, change = numbers(1, 4)
    t = torch.linspace(0.1, 1.0, len(x0), dtype=torch.float64)
    share = t.view(-1, 1, 1, 1)
    x_t = (1 - share) * x0 + share * noise
    advantages, clip = 3 * torch.randn(len(x0), generator=torch.Generator().manual_seed(2)), 2.0
    gradients, losses = [], []
    for of_own in (True, False):
        v = (old + 0.3 * change).requires_grad_()
        if of_own:
            s, k = nft_terms(v, old, x_t, x0, t, mix)
            loss = (-advantages.clamp(-clip, clip) * s + clip * k).mean()
        else:
            loss = published_nft(v, old, x_t, x0, t, advantages, mix, clip)
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, v)[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


def test_more_times_than_the_schedule_has_are_refused():
    for count in (0, 12):
        with pytest.raises(ValueError, match=f"{count} times"):
            stratified_steps(14, count, "a")
    with pytest.raises(ValueError, match="weight 'none'"):
        matching_logprob(torch.ones(1, 2), torch.ones(1, 2), 0.5, "none")


SIZE = {"height": 64, "width": 64, "num_inference_steps": 6, "guidance_scale": 2.0}
# an edit has no preview, so its tokens are sampled in 4 steps and not in 260
BATCH = {"prompts": PROMPTS[:1], "source_images": [[Image.new("RGB", (64, 64), "olive")]]}
HOW = {"dit_objective": "matching", "matching_times": 3, "temperature": 3.0, "top_p": 1.0}


@pytest.fixture(scope="module")
def model():
    found = GLMImageWrapper(small_model(), "dit", "float32", "cpu", lora={"rank": 2})
    with torch.no_grad():  # an adapter that does something
        generator = torch.Generator().manual_seed(0)
        for p in found.get_trainable_parameters():
            p += 0.02 * torch.randn(p.shape, generator=generator)
    return found


@pytest.fixture(scope="module")
def rollout(model):
    prompts = [PROMPTS[0]] * 2 + ['a sign "yes" on a red ground'] * 2
    return model.generate_with_tracking(prompts, score_batch_size=2, **SIZE, **HOW)


def with_objective(rollout, objective, **changes):
    "The rollout with another objective, or one with other options."
    options = replace(rollout.denoising.objective.options, **changes)
    return replace(rollout, denoising=replace(rollout.denoising, objective=objective(options)))


def test_an_image_is_compared_at_points_on_its_way_to_noise(model, rollout):
    denoising = rollout.denoising
    assert len(denoising.decisions) == 3 and 0 not in denoising.decisions
    share = denoising.sigmas[list(denoising.decisions)].view(-1, 1, 1, 1)
    clean = denoising.latents[:, None]
    noise = denoising.latents_after + clean
    torch.testing.assert_close(denoising.latents_before, (1 - share) * clean + share * noise)
    assert (
        0.9 < noise.std() < 1.1
        and len({round(x, 4) for x in noise.mean((2, 3, 4)).flatten().tolist()}) > 6
    )
    first = rollout.initial_latents
    assert not torch.equal(first[0], first[1]), "without noise in the steps the images are equal"
    torch.testing.assert_close(model.decode(rollout), rollout.image_tensors)


def test_ratios_are_1_bit_for_bit_and_the_velocity_is_unguided(model, rollout):
    with torch.no_grad():
        for rows in (slice(0, 2), slice(2, 4)):
            part = rollout.rows(rows)
            logprobs, _, velocities = model.score_denoising(part)
            assert torch.equal(logprobs, part.latents_logprobs)
            assert torch.equal(velocities, part.denoising.old_velocities)
        guided = with_objective(rollout, Matching, matching_guidance=2.0)
        assert not torch.allclose(model.score_denoising(guided)[0], rollout.latents_logprobs)
        for j, logprob in enumerate(rollout.latents_logprobs.T):
            decision = rollout.denoising.decision(j)
            sigma = rollout.denoising.sigmas[rollout.denoising.decisions[j]].item()
            own = matching_logprob(
                decision.old_velocities[:, 0], decision.latents_after[:, 0], sigma
            )
            torch.testing.assert_close(own, logprob)


def test_the_gradient_is_that_of_advantage_weighted_flow_matching(model, rollout):
    "On policy, with the uniform weight: the loss is -mean A, its gradient that of mean A m."
    rollout = with_objective(rollout, Matching, matching_weight="uniform")
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    trained = model.get_trainable_parameters()
    new, _, velocities = model.score_denoising(rollout)
    loss, metrics = compute_grpo_loss(new, new.detach(), advantages)
    assert loss.item() == pytest.approx(0, abs=1e-7) and metrics["ratio_std"] == 0
    gradients = torch.autograd.grad(loss, trained, retain_graph=True)
    m = ((velocities - rollout.denoising.latents_after) ** 2).mean((2, 3, 4))
    expected = torch.autograd.grad((advantages[:, None] * m).mean(), trained)
    for own, other in zip(gradients, expected):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-8)
    assert sum(g.norm() for g in gradients) > 0


def test_the_times_change_with_the_step_and_not_with_the_rows(model, rollout):
    later = SampleNames.grow(0, 4, PROMPTS[:1], samples=1)
    edit = PROMPTS[:1], BATCH["source_images"]  # of four tokens
    one = model.generate_with_tracking(*edit, names=later, score=False, **SIZE, **HOW)
    alone = model.generate_with_tracking(*edit, score=False, **SIZE, **HOW)
    assert one.denoising.decisions != rollout.denoising.decisions == alone.denoising.decisions
    assert alone.latents_logprobs is None and alone.denoising.old_velocities is None


def train(model, reward, steps=1, **changes):
    """Training steps on one prompt, from the adapter's start -> the trainer, and what its DiT
    learnt."""
    start = [p.detach().clone() for p in model.get_trainable_parameters()]
    options = SIZE | HOW | {"group_size": 4, "learning_rate": 1e-3, "micro_batch_size": 2}
    options |= {"mode": "i2i", "callbacks": (), "guidance_scale": 1.0}
    trainer = MinimalGRPOTrainer(model, [BATCH], reward, **options | changes)
    trainer.train(steps)
    learnt = [(p - old).detach() for p, old in zip(model.get_trainable_parameters(), start)]
    with torch.no_grad():
        for p, old in zip(model.get_trainable_parameters(), start):
            p.copy_(old)
    return trainer, torch.cat([change.flatten() for change in learnt])


def green(images):
    return images[:, 1].mean((1, 2)) - images[:, [0, 2]].mean((1, 2, 3))


def test_training_starts_at_ratio_1_and_does_not_depend_on_micro_batches(model):
    trainer, learnt = train(model, green)
    line = trainer.history[0]
    assert line["ratio_mean"] == 1 and line["old_new_gap"] == 0 and line["grad_norm"] > 0
    assert line["loss"] == pytest.approx(0, abs=1e-6)
    _, all_at_once = train(model, green, micro_batch_size=None)
    one, other = (found[learnt.abs() > 1e-4] for found in (learnt, all_at_once))
    assert len(one) > 100 and (one - other).norm() < 1e-2 * one.norm()


def test_the_update_finds_old_log_probs_itself_after_the_first_step(model):
    "Then nothing is scored at collection, and loss and gradient are those of a scored rollout."
    trainer, _ = train(model, green)
    found = []
    for at_once in (True, False):
        experience = trainer.collect(BATCH, at_once=at_once)
        assert (experience.rollout.latents_logprobs is None) == at_once
        trainer.last_experience = experience
        found.append(
            trainer.learner.gradients(next(trainer.learner.minibatches(experience, trainer.step)))[
                "dit"
            ]
        )
        trainer.optimizer.zero_grad()
    unscored, scored = (metrics["grad_norm"] for metrics in found)
    assert unscored == pytest.approx(scored, rel=1e-5) and scored > 0


def test_the_pull_holds_several_updates_near_the_policy_that_sampled(model):
    several = {"updates_per_rollout": 4, "dit_clip_range": 10.0, "learning_rate": 5e-3}
    kept = {}
    for pull in (0.0, 100.0):
        trainer, learnt = train(model, green, **several, dit_pull=pull)
        kept[pull] = learnt.norm().item()
        assert (trainer.history[0]["kl"] > 0) == (pull > 0)
    assert kept[100.0] < 0.95 * kept[0.0]


LAGS = {"slow_copy_decay": 0.9, "slow_copy_growth": 0.5, "learning_rate": 5e-3}


def test_the_pull_to_a_slow_copy_acts_once_it_lags(model):
    "In the first two steps the copy is the policy: nothing is pulled, bit for bit."
    learnt, norms = {}, {}
    for pull in (0.0, 100.0):
        trainer, learnt[pull] = train(
            model, green, 3, **LAGS, dit_pull_slow=pull, guidance_scale=2.0
        )
        assert [line["kl"] > 0 for line in trainer.history] == [False, False, pull > 0]
        norms[pull] = [line["grad_norm"] for line in trainer.history]
    assert norms[0.0][:2] == norms[100.0][:2] and norms[0.0][2:] != norms[100.0][2:]
    assert learnt[100.0].norm() < 0.98 * learnt[0.0].norm()


NFT_OPTIONS = LAGS | {"dit_objective": "nft", "advantage_clip": 2.0}


def test_nft_on_policy_is_awm_with_another_weight(model, rollout):
    rollout = with_objective(rollout, NFT, nft_mix=0.3)
    policy, advantages = model.policies["dit"], torch.tensor([1.0, -1.0, 0.5, -0.5])
    samples = policy.samples(rollout, 2)
    assert samples.kind == "surrogates"
    terms = policy.terms(samples, GRPOOptions(advantage_clip=2.0), 0.0, None)
    numbers, arguments = terms.logprobs, terms.loss
    assert numbers.abs().max() < 1e-6 and terms.metrics["contrast"] == 0
    for j, step in enumerate(rollout.denoising.decisions):
        before, old = rollout.denoising.latents_before[:, j], rollout.denoising.old_velocities[:, j]
        given = old, old, before, rollout.denoising.latents, rollout.denoising.sigmas[step].item()
        torch.testing.assert_close(arguments["kl"][:, j], 2.0 * nft_terms(*given, 0.3)[1])
    trained = model.get_trainable_parameters()
    loss, _ = compute_grpo_loss(numbers, torch.zeros(4, 3), advantages, **arguments)
    gradients = torch.autograd.grad(loss, trained)
    _, _, velocities = model.score_denoising(rollout)
    error = velocities - rollout.denoising.latents_after
    sigmas = rollout.denoising.sigmas[list(rollout.denoising.decisions)]
    weight = sigmas / error.detach().abs().mean((2, 3, 4))
    weighted = advantages[:, None] * weight * error.square().mean((2, 3, 4))
    for own, other in zip(gradients, torch.autograd.grad(weighted.mean(), trained)):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-7)


@pytest.fixture(scope="module")
def nft_trainer(model):
    return train(model, green, 4, **NFT_OPTIONS)[0]


def test_with_nft_the_slow_copy_samples_and_the_contrast_grows(model, nft_trainer):
    trainer = nft_trainer
    contrasts = [line["contrast"] for line in trainer.history]
    assert {*map(legend_key, trainer.history[-1])} <= {*LEGEND}
    assert contrasts[:2] == [0, 0] and min(contrasts[2:]) > 0
    assert not {"ratio_mean", "clip_fraction", "old_new_gap"} & set(trainer.history[-1])
    samples = trainer.collect(BATCH).samples["dit"]
    with trainer.optimizer.slowed(), torch.no_grad():
        _, _, old = model.score_denoising(samples.rollout.rows(slice(0, 2)))
    assert torch.equal(old, samples.rollout.denoising.old_velocities[:2])


def test_an_image_that_is_not_counted_is_not_pulled(nft_trainer):
    "Not even where a mini-batch, or a rank, has no other image."
    trainer = nft_trainer
    experience = trainer.last_experience = trainer.collect(BATCH)
    norms, losses = [], []
    for counted in (True, False):
        samples = experience.samples["dit"]
        which = torch.full((len(samples),), counted)
        experience.samples["dit"] = samples.with_advantages(torch.zeros(len(samples)), which)
        minibatch = next(trainer.learner.minibatches(experience, trainer.step))
        metrics = trainer.learner.gradients(minibatch)["dit"]
        norms.append(metrics["grad_norm"])
        losses.append(metrics["loss"])
        trainer.optimizer.zero_grad()
    assert norms[0] > 0 and norms[1] == 0
    assert losses[0] > 0 == losses[1]


def test_the_slow_copy_is_the_policy_while_its_schedule_is_flat(model):
    trainer, _ = train(model, green, 4, **NFT_OPTIONS | {"slow_copy_flat": 1})
    contrasts = [line["contrast"] for line in trainer.history]
    assert contrasts[:3] == [0, 0, 0] and contrasts[3] > 0


def test_advantages_are_clipped():
    scores = Rewards(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    options = TrainerOptions().with_changes(advantage_clip=1.0)
    _, advantages, _ = compare_samples(scores, None, 4, 1, options)
    assert advantages.max() == 1.0 and advantages.min() > -1


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"matching_times": 7}, "rollout.matching_times"),
        ({"ratio_norm": True}, "rollout.ratio_norm"),
        ({"window": 2}, "rollout.window"),
        ({"beta": 0.1}, "reward.grpo.dit_kl gaussian"),
        ({"dit_pull": 1.0}, "reward.grpo.dit_pull"),
        ({"dit_pull": 1.0, "dit_objective": "steps"}, "reward.grpo.dit_pull"),
        ({"dit_pull_slow": 1.0}, "training.slow_copy_decay"),
        (NFT_OPTIONS | {"slow_copy_decay": None}, "training.slow_copy_decay"),
        (NFT_OPTIONS | {"slow_copy_decay": 0.0}, "training.slow_copy_decay"),
        (NFT_OPTIONS | {"advantage_clip": None}, "reward.grpo.advantage_clip"),
        (NFT_OPTIONS | {"dit_pull_slow": 1.0}, "reward.grpo.dit_pull_slow"),
    ],
)
def test_what_has_no_meaning_is_refused(changes, named):
    options = TrainerOptions().with_changes(**{"num_inference_steps": 8} | HOW | changes)
    with pytest.raises(UserError, match=named):
        refuse([*find_objective(options.rollout.dit_objective).problems(options)])


def test_the_command_line_takes_it_by_either_name():
    for section in ("rollout", "reward.grpo"):
        config = parse_args([f"--{section}.dit_objective", "matching"])
        assert config.rollout.dit_objective == "matching"


def cell_of_the_notebook():
    "The class of `nbs/02_change_something`, with the imports that the page names."
    cells = json.loads((ROOT / "nbs/02_change_something.ipynb").read_text())["cells"]
    (source,) = (c["source"] for c in cells if "class FinishedImage" in "".join(c["source"]))
    imports = "from dataclasses import replace\nfrom glm_grpo.model.objectives import Objective\n"
    return imports + "".join(source)


@pytest.mark.usefixtures("at_root")
def test_an_objective_of_ones_own_trains_from_the_command_line(folder, capsys):
    (folder / "mine.py").write_text(cell_of_the_notebook())
    name = f"{folder / 'mine.py'}:FinishedImage"
    words = small(folder, "--model.component", "dit", "--rollout.dit_objective", name)
    assert main(*words, "--num_steps", 2, "--output_dir", folder / "short") == 2
    assert "decisions returned [1]" in told(capsys)  # one denoising step: number 0
    words += ["--rollout.num_inference_steps", 3]
    assert main(*words, "--num_steps", 2, "--output_dir", folder / "run") == 0
    lines = read_jsonl(folder / "run/metrics.jsonl")
    assert [line["ratio_mean"] for line in lines] == [1, 1] and lines[1]["grad_norm"] > 0
    capsys.readouterr()
    final = folder / "run/checkpoints/checkpoint_final"
    assert main("--resume", final, "--num_steps", 3) == 2  # the run's code, not named again
    message = told(capsys)
    assert "FinishedImage" in message and "--trust_run_code" in message
    assert resume(final, "--num_steps", 3, "--trust_run_code") == 0
    assert len(read_jsonl(folder / "run/metrics.jsonl")) == 3


@pytest.mark.usefixtures("at_root")
@pytest.mark.parametrize(
    "name, message",
    [
        ("match", "take one of steps, matching, nft"),
        ("mine.py:nothing", "there is no file"),
        ("math:sqrt", "this is no class derived from"),
    ],
)
def test_an_objective_that_is_none_is_refused_before_a_weight_is_loaded(
    folder, capsys, name, message
):
    words = small(folder, "--model.component", "dit", "--rollout.dit_objective", name)
    assert main(*words, "--model.name", folder / "no_model") == 2
    assert f"rollout.dit_objective {name}: " in (text := told(capsys)) and message in text


MISTAKES = {
    "decisions returned none": ("return [1]", "return []"),
    "keep left nothing": ("return replace(rollout, latents_logprobs=old)", "return None"),
    "log_prob returned [[], [": (".mean((1, 2, 3))", ".mean()"),
    "log_prob raised NotImplementedError": ("    def log_prob", "    def other"),
}


@pytest.mark.usefixtures("at_root")
@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_in_an_objective_is_told_with_its_method(folder, capsys, message):
    right, wrong = MISTAKES[message]
    assert right in (code := cell_of_the_notebook())
    (folder / "mine.py").write_text(code.replace(right, wrong))
    name = f"{folder / 'mine.py'}:FinishedImage"
    words = small(folder, "--model.component", "dit", "--rollout.dit_objective", name)
    words += ["--rollout.num_inference_steps", 3, "--num_steps", 1]
    assert main(*words, "--output_dir", folder / "run") == 2
    assert f"rollout.dit_objective {name}: {message}" in told(capsys)


def test_what_needs_noise_is_refused_where_no_step_adds_any(folder):
    (folder / "mine.py").write_text(cell_of_the_notebook())
    mine = find_objective(f"{folder / 'mine.py'}:FinishedImage")
    for changes in ({"window": 2}, {"ratio_norm": True}, {"dit_beta": 0.1}):
        options = TrainerOptions().with_changes(**changes)
        with pytest.raises(UserError, match="they are for denoising steps that add noise"):
            refuse([*mine.problems(options)])


@pytest.mark.usefixtures("at_root")
def test_a_run_that_stops_and_goes_on_is_the_straight_run(folder):
    words = small(folder, "--model.component", "both", "--rollout.dit_objective", "nft")
    words += ["--rollout.num_inference_steps", 4, "--rollout.matching_times", 2]
    words += ["--training.updates_per_rollout", 2, "--reward.grpo.advantage_clip", 5]
    words += ["--training.slow_copy_decay", 0.5, "--training.slow_copy_growth", 0.5]
    words += ["--training.save_interval", 1, "--num_steps", 2]
    assert main(*words, "--output_dir", folder / "run") == 0
    checkpoints = folder / "run/checkpoints"
    straight = load_weights(checkpoints / "checkpoint_final")
    assert len(straight) == 2
    assert resume(checkpoints / "checkpoint_step_1", "--output_dir", folder / "run") == 0
    resumed = load_weights(checkpoints / "checkpoint_final")
    assert all(same_tensors(resumed[name], straight[name]) for name in straight)
    torch.load(checkpoints / "checkpoint_final/state/slow.pt", weights_only=True)


def test_equal_rewards_move_nothing(model):
    _, learnt = train(model, lambda images: torch.full((len(images),), 0.5))
    assert not learnt.any()
