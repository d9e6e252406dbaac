"""The maths floor: named noise, advantages, the loss and the denoising step.

Fast, and each part can be run alone: `pytest tests/test_maths.py -k loss`.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glm_grpo.data.basics import refusal
from glm_grpo.maths.advantages import compare_rewards, compute_advantages, equal_groups
from glm_grpo.maths.advantages import gdpo_advantages
from glm_grpo.maths.loss import LEVELS, LOSSES, combine_metrics, compute_grpo_loss, kl_estimate
from glm_grpo.maths.noise import named_seed
from glm_grpo.maths.sde import SDE_TYPES, choose_window, decision_steps, gaussian_kl, ratio_norm
from glm_grpo.maths.sde import sde_step, step_coefficients, velocity_mse

GOLDEN = json.loads((Path(__file__).parent.parent / "tests/golden/trl_loss.json").read_text())
NAN = float("nan")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def global_state_untouched():
    "Nothing on this floor reads or changes PyTorch's global generator."
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


class Calls(TorchDispatchMode):
    "The names of all operations that were called. Reading a number is `_local_scalar_dense`."

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_calls_sees_a_wait():
    with Calls() as calls:
        bool(torch.ones(3).sum() > 0)
    assert "_local_scalar_dense" in calls.names


# Advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none", "exponential"])
def test_advantages_scale(scale):
    rewards = torch.rand(5 * 8, generator=seeded(0), dtype=torch.float64)
    grouped = rewards.view(5, 8)
    divisors = {"group": grouped.std(1, keepdim=True), "batch": rewards.std(), "none": 1.0}
    expected = (grouped - grouped.mean(1, keepdim=True)) / divisors.get(scale, 1.0)
    if scale == "exponential":
        weights = (grouped / rewards.std()).exp()
        expected = weights / weights.mean(1, keepdim=True) - 1
    advantages = compute_advantages(rewards, 8, scale, eps=0.0)
    assert torch.allclose(advantages.view(5, 8), expected, rtol=1e-12)
    rewards[:8] = 0.1  # its mean is not 0.1
    advantages = compute_advantages(rewards, 8, scale)
    assert not advantages[:8].any() and advantages[8:].all()
    assert equal_groups(rewards, 8).tolist() == [True] + [False] * 4


def test_advantages_eps_and_dtype():
    rewards = torch.tensor([0.0, 0, 0, 1e-6])
    assert compute_advantages(rewards, 4, eps=1e-6)[3] < 0.6
    assert compute_advantages(rewards.bfloat16(), 4).dtype == torch.float32
    assert not compute_advantages(rewards.requires_grad_(), 4).requires_grad


def test_advantages_gdpo_where_a_part_scored_only_some():
    right = torch.tensor([0.0, 1, 0, 1])
    gap = torch.tensor([NAN, -0.03, -0.02, -0.01])
    weights = {"right": 1.0, "near": 1.0}
    expected = torch.tensor([0.0, -1, 0, 1])
    advantages = gdpo_advantages({"near": gap}, weights, 4)
    assert torch.allclose(advantages, expected / expected.std(), atol=1e-3)
    two_groups = {"near": torch.cat([gap * 100, right])}  # 3 and 4 scored: Bessel counts each
    expected = torch.cat([expected, (right - 0.5) / right.std()])
    advantages = gdpo_advantages(two_groups, weights, 4)
    assert torch.allclose(advantages, expected / expected.std(), atol=1e-4)
    silent = {"right": torch.cat([right, torch.full((4,), NAN)])}
    assert not gdpo_advantages(silent, weights, 4)[4:].any()
    three_nines = torch.tensor([0.9, 0.9, 0.9, 0.0, 1, 2])
    assert not gdpo_advantages({"right": three_nines}, weights, 3)[:3].any()


ROUNDED = torch.tensor([20.0, 20.0, 20.0, 20.000002, 0.1, 0.2, 0.4, 0.4])  # 20 and the next float


@pytest.mark.parametrize("scale", ["group", "batch", "none", "exponential"])
@pytest.mark.parametrize("size", [1.0, -1e-4, 3e6])
def test_advantages_of_rounding_are_zero(scale, size):
    advantages = compute_advantages(size * ROUNDED, 4, scale)
    assert not advantages[:4].any() and advantages[4:].all()
    assert equal_groups(size * ROUNDED, 4).tolist() == [True, False]
    weights = {"rounded": 1.0, "clear": 0.5}
    clear = torch.tensor([0.0, 1, 0, 1, 1, 0, 1, 0])
    parts = {"rounded": size * ROUNDED, "clear": clear}
    half = gdpo_advantages(parts, weights, 4)[:4]
    assert torch.allclose(half, half[1] * torch.tensor([-1.0, 1, -1, 1]))


@pytest.mark.parametrize("scale", ["group", "batch", "exponential"])
def test_advantages_with_an_epsilon_relative_to_the_rewards(scale):
    "The unit of the rewards does not matter, and rewards that are nearer count as equal."
    rewards = torch.tensor([0.1, 0.3, 0.2, 0.9, 0.4, 0.5, 0.7, 0.1])
    advantages = compare_rewards(rewards, 4, scale, relative=0.01)
    for unit in (1e-7, 1e4):
        other = compare_rewards(unit * rewards, 4, scale, relative=0.01)
        assert torch.allclose(other, advantages, rtol=1e-4)
        parts = {"a": unit * rewards, "b": unit * rewards.flip(0)}
        if scale == "group":
            mixed = gdpo_advantages(parts, {"a": 1.0, "b": 0.5}, 4, relative=0.01)
            assert mixed.std() > 0.98
    assert compute_advantages(1e-7 * rewards, 4, scale).abs().max() < 0.1  # eps is larger
    close = torch.tensor([20.0, 20.1, 20.0, 19.95])  # the steps of bfloat16
    assert equal_groups(close, 4, 0.01) and not equal_groups(close, 4)
    assert not compare_rewards(close, 4, scale, relative=0.01).any()
    assert not gdpo_advantages({"a": close}, {"a": 1.0}, 4, relative=0.01).any()


@pytest.mark.parametrize("scale", ["group", "batch", "none", "exponential"])
def test_advantages_without_a_score_are_as_if_the_sample_were_not_there(scale):
    rewards = torch.tensor([0.1, NAN, 0.3, 0.9, 0.5, 0.2, NAN, 0.8, NAN, NAN, NAN, NAN])
    rewards = torch.cat([rewards, torch.tensor([NAN, NAN, 5.0, NAN])]).double()
    scored = ~rewards.isnan()
    advantages = compare_rewards(rewards, 4, scale, eps=0.0)
    assert not advantages[~scored].any() and not advantages[8:].any()
    spread = {"group": None, "none": 1.0}.get(scale, rewards[scored].std())
    for start in (0, 4):
        known = rewards[start : start + 4][scored[start : start + 4]]
        expected = (known - known.mean()) / (known.std() if spread is None else spread)
        if scale == "exponential":
            expected = (known / spread).exp()
            expected = expected / expected.mean() - 1
        found = advantages[start : start + 4][scored[start : start + 4]]
        assert torch.allclose(found, expected, rtol=1e-9)
    parts = {"a": rewards[:8], "b": torch.where(rewards[:8].isnan(), NAN, 1 - rewards[:8] ** 2)}
    mixed = gdpo_advantages(parts, {"a": 1.0, "b": -0.5}, 4, scored=scored[:8])
    assert mixed[[1, 6]].tolist() == [0, 0]
    assert abs(mixed[scored[:8]].std() - 1) < 1e-5  # of those with a score alone


@pytest.mark.parametrize(
    "rewards, group_size, message",
    [
        (torch.zeros(7), 4, "groups of 4"),
        (torch.zeros(4, 2), 4, "shape (4, 2)"),
        (torch.zeros(0), 4, "shape (0,)"),
        (torch.zeros(4), 1, "at least 2"),
        (torch.tensor([0, NAN]), 2, "reward 1 is not finite"),
    ],
)
def test_advantages_refusals(rewards, group_size, message):
    assert message in refusal(compute_advantages, rewards, group_size)
    assert "scale" in refusal(compute_advantages, torch.zeros(4), 4, scale="std")


# The loss: equal to TRL

GIVEN = {name: torch.tensor(x, dtype=torch.float64) for name, x in GOLDEN["inputs"].items()}


def run_case(case):
    leaf = GIVEN["new_logprobs"].clone().requires_grad_()
    loss, metrics = compute_grpo_loss(
        leaf,
        GIVEN["old_logprobs"],
        GIVEN["advantages"],
        ref_logprobs=GIVEN["ref_logprobs"],
        mask=GIVEN["ragged" if case["mask"] == "ragged" else "mask"],
        **case["options"],
    )
    return loss, torch.autograd.grad(loss, leaf)[0], metrics


@pytest.mark.parametrize("loss_type", sorted(set(LOSSES) - {"reinforce", "dppo", "spo"}))
def test_loss_equals_trl(loss_type):
    assert GOLDEN["trl"] == "1.16.0" and len(GOLDEN["cases"]) == 240
    cases = [case for case in GOLDEN["cases"] if case["options"]["loss_type"] == loss_type]
    assert len(cases) >= 20
    for case in cases:
        loss, grad, metrics = run_case(case)
        expected = torch.tensor(case["grad"], dtype=torch.float64)
        assert abs(loss - case["loss"]) < 1e-7, case["options"]  # NaN is not below 1e-7
        assert (grad - expected).abs().max() < 1e-7, case["options"]
        assert abs(metrics["clip_fraction"] - case["clip_fraction"]) < 1e-6, case["options"]
        if "beta" in case["options"]:
            assert abs(metrics["kl"] - case["kl"]) < 1e-6, case["options"]


def options_of_trl():
    return sorted({name for case in GOLDEN["cases"] for name in case["options"]}) + ["ragged"]


@pytest.mark.parametrize("name", options_of_trl())
def test_loss_would_differ_from_trl_without(name):
    "The comparison can fail: where an option is left out, some cases no longer agree."
    disagree = 0
    for case in GOLDEN["cases"]:
        options = {key: value for key, value in case["options"].items() if key != name}
        mask = "full" if name == "ragged" else case["mask"]
        loss, _, _ = run_case({"mask": mask, "options": options})
        disagree += abs(loss - case["loss"]) > 1e-4
    assert disagree > 0


# The loss: what must hold

OLD = -torch.rand(6, 5, generator=seeded(0), dtype=torch.float64) * 9
NEW = OLD + 0.3 * torch.randn(6, 5, generator=seeded(1), dtype=torch.float64)
REF = OLD + 0.2 * torch.randn(6, 5, generator=seeded(2), dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0, -1.0, 0.3, -1.8], dtype=torch.float64)
RAGGED = torch.arange(5) < torch.tensor([1, 5, 3, 5, 2, 4])[:, None]


def gradient(cuts=(0, 6), advantages=ADVANTAGES, mask=RAGGED, **options):
    "Sum of the losses and of the gradients of the chunks between the cuts."
    leaf = NEW.clone().requires_grad_()
    total = 0
    for rows in map(slice, cuts, cuts[1:]):
        inputs = leaf[rows], OLD[rows], advantages[rows]
        more = {"mask": mask[rows], "ref_logprobs": REF[rows], "beta": 0.04}
        total = total + compute_grpo_loss(*inputs, **more, **options)[0]
    return total.detach(), torch.autograd.grad(total, leaf)[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_of_micro_batches_sums_to_the_whole(loss_type, level):
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    counts = {"num_samples": 6, "num_decisions": int(RAGGED.sum())}
    loss, grad = gradient(**options)
    for cuts in ((0, 3, 6), (0, 1, 6), (0, 1, 2, 4, 6)):
        total, summed = gradient(cuts, **options, **counts)
        assert torch.allclose(total, loss, rtol=1e-12) and torch.allclose(summed, grad, rtol=1e-12)
    naive = gradient((0, 1, 6), **options)[1] / 2
    assert (naive - grad).norm() > 0.1 * grad.norm()


@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_with_an_advantage_per_decision(loss_type):
    expanded = ADVANTAGES[:, None].expand(6, 5)
    for mask in (RAGGED, torch.ones_like(RAGGED)):
        per_sample = gradient(mask=mask, loss_type=loss_type)
        per_decision = gradient(mask=mask, loss_type=loss_type, advantages=expanded)
        assert all(map(torch.equal, per_sample, per_decision))
        spoilt = expanded.masked_fill(~mask, NAN)
        ignored = gradient(mask=mask, loss_type=loss_type, advantages=spoilt)
        assert all(map(torch.equal, per_sample, ignored))
    leaf = OLD.clone().requires_grad_()
    one_only = torch.zeros(6, 5, dtype=torch.float64)
    one_only[2, 3] = 1.0
    loss, metrics = compute_grpo_loss(leaf, OLD, one_only, loss_type=loss_type, clip_range_high=5.0)
    (grad,) = torch.autograd.grad(loss, leaf)
    assert grad[2, 3] < 0 and grad.count_nonzero() == 1
    assert abs(metrics["advantages_mean"] - 1 / 30) < 1e-12


def test_gspo_token_has_gspos_ratio_and_takes_an_advantage_per_decision():
    "Equal advantages of a sample give the loss, gradient and metrics of GSPO."
    sequence = gradient(importance_sampling_level="sequence")
    token = gradient(importance_sampling_level="sequence_token")
    assert all(map(torch.allclose, sequence, token))
    expanded = ADVANTAGES[:, None].expand(6, 5) * torch.tensor([1.0, 1, 1, 0, 0])
    _, own = gradient(importance_sampling_level="sequence_token", advantages=expanded)
    kl_only = gradient(importance_sampling_level="sequence_token", advantages=0 * ADVANTAGES)[1]
    assert torch.equal(own[:, 3:], kl_only[:, 3:]) and not torch.allclose(
        own[2, :3], kl_only[2, :3]
    )


def test_loss_per_decision_metrics_count_real_decisions():
    own = torch.full((6, 5), 3.0, dtype=torch.float64).masked_fill(~RAGGED, NAN)
    own[1] = 5.0
    _, metrics = compute_grpo_loss(NEW, OLD, own, mask=RAGGED)
    real = own[RAGGED]
    assert abs(metrics["advantages_mean"] - real.mean()) < 1e-12
    assert abs(metrics["advantages_std"] - real.std(correction=0)) < 1e-12


@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_of_one_decision_takes_both_shapes(loss_type):
    for level in LEVELS:
        options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1}
        flat = compute_grpo_loss(
            NEW[:, 0], OLD[:, 0], ADVANTAGES, ref_logprobs=REF[:, 0], **options
        )
        column = {"ref_logprobs": REF[:, :1], **options}
        for advantages in (ADVANTAGES, ADVANTAGES[:, None]):
            tables = compute_grpo_loss(NEW[:, :1], OLD[:, :1], advantages, **column)
            assert torch.equal(flat[0], tables[0])


@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_ignores_masked_decisions(loss_type):
    keep = torch.ones(6, 5, dtype=torch.bool)
    keep[:, 3:] = False
    leaf = NEW.clone().requires_grad_()
    old, ref = (x.masked_fill(~keep, NAN) for x in (OLD, REF))
    options = {"loss_type": loss_type, "beta": 0.1, "max_length": 3}
    spoilt = torch.where(keep, leaf, NAN)
    masked, metrics = compute_grpo_loss(
        spoilt, old, ADVANTAGES, mask=keep, ref_logprobs=ref, **options
    )
    short, expected = compute_grpo_loss(
        leaf[:, :3], OLD[:, :3], ADVANTAGES, ref_logprobs=REF[:, :3], **options
    )
    grads = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in (masked, short)]
    assert torch.allclose(masked, short) and torch.allclose(*grads)
    assert metrics == pytest.approx(expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_of_a_group_of_equal_rewards_moves_nothing(loss_type, level):
    advantages = compute_advantages(torch.tensor([0.1, 0.1, 0.1, 0.2, 0.7, 0.4]), 3)
    leaf = NEW.clone().requires_grad_()
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    compute_grpo_loss(leaf, OLD, advantages, **options)[0].backward()
    assert not leaf.grad[:3].any() and leaf.grad[3:].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_ratio_is_one_before_the_first_update(dtype):
    loss, metrics = compute_grpo_loss(OLD.to(dtype), OLD.to(dtype), ADVANTAGES.float())
    assert (metrics["ratio_mean"], metrics["ratio_std"], metrics["clip_fraction"]) == (1, 0, 0)
    assert loss.dtype == torch.float32


def test_loss_is_computed_in_float32_and_its_gradient_goes_to_the_new_logprobs():
    new, old = (OLD + 0.1).bfloat16(), OLD.bfloat16()
    low, _ = compute_grpo_loss(new, old, torch.arange(6.0))
    assert torch.equal(low, compute_grpo_loss(new.float(), old.float(), torch.arange(6.0))[0])
    leaves = [x.clone().requires_grad_() for x in (NEW, OLD, ADVANTAGES)]
    compute_grpo_loss(*leaves)[0].backward()
    assert [leaf.grad is None for leaf in leaves] == [False, True, True]


def test_loss_kl():
    "Zero at the reference, a gradient away from it; only watched where beta is 0."
    leaf, none = OLD.clone().requires_grad_(), torch.zeros(6)
    at_ref, metrics = compute_grpo_loss(leaf, OLD, none, ref_logprobs=OLD, beta=1.0)
    assert metrics["kl"] == 0 and not torch.autograd.grad(at_ref, leaf)[0].any()
    away, metrics = compute_grpo_loss(leaf + 0.1, OLD, none, ref_logprobs=OLD, beta=1.0)
    assert metrics["kl"] > 0 and torch.autograd.grad(away, leaf)[0].min() > 0
    watched, seen = compute_grpo_loss(leaf + 0.1, OLD, ADVANTAGES, ref_logprobs=OLD)
    assert seen["kl"] == metrics["kl"]
    assert torch.equal(watched, compute_grpo_loss(leaf + 0.1, OLD, ADVANTAGES)[0])


def test_kl_estimates():
    "Mean and mean gradient of each, exactly, for a model that chooses one of four."
    theta = torch.tensor([0.4, 0.1, -0.3, 0.2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.3, 0.1, -0.2], dtype=torch.float64).log_softmax(0)
    new = theta.log_softmax(0)
    probs = new.exp().detach()
    kl = (new.exp() * (new - reference)).sum()
    reverse_kl = (reference.exp() * (reference - new)).sum()

    def gradient(number):
        return torch.autograd.grad(number, theta, retain_graph=True)[0]

    k1, k2, k3 = (kl_estimate(new, reference, name) for name in ("k1", "k2", "k3"))
    means = [(probs * values).sum() for values in (k1, k2, k3)]
    assert torch.allclose(means[0], kl) and torch.allclose(means[2], kl) and (k3 >= 0).all()
    assert 1e-4 < abs(means[1] - kl) < 0.02
    spreads = [(probs * (values - kl) ** 2).sum().sqrt() for values in (k1, k3)]
    assert spreads[1] < spreads[0] / 2
    assert gradient(means[0]).abs().max() < 1e-12
    assert torch.allclose(gradient(means[1]), gradient(kl))
    assert torch.allclose(gradient(means[2]), gradient(reverse_kl))
    assert not torch.allclose(gradient(means[2]), gradient(kl), atol=0.01)
    corrected = (probs * k3 * (new - new.detach()).exp()).sum()
    assert torch.allclose(gradient(corrected), gradient(kl))


def test_loss_kl_that_is_known():
    leaf = OLD.clone().requires_grad_()
    exact = (leaf - OLD) ** 2 + 0.3
    loss, metrics = compute_grpo_loss(leaf, OLD, torch.zeros(6), kl=exact, beta=0.5)
    assert metrics["kl"] == pytest.approx(0.3) and loss.item() == pytest.approx(0.15)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"old_logprobs": OLD[:, :1]}, "old_logprobs (6, 1)"),
        ({"mask": torch.ones(6)}, "mask (6,)"),
        ({"ref_logprobs": OLD[:5]}, "ref_logprobs (5, 5)"),
        ({"advantages": ADVANTAGES[:, None]}, "got (6, 5) and (6, 1)"),
        ({"advantages": OLD, "importance_sampling_level": "sequence"}, "one advantage per sample"),
        ({"new_logprobs": OLD[None], "old_logprobs": OLD[None]}, "got (1, 6, 5)"),
        ({"loss_type": "ppo"}, "want one of grpo bnpo"),
        ({"importance_sampling_level": "word"}, "want one of token sequence"),
        ({"ref_logprobs": OLD, "kl_estimator": "k4"}, "want k1, k2 or k3"),
        ({"beta": 0.1}, "ref_logprobs (or kl) are needed"),
    ],
)
def test_loss_refusals(changes, message):
    inputs = {"new_logprobs": OLD, "old_logprobs": OLD, "advantages": ADVANTAGES}
    assert message in refusal(compute_grpo_loss, **{**inputs, **changes})


@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_does_not_wait_for_the_device(loss_type):
    options = {"mask": RAGGED, "ref_logprobs": REF, "beta": 0.1, "loss_type": loss_type}
    with Calls() as calls:
        compute_grpo_loss(NEW, OLD, ADVANTAGES, **options)  # its one tolist is not in the list
        compute_grpo_loss(NEW, OLD, NEW, as_tensors=True, **options)
    assert "_local_scalar_dense" not in calls.names and "exp" in calls.names


@pytest.mark.parametrize("as_tensors", [False, True])
def test_loss_metrics_of_chunks_combine_to_those_of_the_whole(as_tensors):
    _, whole = compute_grpo_loss(NEW, OLD, ADVANTAGES, ref_logprobs=REF)
    parts = []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        options = {"ref_logprobs": REF[rows], "num_samples": 6, "as_tensors": as_tensors}
        parts.append(compute_grpo_loss(NEW[rows], OLD[rows], ADVANTAGES[rows], **options)[1])
    assert all(torch.is_tensor(value) == as_tensors for value in parts[0].values())
    combined = combine_metrics(parts, [5, 15, 10])
    assert {name: float(value) for name, value in combined.items()} == pytest.approx(whole)


# The denoising step

S = torch.linspace(1, 0, 11, dtype=torch.float64).tolist()  # ten steps
V, X = torch.randn(2, 3, 4, 8, 8, generator=seeded(0))
EPS = torch.randn(X.shape, generator=seeded(5))


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_sde_log_prob_is_the_gaussian_density(sde_type):
    for i in decision_steps(S, 0.7, sde_type):
        prev, log_prob, mean, std = sde_step(V, X, S, i, sde_type=sde_type, generator=seeded(i))
        again = sde_step(V, X, S, i, sde_type=sde_type, prev_sample=prev)
        assert torch.equal(again[1], log_prob) and torch.equal(again[2], mean) and again[3] == std
        exact = torch.distributions.Normal(mean, std).log_prob(prev).mean((1, 2, 3))
        assert torch.allclose(log_prob, exact, atol=1e-5)
        noise = torch.randn(X.shape, generator=seeded(i))
        assert torch.equal(sde_step(V, X, S, i, sde_type=sde_type, noise=noise)[0], prev)


@pytest.mark.parametrize("sde_type", SDE_TYPES)
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_sde_noise_level_0_is_the_step_of_the_scheduler(shift, sde_type):
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(8)
    for i, timestep in enumerate(scheduler.timesteps):
        wanted = scheduler.step(V, timestep, X).prev_sample
        step = sde_step(V, X, scheduler.sigmas, i, noise_level=0, sde_type=sde_type)
        assert torch.equal(step[0], wanted) and step[3] == 0 and not step[1].any()


def flow_grpo(now, then, second, a):
    "As Flow-GRPO writes it."
    dt = then - now
    g = a * math.sqrt(now / (1 - (second if now == 1 else now)))
    drift = g**2 / (2 * now)
    return g * math.sqrt(-dt), 1 + drift * dt, (1 + drift * (1 - now)) * dt


def dance(now, then, second, a):
    "As DanceGRPO: the score from the guess of the image, weighted by g = a."
    dt = then - now
    drift = a**2 * dt / 2  # times the score, -(x - (1 - now) x0) / now**2, with x0 = x - now v
    c_sample = 1 + drift * (1 - (1 - now)) / now**2
    return a * math.sqrt(-dt), c_sample, dt + drift * (1 - now) * now / now**2


def cps(now, then, second, a):
    "As the authors of CPS write it."
    std = then * math.sin(a * math.pi / 2)
    old = math.sqrt(then**2 - std**2)
    return std, (1 - then) + old, -(1 - then) * now + old * (1 - now)


@pytest.mark.parametrize("sde_type, formula", [("sde", flow_grpo), ("dance", dance), ("cps", cps)])
def test_sde_coefficients_are_those_of_the_paper(sde_type, formula):
    for i in range(9):
        expected = formula(S[i], S[i + 1], S[1], 0.7)
        assert step_coefficients(S, i, 0.7, sde_type) == pytest.approx(expected, abs=1e-12)


def test_sde_gradient():
    prev, _, _, std = sde_step(V, X, S, 5, noise=EPS)
    leaf, given = V.clone().requires_grad_(), prev.clone().requires_grad_()
    sde_step(leaf, X, S, 5, prev_sample=given)[1].sum().backward()
    expected = EPS * step_coefficients(S, 5)[2] / (std * 4 * 8 * 8)
    assert torch.allclose(leaf.grad, expected, atol=1e-6) and given.grad is None
    shift = torch.zeros_like(V)
    shift[1, 2, 3, 4] = 2.0
    up, down = (sde_step(V + x, X, S, 5, prev_sample=prev)[1][1] for x in (shift, -shift))
    assert abs((up - down) / 4 - leaf.grad[1, 2, 3, 4]) < 1e-6
    assert leaf.grad[1, 2, 3, 4].abs() > 1e-4
    assert not sde_step(leaf, X, S, 5, noise=EPS)[0].requires_grad


def test_sde_is_computed_in_float32():
    low = [x.bfloat16() for x in (V, X, EPS)]
    results = sde_step(*low[:2], S, 5, noise=low[2])
    upcast = sde_step(low[0].float(), low[1].float(), S, 5, noise=low[2].float())
    for result, expected in zip(results[:3], upcast):
        assert result.dtype == torch.float32 and torch.equal(result, expected)


def test_sde_does_not_wait_for_the_device():
    with Calls() as calls:
        sde_step(V, X, S, 5, noise=EPS)
    assert "_local_scalar_dense" not in calls.names and "mul" in calls.names


def test_sde_decision_steps():
    assert all(decision_steps(S, 0.7, sde_type) == list(range(9)) for sde_type in SDE_TYPES)
    assert decision_steps(S, 0) == [] and step_coefficients(S, 9)[0] > 0
    assert decision_steps([0.9, 0.5, 0.2]) == [0, 1]  # a schedule that ends before 0


def test_sde_window():
    nine = list(range(9))
    assert choose_window([0, 2, 4], 2, "first") == [0, 2]
    slid = [choose_window(nine, 3, "sliding", step=step)[0] for step in range(9)]
    assert slid == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert choose_window(nine) == nine == choose_window(nine, 20, key="x")
    assert choose_window(nine, 9, "sliding", step=5) == nine
    starts = [choose_window(nine, 3, key=f"0|{step}|window")[0] for step in range(700)]
    assert starts == [named_seed(f"0|{step}|window", bits=64) % 7 for step in range(700)]
    assert set(starts) == set(range(7)) and min(map(starts.count, range(7))) > 70


def test_a_clip_range_of_2e6_clips_where_it_says():
    "A ratio in float32 is rounded to 1.2e-7, 6 % of this range; its difference from 1 is not."
    log_ratio = 2e-6 * torch.tensor([[-1.01, -0.99, 0.99, 1.01]])
    for sign in (1.0, -1.0):
        leaf = log_ratio.clone().requires_grad_()
        scored = leaf, torch.zeros_like(leaf), torch.tensor([sign])
        loss, metrics = compute_grpo_loss(*scored, clip_range=2e-6)
        loss.backward()
        assert metrics["clip_fraction"] == 0.25
        assert (leaf.grad[0] != 0).tolist() == [sign > 0, True, True, sign < 0]


def test_sde_ratio_norm():
    changed = V + 0.05 * torch.randn(V.shape, generator=seeded(9))
    for i in (0, 5, 8):
        prev, old, old_mean, std = sde_step(V, X, S, i, noise=EPS)
        _, new, mean, _ = sde_step(changed, X, S, i, prev_sample=prev)
        squares = ((mean - old_mean) ** 2).mean((1, 2, 3)) / (2 * std**2)
        assert torch.allclose(
            ratio_norm(EPS, mean, old_mean), std * (new - old + squares), atol=1e-5
        )
    leaf = V.clone().requires_grad_()
    ratio = ratio_norm(EPS, leaf, V).exp()
    ratio.sum().backward()
    assert torch.equal(ratio, torch.ones(3)) and torch.allclose(leaf.grad, EPS / 256)


def test_sde_distance_to_the_reference():
    leaf = (V + 0.1 * EPS).requires_grad_()
    _, _, mean, std = sde_step(leaf, X, S, 5, noise=EPS)
    _, _, ref_mean, _ = sde_step(V, X, S, 5, noise=EPS)
    kl, mse = gaussian_kl(mean, ref_mean, std), velocity_mse(leaf, V)
    normals = [torch.distributions.Normal(x, std) for x in (mean, ref_mean)]
    exact = torch.distributions.kl_divergence(*normals).mean((1, 2, 3))
    assert torch.allclose(kl, exact, atol=1e-6)
    assert torch.allclose(kl, mse * step_coefficients(S, 5)[2] ** 2 / (2 * std**2), atol=1e-6)
    assert not gaussian_kl(mean, mean, std).any() and not velocity_mse(V, V).any()
    for distance in (kl, mse):
        (grad,) = torch.autograd.grad(distance.sum(), leaf, retain_graph=True)
        assert (grad * EPS).sum() > 0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sample": X[:2]}, "sample of shape"),
        ({"noise": EPS[:, :2]}, "noise of shape"),
        ({"index": 10}, "steps 0 to 9"),
        ({"noise_level": -0.1}, "0 or more"),
        ({"noise_level": 1.1, "sde_type": "cps"}, "at most 1"),
        ({"sde_type": "ode"}, "sde, dance, cps"),
        ({"prev_sample": X}, "leave out noise"),
        ({"prev_sample": X[:1], "noise": None}, "prev_sample of shape"),
        ({"noise": None}, "noise or a generator"),
        ({"sigmas": [0.5, 0.7]}, "must fall"),
        ({"velocity": V[0, 0, 0], "sample": X[0, 0, 0]}, "a batch"),
    ],
)
def test_sde_refusals(changes, message):
    inputs = {"velocity": V, "sample": X, "sigmas": S, "index": 0, "noise": EPS}
    assert message in refusal(sde_step, **{**inputs, **changes})


def test_a_random_window_needs_a_key():
    assert "key" in refusal(choose_window, list(range(9)), 3)
