"The forward process: log-probs and losses as the authors publish them, and the steps chosen."

from dataclasses import replace

import pytest
import torch
from helpers import PROMPTS, ROOT

from glm_grpo.data.rollout import SampleNames
from glm_grpo.maths.loss import compute_grpo_loss
from glm_grpo.maths.matching import matching_logprob, nft_terms, stratified_steps
from glm_grpo.model.wrapper import GLMImageWrapper

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


SIZE = {"height": 64, "width": 64, "num_inference_steps": 8, "guidance_scale": 2.0}
HOW = {"dit_objective": "matching", "matching_times": 3, "temperature": 3.0, "top_p": 1.0}


@pytest.fixture(scope="module")
def model():
    found = GLMImageWrapper(ROOT / "data/tiny-glm-image", "dit", "float32", "cpu", lora={"rank": 2})
    with torch.no_grad():  # an adapter that does something
        generator = torch.Generator().manual_seed(0)
        for p in found.get_trainable_parameters():
            p += 0.02 * torch.randn(p.shape, generator=generator)
    return found


@pytest.fixture(scope="module")
def rollout(model):
    prompts = [PROMPTS[0]] * 2 + ['a sign "yes" on a red ground'] * 2
    return model.generate_with_tracking(prompts, score_batch_size=2, **SIZE, **HOW)


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
        guided = replace(rollout, denoising=replace(rollout.denoising, matching_guidance=2.0))
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
    noise = replace(rollout.denoising.noise, weight="uniform")
    rollout = replace(rollout, denoising=replace(rollout.denoising, noise=noise))
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
    later = replace(SampleNames.number(0, 5, PROMPTS[:1], 1), images=[0])
    one = model.generate_with_tracking(PROMPTS[:1], names=later, score=False, **SIZE, **HOW)
    alone = model.generate_with_tracking(PROMPTS[:1], score=False, **SIZE, **HOW)
    assert one.denoising.decisions != rollout.denoising.decisions == alone.denoising.decisions
    assert alone.latents_logprobs is None and alone.denoising.old_velocities is None
