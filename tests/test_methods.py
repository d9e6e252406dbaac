"Flow-DPPO, FDFO's pairs, a share of the loss per level: numbers from the papers' formulas."

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import PROMPTS, load_weights, main, read_jsonl, resume, same_tensors, small
from helpers import small_model
from PIL import Image

from glm_grpo import GLMImageWrapper, MinimalGRPOTrainer, compute_grpo_loss, pair_terms, spo_loss
from glm_grpo.data.basics import UserError, refuse
from glm_grpo.data.rollout import Rollout, RolloutOptions, Samples
from glm_grpo.maths.sde import step_coefficients
from glm_grpo.model.objectives import Denoising, Pairs
from glm_grpo.model.policies import ARPolicy
from glm_grpo.training.options import GRPOOptions, TrainerOptions

# The papers' formulas, number by number in Python's float64


def dppo_by_hand(new, old, advantages, far):
    "Loss and gradient. far: whether the divergence of a decision has reached the limit."
    total, gradient = 0.0, []
    for new_row, old_row, a, far_row in zip(new, old, advantages, far):
        gradient.append([])
        for lp, old_lp, is_far in zip(new_row, old_row, far_row):
            r, scale = math.exp(lp - old_lp), 1 / (len(new) * len(new_row))
            away = (r > 1 and a > 0) or (r < 1 and a < 0)
            dropped = is_far and away
            total += 0.0 if dropped else -r * a * scale
            gradient[-1].append(0.0 if dropped else -r * a * scale)  # d r / d lp = r
    return total, gradient


OLD = [[-0.2, -1.5, -6.0], [-0.1, -2.0, -0.7]]
NEW = [[-0.05, -1.2, -4.0], [-0.4, -1.0, -0.9]]
A = [1.0, -0.5]


def loss_and_gradient(**options):
    leaf = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    old = torch.tensor(OLD, dtype=torch.float64)
    how = {"loss_type": "dppo"} | options
    loss, metrics = compute_grpo_loss(leaf, old, torch.tensor(A).double(), **how)
    return loss.item(), torch.autograd.grad(loss, leaf)[0].tolist(), metrics


@pytest.mark.parametrize("limit", [0.02, 0.15])
def test_dppo_drops_tokens_whose_probability_moved_away(limit):
    far = []
    for new_row, old_row in zip(NEW, OLD):
        far.append([abs(math.exp(x) - math.exp(y)) > limit for x, y in zip(new_row, old_row)])
    loss, gradient, metrics = loss_and_gradient(divergence=2 * limit**2)
    expected, by_hand = dppo_by_hand(NEW, OLD, A, far)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert gradient == [pytest.approx(row, rel=1e-12) for row in by_hand]
    dropped = sum(g == 0 for row in by_hand for g in row)
    assert metrics["clip_fraction"] == pytest.approx(dropped / 6) and 0 < dropped < 6
    assert gradient[1][1] > 0  # it moved by 0.23, but against its advantage


def test_dppo_drops_steps_by_their_exact_divergence():
    kl = [[1e-6, 1e-5, 3e-5], [2e-5, 2e-5, 0.0]]
    exact = torch.tensor(kl, dtype=torch.float64)
    loss, gradient, _ = loss_and_gradient(divergence=1e-5, kl_old=exact)
    far = [[x >= 1e-5 for x in row] for row in kl]
    expected, by_hand = dppo_by_hand(NEW, OLD, A, far)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert gradient == [pytest.approx(row, rel=1e-12) for row in by_hand]


def pair_by_hand(v, v_old, end, other):
    "s and its gradient for one image: target velocity v_old - a."
    d = [(x - y) / 2 for x, y in zip(end, other)]
    size = sum(x * x for x in d) / len(d)
    a = [x / size for x in d]
    s = sum(x * x for x in a) / len(a)
    s -= sum((new - old + x) ** 2 for new, old, x in zip(v, v_old, a)) / len(a)
    return s, [-2 * (new - old + x) / len(a) for new, old, x in zip(v, v_old, a)]


