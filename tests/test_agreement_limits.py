"""The agreement card's limits: rounding passes, errors in scoring stop the run, in both dtypes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT

from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.training.agreement import Agreement, old_new_gap
from glm_grpo.training.metrics import gap_numbers

PROMPTS = ["a cat in the middle on a red ground", "a dog", "a blue bird on a green ground"]
SIZE = {"height": 128, "width": 128, "num_inference_steps": 3, "guidance_scale": 1.5}
HOT = {"temperature": 1.5, "top_p": 1.0, "score_batch_size": 3}
product = F.linear


def split_product(x, weight, bias=None):
    "A product in two halves, each rounded before they are added, as GPU kernels may do."
    half = x.shape[-1] // 2
    out = product(x[..., :half], weight[:, :half]) + product(x[..., half:], weight[:, half:])
    return out if bias is None else out + bias


class Sampled:
    "A hot rollout of both policies, and cards of its scoring."

    def __init__(self, dtype):
        self.dtype = dtype
        options = {"device": "cpu", "lora": {"rank": 4}, "torch_dtype": dtype}
        self.model = GLMImageWrapper(str(ROOT / "data/tiny-glm-image"), "both", **options)
        with torch.no_grad():
            self.rollout = self.model.generate_with_tracking(PROMPTS, decode=False, **SIZE, **HOT)

    @torch.no_grad()
    def card(self, name, size=3, **changes):
        "The card of one policy, scored in micro-batches of a size and with changed settings."
        policy, old = self.model.policies[name], self.rollout
        own = policy.samples(old, 1)
        changed = replace(old, **{part: replace(old[part], **changes[part]) for part in changes})
        samples, gaps = policy.samples(changed, 1), []
        for start in range(0, len(own), size):
            rows = slice(start, start + size)
            new = [policy.score(chunk) for chunk in policy.chunks(samples.rows(rows))]
            gaps.append(torch.cat(new, 1) - own.old_logprobs[rows])
        numbers = {k: v.item() for k, v in gap_numbers(torch.cat(gaps), "old_new_gap").items()}
        gap = old_new_gap(numbers, policy, self.dtype, clip=0.2)
        return Agreement({name: gap}, self.dtype, size)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def sampled(request):
    return Sampled(request.param)


@pytest.mark.parametrize("name", ["ar", "dit"])
def test_other_micro_batches_pass(sampled, name):
    assert not sampled.card(name, size=2).problem()


@pytest.mark.parametrize("name", ["ar", "dit"])
def test_products_in_another_order_pass(sampled, name, monkeypatch):
    "Each product in two halves that are rounded: more than kernels of another order differ."
    monkeypatch.setattr(F, "linear", split_product)
    gap = sampled.card(name).policies[name]
    assert gap.mean > 0 and not gap.too_large


def test_a_temperature_wrong_by_5_percent_stops(sampled):
    wrong = 1.05 * HOT["temperature"]
    assert "ar: new and old differ" in sampled.card("ar", tokens={"temperature": wrong}).problem()


def test_another_timestep_stops(sampled):
    wrong = (1,) * len(sampled.rollout.denoising.decisions)
    card = sampled.card("dit", denoising={"decisions": wrong})
    assert "dit: new and old differ" in card.problem()


def test_a_guidance_scale_wrong_by_1_percent_stops_in_float32(sampled):
    found = sampled.card("dit", denoising={"guidance_scale": 1.01 * SIZE["guidance_scale"]})
    assert bool(found.problem()) is (sampled.dtype == "float32")  # in bfloat16 it is rounding
