"The forward process: log-probs and losses as the authors publish them, and the steps chosen."

import pytest
import torch

from glm_grpo.maths.matching import matching_logprob, nft_terms, stratified_steps

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