def test_pairs_are_the_papers_formula():
    generator = torch.Generator().manual_seed(0)
    v, v_old, end, other = torch.randn(4, 5, 2, 3, generator=generator, dtype=torch.float64)
    v = v_old + 0.02 * v
    v.requires_grad_()
    s = pair_terms(v, v_old, end, other)
    (gradient,) = torch.autograd.grad(s.sum(), v)
    advantages, c = [0.3, -0.2, 1.0, 0.0, -2.0], 0.03
    expected = 0.0
    for i in range(5):
        rows = (x[i].flatten().tolist() for x in (v, v_old, end, other))
        by_hand, of_v = pair_by_hand(*rows)
        assert s[i].item() == pytest.approx(by_hand, rel=1e-6, abs=1e-8)
        assert gradient[i].flatten().tolist() == pytest.approx(of_v, rel=1e-6)
        r = math.exp(by_hand)
        expected += (-advantages[i] * r + abs(advantages[i]) * (r - 1) ** 2 / (2 * c)) / 5
    loss = spo_loss(s, torch.tensor(advantages), c)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    same = pair_terms(v_old, v_old, end, other), pair_terms(v_old, v_old, end, end)
    assert not torch.cat(same).any()


def test_spo_ends_at_the_bound_of_the_clip():
    for a in (1.0, -1.0):
        log_ratios = torch.log1p(torch.linspace(-0.1, 0.1, 201, dtype=torch.float64))
        losses = torch.stack([spo_loss(x[None], torch.tensor([a]), 0.03) for x in log_ratios])
        assert log_ratios[losses.argmin()].exp() == pytest.approx(1 + 0.03 * a, abs=1e-3)


def test_a_churned_step_keeps_signal_and_noise_at_the_schedule():
    for now, then, g in ((1.0, 0.7, 0.3), (0.7, 0.2, 0.0025), (0.2, 0.0, 0.3)):
        std, of_sample, of_velocity = step_coefficients([now, then], 0, g, "churn")
        q = then / (1 + g - g * then)  # the Euler step goes on to q
        signal = (1 - now) + (q - now) * (-1)  # of x0 in x + (q - now) v, with v = noise - x0
        noise = now + (q - now)
        shrink = 1 / (1 + g * q)
        assert of_sample == pytest.approx(shrink)
        assert of_velocity == pytest.approx(shrink * (q - now))
        assert std == pytest.approx(shrink * q * math.sqrt((1 + g) ** 2 - 1))
        assert shrink * signal == pytest.approx(1 - then)
        assert math.hypot(shrink * noise, std) == pytest.approx(then)


def test_each_level_has_its_share_of_the_gradient():
    "A preview of 2 x 2 tokens and a large grid of 4 x 3, before the first update."
    tokens = SimpleNamespace(grids=[(2, 2), (4, 3)])
    rollout, old = SimpleNamespace(tokens=tokens), torch.zeros(2, 16)
    samples = Samples(rollout, old, 2, torch.tensor([0.8, -0.8]), torch.tensor([True, True]))
    for share in (0.0, 0.3, 1.0):
        credit = ARPolicy(None).credit(samples, GRPOOptions(preview_share=share)).advantages
        leaf = old.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(compute_grpo_loss(leaf, old, credit)[0], leaf)
        for row, a in zip(gradient.tolist(), (0.8, -0.8)):
            assert sum(row[:4]) == pytest.approx(-a * share / 2)  # the loss: a mean of 2 samples
            assert sum(row[4:]) == pytest.approx(-a * (1 - share) / 2)
            assert row[0] == row[3] and row[4] == row[15]
    assert ARPolicy(None).credit(samples, GRPOOptions()) is samples


# With a model

SIZE = {"height": 64, "width": 64, "num_inference_steps": 3, "guidance_scale": 1.0}
# an edit has no preview, so its tokens are sampled in 4 steps and not in 260
BATCH = {"prompts": PROMPTS[:1], "source_images": [[Image.new("RGB", (64, 64), "olive")]]}
PAIRS = {"dit_objective": "pairs", "pairs_churn": 0.1, "scale": "none"}


@pytest.fixture(scope="module")
def model():
    made = GLMImageWrapper(small_model(), "dit", "float32", "cpu", lora={"rank": 2})
    with torch.no_grad():  # an adapter that does something
        generator = torch.Generator().manual_seed(0)
        for p in made.get_trainable_parameters():
            p += 0.02 * torch.randn(p.shape, generator=generator)
    return made


def green(images):
    return images[:, 1].mean((1, 2)) - images[:, [0, 2]].mean((1, 2, 3))


