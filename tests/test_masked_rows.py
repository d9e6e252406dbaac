"""Prompts of different length leave no attention row that may look at nothing.

Some attention kernels of a GPU answer NaN for such a row. The kernel here does, and everything
else of it is PyTorch's own.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from helpers import small_model

from glm_grpo.maths.noise import named_uniforms
from glm_grpo.model import sampling
from glm_grpo.model.memory import checkpointing
from glm_grpo.model.tokens import visibility
from glm_grpo.model.sampling import sample_tokens
from glm_grpo.model.scoring import score_tokens
from glm_grpo.model.tokens import prepare_prompts
from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.training.trainer import MinimalGRPOTrainer

FOLDER = small_model()
PROMPTS = [
    "a cat in the middle on a red ground",
    'two dogs on a blue ground with a sign that says "A1"',
]
INDEX = [0, 0, 1, 1]


class Kernel:
    "Scaled dot product attention that gives NaN where a row may look at nothing, and counts."

    def __init__(self):
        self.plain = F.scaled_dot_product_attention
        self.calls = self.masked_calls = self.empty_rows = 0

    def __call__(self, query, key, value, attn_mask=None, *args, **kwargs):
        out = self.plain(query, key, value, attn_mask, *args, **kwargs)
        self.calls += 1
        if attn_mask is None:
            return out
        self.masked_calls += 1
        is_bool = attn_mask.dtype == torch.bool
        empty = ~attn_mask.any(-1) if is_bool else (attn_mask == -torch.inf).all(-1)
        self.empty_rows += int(empty.sum())
        return out.masked_fill(empty.expand(out.shape[:-1])[..., None], torch.nan)


@pytest.fixture
def kernel(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    return kernel


@pytest.fixture(scope="module")
def model():
    model = GLMImageWrapper(FOLDER, "both", torch_dtype="float32", device="cpu", lora={"rank": 2})
    for weight in model.get_trainable_parameters():
        weight.data.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    return model


@pytest.fixture(scope="module")
def inputs(model):
    "16 tokens to sample for two prompts of different length."
    inputs = prepare_prompts(model.processor, model.ar, PROMPTS, 128, 128)
    assert inputs.lengths[0] < inputs.lengths[1]
    positions = inputs.decode_position_ids[..., :16]
    return dataclasses.replace(inputs, grids=[(4, 4)], decode_position_ids=positions)


def sample_and_score(model, inputs, index, fixed=False):
    "(tokens, log-probs with gradient), hot: temperature 1.5, all tokens kept."
    numbers = named_uniforms([f"sample {i}" for i in range(len(index))], inputs.num_tokens)
    ids, _, _ = sample_tokens(model.ar, inputs, index, numbers, 1.5, 1.0, fixed_shapes=fixed)
    return ids, score_tokens(model.ar, inputs, index, ids, 1.5)


@pytest.mark.parametrize("fixed", (False, True))
def test_sampling_and_scoring_stay_finite(model, inputs, kernel, fixed):
    ids, logprobs = sample_and_score(model, inputs, INDEX, fixed)
    assert kernel.masked_calls and kernel.empty_rows == 0
    assert logprobs.isfinite().all() and logprobs.mean() < -0.5
    gradients = torch.autograd.grad(logprobs.mean(), model.get_trainable_parameters("ar"))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_kernel_sees_empty_rows(model, inputs, kernel):
    "With the mask that transformers makes of padding, this kernel spoils the prompts."
    text_model = model.ar.model.language_model
    embedded = text_model.embed_tokens(inputs.input_ids)
    with torch.no_grad():
        out = text_model(
            inputs_embeds=embedded,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
        )
    assert kernel.empty_rows and out.last_hidden_state[0].isnan().any()


def test_padding_changes_no_visible_row(model, inputs):
    "The same hidden states as with transformers' own mask, bit for bit, where there is a token."
    text_model = model.ar.model.language_model
    given = {"inputs_embeds": text_model.embed_tokens(inputs.input_ids)}
    given["position_ids"] = inputs.position_ids
    with torch.no_grad():
        theirs, ours = (
            text_model(attention_mask=mask, **given).last_hidden_state
            for mask in (inputs.attention_mask, visibility(inputs))
        )
    real = inputs.attention_mask.bool()
    assert torch.equal(ours[real], theirs[real])
    assert not torch.equal(ours[~real], theirs[~real])  # these look at themselves now


@pytest.mark.parametrize("index", ([0, 0], [1]))
@pytest.mark.parametrize("fixed", (False, True))
def test_a_batch_of_one_prompt_needs_no_mask(model, inputs, kernel, index, fixed, monkeypatch):
    "Neither in the prompt's own pass nor in scoring; with fixed shapes the loop hides its room."
    monkeypatch.setattr(sampling, "attend", F.scaled_dot_product_attention)  # a CPU asks no kernel
    together, _ = sample_and_score(model, inputs, [*index, 1 - index[0]], fixed)
    before = kernel.calls, kernel.masked_calls
    alone, logprobs = sample_and_score(model, inputs.rows([index[0]]), [0] * len(index), fixed)
    layers, steps = len(model.ar.model.language_model.layers), inputs.num_tokens - 1
    assert kernel.calls - before[0] == layers * (1 + steps + 1)
    assert kernel.masked_calls - before[1] == (layers * steps if fixed else 0)
    assert torch.equal(alone, together[: len(index)]) and logprobs.isfinite().all()


def test_a_training_step_stays_finite(kernel):
    lora = {"rank": 2}
    model = GLMImageWrapper(FOLDER, "both", torch_dtype="float32", device="cpu", lora=lora)

    def brightness(images):
        return images.mean((1, 2, 3))

    size = {"height": 32, "width": 32, "num_inference_steps": 2}
    options = {"micro_batch_size": 4, "temperature": 1.5, "top_p": 1.0}
    trainer = MinimalGRPOTrainer(model, [], brightness, 2, **size, **options)
    metrics = trainer.train_step({"prompts": PROMPTS})
    assert kernel.masked_calls and kernel.empty_rows == 0
    ratios = [value for name, value in metrics.items() if name.endswith("ratio_mean")]
    assert ratios and all(abs(ratio - 1) < 1e-6 for ratio in ratios)
    norms = [value for name, value in metrics.items() if name.endswith("grad_norm")]
    assert norms and all(0 < norm < 1e9 for norm in norms)


@pytest.fixture
def allowed(monkeypatch):
    "For each call of attention so far, whether cuDNN was allowed."
    attend, asked = F.scaled_dot_product_attention, []

    def note_and_attend(*args, **kwargs):
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note_and_attend)
    torch.backends.cuda.enable_cudnn_sdp(True)
    return asked


def test_the_language_model_does_not_use_cudnn(inputs, allowed):
    "Neither in sampling and scoring, nor where the backward pass repeats a layer."
    options = {"torch_dtype": "float32", "device": "cpu", "lora": {"rank": 2}}
    model = GLMImageWrapper(FOLDER, "ar", gradient_checkpointing=True, **options)
    layers = model.ar.model.language_model.layers
    ids, _ = sample_and_score(model, inputs, INDEX, fixed=True)
    with checkpointing(layers, True):
        logprobs = score_tokens(model.ar, inputs, INDEX, ids, 1.5)
    before = len(allowed)
    logprobs.mean().backward()
    assert len(allowed) - before == len(layers)
    assert not any(allowed)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_the_dit_may_use_cudnn(model, allowed):
    sizes = {"height": 32, "width": 32, "num_inference_steps": 2}
    rollout = model.generate_with_tracking(PROMPTS, score=False, noise_level=0.7, **sizes)
    allowed.clear()
    model.compute_denoising_logprobs(rollout).mean().backward()
    assert allowed and all(allowed)
