"""Sampling and scoring of tokens on the tiny model: fast, and hot enough to fail.

At its default sampling the tiny model is nearly deterministic, so everything runs at temperature
1.5 with all tokens kept ("hot") and at temperature 2 with top_p 0.9 ("wide"), on short grids.
"""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from glm_grpo.maths.noise import named_uniforms
from glm_grpo.model.decode_step import joined_matrix, lay_together, linears_of
from glm_grpo.model.sampling import Decisions, SamplingLoop, sample_token_ids, sample_tokens
from glm_grpo.model.sampling import unpack_kept
from glm_grpo.model.scoring import score_tokens
from glm_grpo.model.tokens import language_model_parts, prepare_prompts, trim
from helpers import same_tensors

FOLDER = Path(__file__).parents[1] / "data/tiny-glm-image"
PROMPTS = [
    "three cats on a blue ground",
    "a cat in the top left on a red ground",
    'a cat left of a dog on a green ground with the word "UP"',
]
SETTINGS = {"hot": (1.5, 1.0), "wide": (2.0, 0.9)}  # temperature, top_p
INDEX = [0, 1, 1, 2, 2]  # prompts of different length, groups of different size
PLACES = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_up_proj|down_proj)|lm_head"


def shorten(inputs, grid):
    "The same prompts, with only the first h*w tokens of the preview to sample."
    h, w = grid
    short = inputs.rows(list(range(len(inputs))))
    short.grids = [grid]
    short.decode_position_ids = inputs.decode_position_ids[..., : h * w]
    return short