def trainer_of(model, **changes):
    options = SIZE | {"temperature": 3.0, "top_p": 1.0, "group_size": 4, "micro_batch_size": 2}
    options |= {"mode": "i2i", "callbacks": (), "learning_rate": 1e-3} | changes
    return MinimalGRPOTrainer(model, [BATCH], green, **options)


def gradients(trainer, experience, model):
    trainer.last_experience = experience
    minibatch = next(trainer.learner.minibatches(experience, trainer.step))
    metrics = trainer.learner.gradients(minibatch)["dit"]
    found = torch.cat([p.grad.flatten() for p in model.get_trainable_parameters()])
    trainer.optimizer.zero_grad()
    return found, metrics


def shifted(model, size=0.05):
    "Move the adapter, as an update would."
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.get_trainable_parameters():
            p += size * p.abs().mean() * torch.randn(p.shape, generator=generator)


@pytest.fixture
def adapter(model):
    "Put back afterwards."
    start = [p.detach().clone() for p in model.get_trainable_parameters()]
    yield
    with torch.no_grad():
        for p, old in zip(model.get_trainable_parameters(), start):
            p.copy_(old)


@pytest.mark.usefixtures("adapter")
def test_pairs_start_at_ratio_1_and_their_gradient_is_that_of_the_formula(model):
    trainer = trainer_of(model, **PAIRS)
    experience = trainer.collect(BATCH)
    samples = experience.samples["dit"]
    kept = samples.rollout.denoising
    assert kept.decisions == (0, 1, 2) and samples.advantages.shape == (4, 3)
    first = experience.rollout.initial_latents
    assert 0 < (first[0] - first[1]).std() < 0.5  # nearly the same noise
    found, metrics = gradients(trainer, experience, model)
    assert metrics["ratio_mean"] == 1 and metrics["ratio_std"] == 0 and metrics["old_new_gap"] == 0

    # the same from velocities and ends, image by image
    _, _, velocities = model.score_denoising(experience.rollout)
    rewards, total = experience.rewards.double(), 0.0
    for i in range(4):
        for j in range(3):
            k = (i + 1 + j) % 4
            d = (kept.latents[i] - kept.latents[k]).double() / 2
            a = d / (d**2).mean()
            v = velocities[i, j].double()
            s = (a**2).mean() - ((v - v.detach() + a) ** 2).mean()
            total = total - (rewards[i] - rewards[k]) / 2 * s / 12
    expected = torch.autograd.grad(total, model.get_trainable_parameters())
    expected = torch.cat([g.flatten() for g in expected])
    assert (found - expected).norm() < 1e-3 * expected.norm() and expected.norm() > 0

    shifted(model)
    of_sizes = []
    for size in (1, 2, 4):
        trainer.options.step.micro_batch_size = size
        of_sizes.append(gradients(trainer, experience, model)[0])
    for other in of_sizes[1:]:
        assert (of_sizes[0] - other).norm() < 1e-3 * other.norm()


def test_a_pair_without_a_reward_learns_nothing():
    pairs = Pairs(RolloutOptions(2, dit_objective="pairs"))
    denoising = Denoising(2, 1.0, {}, decisions=(0, 1), objective=pairs)
    samples = Samples(Rollout(["a"] * 4, denoising=denoising), None, 4)
    counted = torch.tensor([True, True, True, False])
    advantages = torch.tensor([1.0, -1.0, 3.0, 0.0])
    credit = pairs.credit(samples.with_advantages(advantages, counted)).advantages
    assert credit.tolist() == [[1, -1], [-2, 0], [0, 1], [0, 0]]


def test_an_evaluation_has_no_churn(model):
    "Without noise the images start from noise of their own, and no step is a decision."
    how = SIZE | {"decode": False, "score": False, "noise_level": 0.0}
    edit = PROMPTS[:1] * 2, BATCH["source_images"] * 2
    sampled = model.generate_with_tracking(*edit, dit_objective="pairs", **how)
    plain = model.generate_with_tracking(*edit, **how)
    assert sampled.denoising.decisions == ()
    assert torch.equal(sampled.initial_latents, plain.initial_latents)