@pytest.fixture(scope="module")
def ar():
    model = GlmImageForConditionalGeneration.from_pretrained(
        FOLDER, subfolder="vision_language_encoder", dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def tuned(ar):
    "The model with an adapter of random weights, also on the head."
    model = get_peft_model(copy.deepcopy(ar), LoraConfig(r=4, target_modules=PLACES)).eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.05
    return model


@pytest.fixture(scope="module")
def whole(ar):
    processor = GlmImageProcessor.from_pretrained(FOLDER, subfolder="processor")
    return prepare_prompts(processor, ar, PROMPTS, 128, 128)


@pytest.fixture(scope="module")
def inputs(whole):
    "24 tokens to sample for three prompts."
    assert len(set(whole.attention_mask.sum(1).tolist())) == 3
    return shorten(whole, (3, 8))


@pytest.fixture(scope="module")
def uniforms(inputs):
    return named_uniforms([f"sample {i}" for i in range(len(INDEX))], inputs.num_tokens)


@pytest.fixture(scope="module", params=list(SETTINGS))
def sampled(request, ar, inputs, uniforms):
    "(temperature, top_p, token_ids, kept)"
    temperature, top_p = SETTINGS[request.param]
    found = sample_tokens(ar, inputs, INDEX, uniforms, temperature, top_p)
    return temperature, top_p, found.token_ids, found.kept


@pytest.fixture(scope="module")
def K(ar):
    return ar.config.vq_config.num_embeddings


def full_logits(model, inputs, index, token_ids, K):
    "The model's own logits [N, T, K] of each decision, with gradients where enabled."
    rows, T = inputs.rows(index), inputs.num_tokens
    out = model(
        input_ids=torch.cat((rows.input_ids, token_ids), 1),
        attention_mask=F.pad(rows.attention_mask, (0, T), value=1),
        position_ids=torch.cat((rows.position_ids, rows.decode_position_ids), 2),
    )
    L = rows.input_ids.shape[1]
    return out.logits[:, L - 1 : -1, :K]


def naive_logprobs(logits, token_ids, temperature, kept):
    "Plain masked log-softmax, and the log-prob of each token."
    logits = logits / temperature
    if kept is not None:
        logits = logits.masked_fill(~unpack_kept(kept, logits.shape[-1]), -torch.inf)
    return logits.log_softmax(-1).gather(2, token_ids[..., None])[..., 0]


def some_logits():
    "[64, 1024], from flat to peaked."
    logits = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    return logits * torch.linspace(0.1, 6, 64)[:, None]


# ---- one decision


def test_shares_are_probabilities():
    logits = some_logits()[20:21]
    u = (torch.arange(10_000) + 0.5) / 10_000
    token_ids, *_, kept = sample_token_ids(logits.expand(10_000, -1), u, 0.75)
    probabilities = logits[0].softmax(0) * kept[0]
    probabilities /= probabilities.sum()
    share = token_ids[:, 0].bincount(minlength=1024) / 10_000
    assert (share - probabilities).abs().max() < 2e-4 and (share > 0).sum() > 50


# ---- the loop


@pytest.mark.parametrize("fixed", (False, True))
def test_loop_gives_the_models_logits(ar, tuned, inputs, sampled, K, fixed):
    token_ids = sampled[2]
    found = {}
    for name, model in {"plain": ar, "tuned": tuned}.items():
        with torch.no_grad():
            loop, steps = SamplingLoop(model, inputs, torch.tensor(INDEX), fixed), []
            for ids, rotation in zip(token_ids.T, loop.rotations):
                steps.append(loop.logits.clone())
                loop.advance(ids, rotation)
            found[name] = torch.stack(steps, 1)
            expected = full_logits(model, inputs, INDEX, token_ids, K)
        assert torch.allclose(found[name], expected, atol=1e-3)
    assert (found["plain"] - found["tuned"]).abs().max() > 0.1


def test_tokens_are_those_of_the_models_logits(ar, inputs, uniforms, sampled, K):
    "Inverse CDF and kept sets, recomputed from one forward pass over what was sampled."
    temperature, top_p, token_ids, kept = sampled
    with torch.no_grad():
        logits = full_logits(ar, inputs, INDEX, token_ids, K) / temperature
    again, *_, own_kept = sample_token_ids(logits.flatten(0, 1), uniforms.flatten(), top_p)
    assert torch.equal(again.view(token_ids.shape), token_ids)
    if top_p < 1:  # last bits of the logits may move one token at the border of a set
        different = own_kept.view(*token_ids.shape, K) != unpack_kept(kept, K)
        assert different.sum(-1).max() <= 1 and different.float().mean() < 1e-4


def test_forbidden_outputs_change_nothing(ar, inputs, uniforms, sampled, K):
    "Neither sampling nor scoring sees outputs that are not image tokens, however likely they are."
    temperature, top_p, token_ids, kept = sampled
    tempting = copy.deepcopy(ar)
    with torch.no_grad():
        tempting.lm_head.weight[K:] = 10 * ar.lm_head.weight[:8]
        old = score_tokens(ar, inputs, INDEX, token_ids, temperature, kept)
        new = score_tokens(tempting, inputs, INDEX, token_ids, temperature, kept)
        rows = inputs.rows(INDEX)
        hidden = tempting.model.language_model(
            input_ids=rows.input_ids,
            attention_mask=rows.attention_mask,
            position_ids=rows.position_ids,
        ).last_hidden_state[:, -1]
        leak = tempting.lm_head(hidden).softmax(-1)[:, K:].sum(-1)
    assert leak.max() > 0.5
    again = sample_tokens(tempting, inputs, INDEX, uniforms, temperature, top_p)
    assert torch.equal(again[0], token_ids) and torch.equal(new, old)
    assert kept is None or torch.equal(again[1], kept)


@pytest.mark.parametrize("adapted", (False, True))
@pytest.mark.parametrize("fixed, setting", [(False, "hot"), (True, "wide")])
def test_the_loop_records_the_logprobs_of_scoring(
    ar, tuned, inputs, uniforms, setting, fixed, adapted
):
    model, (temperature, top_p) = tuned if adapted else ar, SETTINGS[setting]
    found = sample_tokens(model, inputs, INDEX, uniforms, temperature, top_p, fixed_shapes=fixed)
    with torch.no_grad():
        scored = score_tokens(model, inputs, INDEX, found.token_ids, temperature, found.kept)
    assert found.logprobs.dtype == torch.float32 and found.logprobs.mean() < -0.5
    assert (found.logprobs - scored).abs().max() < 1e-4


def test_samples_do_not_see_their_batch(ar, inputs, uniforms, sampled):
    "Other order, other companions; alone there is no padding, and no bias in attention."
    temperature, top_p, token_ids, _ = sampled
    order = [4, 0, 2]
    index = [INDEX[i] for i in order]
    other = sample_tokens(ar, inputs, index, uniforms[order], temperature, top_p)
    assert torch.equal(other.token_ids, token_ids[order])
    longest = inputs.rows([2])
    assert longest.attention_mask.all()
    alone, _, _ = sample_tokens(ar, longest, [0], uniforms[3:4], temperature, top_p)
    assert torch.equal(alone, token_ids[3:4])


def test_no_state_is_read_or_changed(ar, inputs, uniforms, sampled):
    temperature, top_p, token_ids, _ = sampled
    model = copy.deepcopy(ar)
    model.model._cached_decode_position_ids = torch.zeros(1, 3, 5)  # left over from elsewhere
    model.model.rope_deltas, model.model._prefill_len = torch.ones(1, 1), 3
    state, training = torch.get_rng_state(), [module.training for module in model.modules()]
    again, kept, _ = sample_tokens(model, inputs, INDEX, uniforms, temperature, top_p)
    score_tokens(model, inputs, INDEX, again, temperature, kept)
    assert torch.equal(again, token_ids) and torch.equal(state, torch.get_rng_state())
    assert training == [module.training for module in model.modules()]
    assert model.model._prefill_len == 3 and model.model.rope_deltas.tolist() == [[1]]


def test_an_adapter_can_be_switched_off(ar, tuned, inputs, uniforms, sampled):
    temperature, top_p, token_ids, kept = sampled
    with torch.no_grad():
        with_adapter, _, _ = sample_tokens(tuned, inputs, INDEX, uniforms, temperature, top_p)
        with tuned.disable_adapter():
            without = sample_tokens(tuned, inputs, INDEX, uniforms, temperature, top_p)
            reference = score_tokens(tuned, inputs, INDEX, token_ids, temperature, kept)
        old = score_tokens(ar, inputs, INDEX, token_ids, temperature, kept)
    assert torch.equal(without[0], token_ids) and torch.equal(reference, old)
    assert kept is None or torch.equal(without[1], kept)
    assert (with_adapter != token_ids).any()


def test_weights_that_lie_together_change_no_bit(tuned, inputs, uniforms):
    "In bfloat16, and also after an update of the adapters. A model that was moved falls back."
    apart = copy.deepcopy(tuned).bfloat16().requires_grad_(False)
    together = copy.deepcopy(apart)
    layers = language_model_parts(together)[1].layers
    for layer in layers:
        for linears in linears_of(layer):
            lay_together(linears)
    weights = [linear.base_layer.weight for linear in linears_of(layers[0])[0]]
    inputs, uniforms = shorten(inputs, (1, 8)), uniforms[:, :8]
    for factor in (1, -1.5):
        assert joined_matrix(weights) is not None
        results = []
        for model in (apart, together):
            for name, weight in model.named_parameters():
                if "lora_A" in name:
                    weight.mul_(factor)
            how = {"temperature": 2.0, "top_p": 0.9, "fixed_shapes": True}
            results.append(sample_tokens(model, inputs, INDEX, uniforms, **how))
        assert all(map(torch.equal, *results)), factor
    assert same_tensors(apart.state_dict(), together.state_dict())
    layers[0].to(torch.float32).to(torch.bfloat16)
    assert joined_matrix(weights) is None
    assert all(
        map(torch.equal, results[0], sample_tokens(together, inputs, INDEX, uniforms, **how))
    )


class Operations(TorchDispatchMode):
    "Names of all operations that are no views."

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_step_has_few_operations(ar, tuned, inputs, uniforms):
    "Per layer 26 with adapters and 18 without, and four norms: one operation each on CUDA."
    num_layers = len(ar.model.language_model.layers)
    for model, in_layer in ((ar, 18), (tuned, 28)):
        loop = SamplingLoop(model, trim(inputs), torch.tensor(INDEX), fixed_shapes=True)
        decisions = Decisions(loop, uniforms, top_p=0.9)
        with Operations() as done:
            decisions.step()
        most = 8 * (4 * num_layers + 1) + in_layer * num_layers + 45
        assert len(done.names) <= most, sorted(done.names)


# ---- scoring


def test_gradients_are_those_of_the_naive_way(ar, inputs, sampled, K):
    temperature, _, token_ids, kept = sampled
    weights = torch.linspace(-1, 2, token_ids.numel()).view(token_ids.shape)  # as advantages

    def gradient(logprobs):
        ar.zero_grad()
        (logprobs * weights).mean().backward()
        found = [p.grad.flatten() for p in ar.parameters() if p.grad is not None]
        ar.zero_grad()
        return torch.cat(found)

    logits = full_logits(ar, inputs, INDEX, token_ids, K)
    expected = gradient(naive_logprobs(logits, token_ids, temperature, kept))
    assert expected.abs().max() > 1e-2
    for chunk in (7, 128):
        logprobs = score_tokens(ar, inputs, INDEX, token_ids, temperature, kept, chunk=chunk)
        assert torch.allclose(gradient(logprobs), expected, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_entropies_and_logprobs_are_those_within_the_kept_sets(ar, inputs, sampled, K):
    temperature, _, token_ids, kept = sampled
    given = ar, inputs, INDEX, token_ids, temperature
    logits = full_logits(ar, inputs, INDEX, token_ids, K) / temperature
    if kept is not None:
        logits = logits.masked_fill(~unpack_kept(kept, K), -1e9)
        of_others = kept.roll(1, 0)
        outside = ~unpack_kept(of_others, K).gather(2, token_ids[..., None])[..., 0]
        assert outside.any() and not outside.all()
        assert torch.equal(score_tokens(*given, of_others) == -torch.inf, outside)
    logprobs = logits.log_softmax(-1)
    expected = -(logprobs.exp() * logprobs).sum(-1)
    assert torch.allclose(score_tokens(*given, kept, entropies=True), expected, atol=1e-4)