@pytest.mark.usefixtures("adapter")
def test_dppo_gets_the_exact_divergence_of_each_step(model):
    trainer = trainer_of(model, loss_type="dppo", updates_per_rollout=2)
    experience = trainer.collect(BATCH)
    samples, policy = experience.samples["dit"], model.policies["dit"]
    grpo = GRPOOptions(loss_type="dppo")
    with torch.no_grad():
        assert not policy.terms(samples.rows(slice(0, 2)), grpo, 0.0, None).loss["kl_old"].any()
    found, metrics = gradients(trainer, experience, model)
    assert metrics["ratio_mean"] == 1 and metrics["clip_fraction"] == 0
    shifted(model)
    kept = samples.rollout.denoising
    with torch.no_grad():
        _, means, _ = model.score_denoising(samples.rollout)
        exact = policy.terms(samples, grpo, 0.0, None).loss["kl_old"]
    for j, index in enumerate(kept.decisions):
        std = step_coefficients(kept.sigmas, index, 0.7, "cps")[0]
        by_hand = ((means[:, j] - kept.latents_means[:, j]).double() ** 2).mean((1, 2, 3))
        torch.testing.assert_close(exact[:, j].double(), by_hand / (2 * std**2), rtol=1e-4, atol=0)
    between = exact.flatten().sort().values[5:7].mean()  # six of the twelve are far
    trainer.options.grpo.divergence = between.item()
    of_sizes = []
    for size in (1, 4):
        trainer.options.step.micro_batch_size = size
        of_sizes.append(gradients(trainer, experience, model))
    assert (of_sizes[0][0] - of_sizes[1][0]).norm() < 1e-3 * of_sizes[1][0].norm()
    assert 0 < of_sizes[0][1]["clip_fraction"] == of_sizes[1][1]["clip_fraction"] < 1


# Options


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"divergence": 1e-5}, "reward.grpo.divergence: it is for loss_type dppo"),
        ({"loss_type": "dppo", "importance_sampling_level": "sequence"}, "loss_type dppo"),
        ({"loss_type": "dppo", "dit_clip_range": 1e-5}, "reward.grpo.dit_clip_range"),
        ({"loss_type": "dppo", "delta": 3.0}, "reward.grpo.clip_range_high, delta"),
        ({"loss_type": "spo", "clip_range_high": 0.3}, "reward.grpo.clip_range_high, delta"),
        ({"loss_type": "dppo", "dit_objective": "matching"}, "reward.grpo.loss_type dppo"),
        ({"loss_type": "dppo"} | PAIRS, "reward.grpo.loss_type dppo"),
        (PAIRS | {"shared_noise": False}, "rollout.shared_noise false"),
        (PAIRS | {"window": 2}, "rollout.window"),
        (PAIRS | {"dit_clip_range": 1e-2}, "set rollout.pairs_clip"),
        (PAIRS | {"importance_sampling_level": "sequence"}, "importance_sampling_level sequence"),
        (PAIRS | {"dit_pull": 1.0}, "reward.grpo.dit_pull"),
        (PAIRS | {"mini_batches": 2}, "training.mini_batches"),
        ({"preview_share": 0.5, "mode": "i2i"}, "an edit has no preview"),
        ({"preview_share": 0.5, "importance_sampling_level": "sequence"}, "preview_share"),
    ],
)
def test_what_has_no_meaning_is_refused(model, changes, message):
    with pytest.raises(UserError, match=message):
        options = TrainerOptions().with_changes(**changes).check()
        refuse([*model.policies["dit"].problems(options)])


RUNS = {
    "dppo": ["--reward.grpo.loss_type", "dppo", "--reward.grpo.divergence", 1e-7],
    "pairs": ["--rollout.dit_objective", "pairs", "--rollout.pairs_churn", 0.1],
}


@pytest.mark.usefixtures("at_root")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_stops_and_goes_on_is_the_straight_run(folder, name):
    words = small(folder, "--model.component", "both", *RUNS[name])
    words += ["--rollout.num_inference_steps", 2, "--training.updates_per_rollout", 2]
    words += ["--training.save_interval", 1, "--num_steps", 2]
    assert main(*words, "--output_dir", folder / "run") == 0
    checkpoints, lines = folder / "run/checkpoints", read_jsonl(folder / "run/metrics.jsonl")
    straight = load_weights(checkpoints / "checkpoint_final")
    assert lines[0]["dit/grad_norm"] > 0 and lines[0]["dit/old_new_gap"] == 0
    assert resume(checkpoints / "checkpoint_step_1", "--output_dir", folder / "run") == 0
    resumed = load_weights(checkpoints / "checkpoint_final")
    assert straight and all(same_tensors(resumed[file], straight[file]) for file in straight)
