"""The whole model floor: ratio 1 in every setting, and what a rollout promises."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers import coarse_compile, small_model

from glm_grpo.data.basics import UserError, refusal
from glm_grpo.data.prompts import I2IDataset
from glm_grpo.data.rollout import RolloutOptions
from glm_grpo.maths.noise import SampleNames, request_names
from glm_grpo.model import sampler
from glm_grpo.model.denoise import Float8Layers
from glm_grpo.model.objectives import NoisySteps
from glm_grpo.model.sampler import RolloutSampler
from glm_grpo.model.decode_step import StepCounter
from glm_grpo.model.sampling import Decisions, unpack_kept
from glm_grpo.model.tokens import large_grid_tokens, upsample_tokens
from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.run.config import Config
from glm_grpo.run.plan import fit_run
from glm_grpo.training.ranks import Ranks

DATA = Path(__file__).parents[1] / "data"
CAT = 'a cat in the middle on a blue ground with the word "AN"'
DOG = "a dog left of a fish on a red ground"
STEPS = {"num_inference_steps": 3, "guidance_scale": 1.5, "noise_level": 0.8, "sde_type": "cps"}
# at its own temperature the tiny model is nearly deterministic, and its ratios are always 1
HOT = STEPS | {"temperature": 1.5, "top_p": 1.0}
WIDE = STEPS | {"temperature": 2.0, "top_p": 0.9}
SMALL = {"height": 64, "width": 64, "decode": False}


def new_model(component="both", rank=4, **options):
    lora = {"rank": rank} if rank else None
    return GLMImageWrapper(small_model(), component, device="cpu", lora=lora, **options)


@cache
def model_of(component, rank, dtype="float32"):
    "Shared by tests that change no weight."
    return new_model(component, rank, torch_dtype=dtype)


@cache
def edits():
    "Three prompts and their sources; the second source is wide."
    data = I2IDataset(DATA / "i2i/heldout/prompts.jsonl", None, image_size=64)
    sources = [data[i]["source"] for i in range(3)]
    sources[1] = [sources[1][0].resize((96, 64))]
    return [data[i]["prompt"] for i in range(3)], sources


def sampler_for(model, prompts, images=None, samples=1, per_sample=1, step=0, **changes):
    "For each prompt some token samples, and images of each."
    before, requests = changes.pop("before", None), request_names(prompts, images)
    names = SampleNames.grow(1, step, requests, samples, per_sample, before)
    options = RolloutOptions(**HOT | changes)
    return RolloutSampler(model, prompts, images, 64, 64, names, options, decode=False)


@torch.no_grad()
def change_weights(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.get_trainable_parameters():
        p += 0.03 * torch.randn(p.shape, generator=generator)


def largest_change(model, rollout, size):
    "Largest |new - old log-prob| of each policy, scored as the trainer scores."
    found = {}
    for name, policy in model.policies.items():
        samples, changes = policy.samples(rollout, len(rollout)), []
        for start in range(0, len(samples), size):
            for chunk in policy.chunks(samples.rows(slice(start, start + size))):
                changes.append((policy.score(chunk) - chunk.old_logprobs).abs().max().item())
        found[name] = max(changes)
    return found


UNMOVED = {"ar": 0, "dit": 0}


@pytest.mark.parametrize(
    "task, rank, options",
    [("t2i", 4, HOT), ("i2i", 4, WIDE), ("i2i", None, HOT)],
    ids=["t2i-lora-hot", "i2i-lora-wide", "i2i-full-hot"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ratio_is_one_before_the_first_update(dtype, task, rank, options):
    model = model_of("both", rank, dtype)
    prompts, images = edits() if task == "i2i" else ([CAT, DOG, CAT], None)
    sampler = sampler_for(model, prompts, images, **options)
    with torch.no_grad():
        tokens = sampler.sample_all_tokens()
    assert (tokens.tokens.kept is None) == (options["top_p"] == 1)
    sizes = (2,) if options is WIDE else (1, 3)
    for size in sizes:
        sampler.score_batch_size = size
        with torch.no_grad():
            rollout = sampler.denoise(sampler.prepare_denoising(tokens))
            rollout = replace(rollout, token_logprobs=model.compute_token_logprobs(tokens, size))
        assert rollout.token_logprobs.mean() < -0.2  # the model had a choice
        assert largest_change(model, rollout, size) == UNMOVED


def test_a_cpu_decodes_in_float32():
    "Without AVX-512 its convolutions take many times as long in bfloat16."
    model = model_of("dit", 4, "bfloat16")
    assert model.dtype == model.dit.dtype == torch.bfloat16
    assert model.pipe.vae.dtype == torch.float32


def sample_guided(model, share):
    return sample_compiled(model, False, guidance_scale=1.5, guided_share=share)


def sample_compiled(model, wanted, **changes):
    "A rollout of two edits whose second of four steps is the decision."
    prompts, images = edits()
    options = {"num_inference_steps": 4, "window": 1, "window_kind": "sliding", "step": 1}
    options |= {"compile": wanted, "guidance_scale": 1.0, "shared_noise": False} | changes
    sampler = sampler_for(model, prompts[:2], images[:2], **options)
    with torch.no_grad():
        return sampler.denoise(sampler.prepare_denoising(sampler.sample_all_tokens()))


def test_compiled_steps_change_no_decision(monkeypatch, capsys):
    "The compiler rounds to a tenth, so that a decision that called its code would be seen."
    model = model_of("dit", 4)
    monkeypatch.setattr(torch, "compile", coarse_compile)
    monkeypatch.setattr(model, "compiled", None)
    plain, mixed = (sample_compiled(model, wanted) for wanted in (False, True))
    assert mixed.denoising.decisions == plain.denoising.decisions == (1,)
    before = [rollout.denoising.latents_before for rollout in (plain, mixed)]
    assert not torch.allclose(*before, atol=1e-3)  # the step before the window is compiled
    assert largest_change(model, mixed, 1) == {"dit": 0}
    assert "minutes" in capsys.readouterr().out
    again = sample_compiled(model, False)
    assert torch.equal(again.denoising.latents, plain.denoising.latents)
    assert capsys.readouterr().out == ""


def test_steps_in_8_bits_change_no_decision():
    "A decision in 8 bits would be seen: they change the latents of the other steps."
    model = model_of("dit", 4, "bfloat16")
    plain, eight, again = (
        sample_compiled(model, False, float8=wanted).denoising for wanted in (False, True, False)
    )
    before = plain.latents_before, eight.latents_before
    assert torch.allclose(*before, atol=0.1) and not torch.allclose(*before, atol=1e-3)
    assert largest_change(model, sample_compiled(model, False, float8=True), 1) == {"dit": 0}
    assert torch.equal(plain.latents, again.latents)


def test_a_device_without_8_bits_is_refused_before_the_model_loads(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", lambda *args, **how: 1 / 0)
    config = Config(rollout=RolloutOptions(float8=True))
    found = refusal(fit_run, config, (), Ranks(), print)
    assert found.startswith("rollout.float8: cpu") and "ZeroDivisionError" in found


def test_steps_without_guidance_are_no_decisions():
    "Of four steps the second is the decision, so a share of a quarter guides as many as a half."
    model = model_of("dit", 4)
    calls, numbers, rollouts = [], [], []
    counter = model.dit.register_forward_pre_hook(lambda *call: calls.append(1))
    for share in (1.0, 0.5, 0.25):
        rollouts.append(sample_guided(model, share).denoising)
        numbers.append(len(calls))
        calls.clear()
    counter.remove()
    full, half, quarter = rollouts
    rows = len(full.latents)  # each denoised alone
    assert numbers == [numbers[0], numbers[0] - 2 * rows, numbers[0] - 2 * rows]
    assert torch.equal(full.latents_before, half.latents_before)
    assert torch.equal(half.latents, quarter.latents)
    assert not torch.equal(full.latents, half.latents)
    assert largest_change(model, sample_guided(model, 0.25), 1) == {"dit": 0}


def test_what_auto_compiles(monkeypatch):
    "On CUDA, a large denoiser of one piece, at most half of whose steps are scored."
    monkeypatch.setattr(sampler, "COMPILED_FROM", 5)
    weights = [torch.empty(5)]
    for device, steps, sharded, numbers, expected in (
        ("cuda", 4, False, 5, True),
        ("cpu", 4, False, 5, False),
        ("cuda", 3, False, 5, False),
        ("cuda", 4, True, 5, False),
        ("cuda", 4, False, 4, False),
    ):
        dit = SimpleNamespace(parameters=lambda numbers=numbers: [weights[0][:numbers]])
        compiled = SimpleNamespace(velocity="blocks")
        model = SimpleNamespace(device=torch.device(device), dit=dit, compiled=compiled)
        model.dit_is_sharded = sharded
        asked = SimpleNamespace(model=model, options=RolloutOptions(num_inference_steps=steps))
        assert (RolloutSampler.undecided(asked, 2) == "blocks") == expected


@pytest.mark.parametrize("component", ["ar", "dit"])
def test_ratio_is_one_for_each_policy_alone(component):
    model = model_of(component, 4)
    prompts, images = edits()
    for norm in (False, True):
        rollout = model.generate_with_tracking(
            prompts, images, **SMALL | HOT, seed=1, score_batch_size=2, ratio_norm=norm
        )
        assert largest_change(model, rollout, 2) == {component: 0}


def test_wrong_score_is_found():
    model = model_of("both", 4)
    prompts, images = edits()
    rollout = model.generate_with_tracking(prompts, images, **SMALL | HOT, score_batch_size=3)
    tokens, denoising = rollout.tokens, rollout.denoising
    swapped = [denoising.sources[i] for i in (1, 0, 2)]
    other = NoisySteps(replace(denoising.objective.options, noise_level=0.7))
    no_letters = {prompt: 0 * glyph for prompt, glyph in denoising.glyphs.items()}
    for name, wrong in {
        "ar": replace(rollout, tokens=replace(tokens, temperature=1.4)),
        "dit": replace(rollout, denoising=replace(denoising, guidance_scale=1.0)),
    }.items():
        assert largest_change(model, wrong, 3)[name] > 1e-5
    for change in ({"sources": swapped}, {"objective": other}, {"glyphs": no_letters}):
        wrong = replace(rollout, denoising=replace(denoising, **change))
        assert largest_change(model, wrong, 3)["dit"] > 1e-5, change.keys()


def pipeline_latents(model, rollout):
    h, w = rollout.tokens.grids[-1]
    large_ids = large_grid_tokens(rollout.token_ids, rollout.tokens.grids)
    return model.pipe(
        prompt=rollout.prompts,
        prior_token_ids=upsample_tokens(large_ids, h, w),
        latents=rollout.initial_latents,
        height=32 * h,
        width=32 * w,
        num_inference_steps=3,
        guidance_scale=1.5,
        output_type="latent",
    ).images


def test_without_noise_the_latents_are_the_pipelines():
    model = model_of("dit", 4)
    options = SMALL | HOT | {"noise_level": 0}
    rollout = model.generate_with_tracking([CAT, CAT], **options, seed=3)
    assert rollout.denoising.decisions == () and rollout.latents_logprobs is None
    assert torch.equal(pipeline_latents(model, rollout), rollout.denoising.latents)


def test_batches_of_the_denoising_are_passed_on_in_their_rows():
    model, batches = model_of("dit", 4), []
    prompts, images = edits()
    options = SMALL | HOT | {"decode": True, "score_batch_size": 2}
    rollout = model.generate_with_tracking(
        prompts, images, **options, on_images=lambda *batch: batches.append(batch)
    )
    assert sorted(row for rows, _ in batches for row in rows) == [0, 1, 2]
    for rows, found in batches:
        assert torch.equal(found, rollout.image_tensors[rows])
    blind = model.generate_with_tracking(prompts, images, **options | {"decode": False})
    assert blind.image_tensors is None and torch.equal(blind.token_ids, rollout.token_ids)
    assert torch.equal(blind.latents_logprobs, rollout.latents_logprobs)
    assert torch.equal(model.decode(blind.rows([0])), rollout.image_tensors[:1])


def test_rows_are_sampled_and_scored_in_the_trainers_batches(monkeypatch):
    "On some machines a row is rounded alike in every batch, and the ratio shows no difference."
    model, sizes = new_model(), {"tokens": [], "latents": []}
    score_tokens, sample_latents = sampler.score_tokens, sampler.sample_latents

    def count_tokens(ar, inputs, prompt_index, *args):
        sizes["tokens"].append(len(prompt_index))
        return score_tokens(ar, inputs, prompt_index, *args)

    def count_latents(*args, micro_batch_size=None, **kwargs):
        sizes["latents"].append(micro_batch_size)
        return sample_latents(*args, micro_batch_size=micro_batch_size, **kwargs)

    monkeypatch.setattr(sampler, "score_tokens", count_tokens)
    monkeypatch.setattr(sampler, "sample_latents", count_latents)
    prompts, images = edits()
    with torch.no_grad():
        replace(sampler_for(model, prompts, images), score_batch_size=2).sample()
    assert sizes == {"tokens": [2, 1], "latents": [2]}


@torch.no_grad()
def rows_of_the_dit(sampler, tokens, shared):
    "The denoised rollout of these tokens, and the number of rows that went through the DiT."
    rows = []
    if not shared:  # every step for every row
        sampler.denoise_common_steps = lambda samples: (None, 0)

    def count(module, args, options):
        if options["encoder_hidden_states"].shape[1]:  # no source image: those have no words
            rows.append(len(options["hidden_states"]))

    rollout = sampler.prepare_denoising(tokens)
    counter = sampler.model.dit.register_forward_pre_hook(count, with_kwargs=True)
    rollout = sampler.denoise(rollout)
    counter.remove()
    scored = sampler.model.compute_token_logprobs(tokens, sampler.score_batch_size)
    scored = scored[sampler.names.sample_of_image]
    return replace(rollout, token_logprobs=scored), sum(rows)


LATE = {"num_inference_steps": 6, "guidance_scale": 1, "window": 2, "window_kind": "sliding"}


# size: larger batches may take other matrix kernels, which round differently
@pytest.mark.parametrize("dtype, size, share", [("bfloat16", 1, 0), ("float32", 3, 1e-4)])
@torch.no_grad()
def test_steps_before_the_window_are_done_once_per_start(dtype, size, share):
    "The same rollout as when every row does every step, and ratio 1."
    model = model_of("both", 4, dtype)
    prompts, images = (given[:2] for given in edits())
    late = LATE | {"samples": 2, "per_sample": 2, "step": 3}
    sampler = sampler_for(model, prompts, images, batch_size=size, **late)
    sampler.score_batch_size = size
    tokens = sampler.sample_all_tokens()
    once, few = rows_of_the_dit(sampler, tokens, shared=True)
    each, many = rows_of_the_dit(sampler, tokens, shared=False)
    assert once.denoising.decisions == each.denoising.decisions == (3, 4)
    assert (many, few) == (8 * 6, 4 * 3 + 8 * 3)
    for name in ("latents", "latents_before", "latents_after", "latents_logprobs"):
        limit = share * each[name].abs().max()  # of the largest value
        assert (once[name] - each[name]).abs().max() <= limit, name
    assert torch.equal(once.initial_latents, each.initial_latents)
    assert largest_change(model, once, size) == UNMOVED


@torch.no_grad()
def test_nothing_is_shared_where_images_differ_from_the_start():
    model = model_of("both", 4)
    late, tokens = LATE | {"samples": 2, "per_sample": 2, "step": 3}, None
    for change in ({"window_kind": "first"}, {"window": None}, {"shared_noise": False}):
        sampler = sampler_for(model, [CAT], **late | change)
        tokens = tokens or sampler.sample_all_tokens()
        once, few = rows_of_the_dit(sampler, tokens, shared=True)
        each, many = rows_of_the_dit(sampler, tokens, shared=False)
        assert few == many == 4 * 6 and torch.equal(once["latents"], each["latents"])


@torch.no_grad()
def test_noise_has_names():
    "Neighbours, ranks and batches change nothing; another step or another source does."
    model = model_of("both", 4)
    prompts, images = edits()
    wish, (square, wide, other) = prompts[0], images

    def sample(rows, samples=1, **changes):
        sampler = sampler_for(model, [wish] * len(rows), rows, samples, 2, **changes)
        return sampler.image_rows(sampler.prepare_denoising(sampler.sample_all_tokens()))

    four = sample([square], samples=2)
    assert torch.equal(four.token_ids[0], four.token_ids[1])
    assert not torch.equal(four.token_ids[0], four.token_ids[2])
    [request] = request_names([wish], [square])
    second_rank = sample([square], before={request: 1})
    assert torch.equal(second_rank.token_ids, four.token_ids[2:])
    twice = sample([square] * 2)
    assert torch.equal(twice.token_ids, four.token_ids)
    assert torch.equal(twice.initial_latents, four.initial_latents)
    next_step = sample([square], step=1)
    assert not torch.equal(next_step.token_ids, four.token_ids[:2])
    assert not torch.equal(next_step.initial_latents, four.initial_latents[:2])
    mixed = sample([wide, square, other])
    assert mixed.tokens.prompt_index.tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal(mixed.token_ids[2], four.token_ids[0])
    assert torch.equal(mixed.initial_latents[2], four.initial_latents[0])
    assert not torch.equal(mixed.initial_latents[0], mixed.initial_latents[2])
    own = sample([square], samples=2, shared_noise=False).initial_latents
    assert not torch.equal(own[0], own[1]) and torch.equal(own[0], own[2])


@torch.no_grad()
def test_prompts_that_are_repeated_become_a_tree_at_the_door(monkeypatch):
    "In any order: each prompt is laid out once, and its samples have the noise of the tree."
    model = model_of("both", 4)
    laid_out, prepare = [], sampler.prepare_prompts

    def noted(processor, ar, prompts, *more):
        laid_out.append(prompts)
        return prepare(processor, ar, prompts, *more)

    monkeypatch.setattr(sampler, "prepare_prompts", noted)
    how = SMALL | HOT | {"seed": 1, "score_batch_size": 2}
    prompts, sources = (given[:2] for given in edits())
    wanted = [0, 0, 1, 0, 1, 0]  # with two images for each token sample
    asked = [prompts[i] for i in wanted]
    rollout = model.generate_with_tracking(asked, [sources[i] for i in wanted], **how)
    requests = request_names(prompts, sources)
    names = SampleNames.grow(how.pop("seed"), 0, requests, samples=2, images=2)
    tree = model.generate_with_tracking(prompts, sources, names=names, **how)
    assert laid_out == [prompts] * 2 and rollout.prompts == asked
    assert tree.prompts == [prompts[0]] * 4 + [prompts[1]] * 4
    order = [0, 1, 4, 2, 5, 3]
    assert torch.equal(rollout.token_ids, tree.token_ids[order])
    assert torch.equal(rollout.initial_latents, tree.initial_latents[order])
    latents, expected = rollout["latents"], tree["latents"][order]
    assert (latents - expected).abs().max() <= 1e-4 * expected.abs().max()  # other batches
    with pytest.raises(UserError, match="3 prompts, and names of 2"):
        model.generate_with_tracking(*edits(), names=names, **how)


@torch.no_grad()
def test_window_moves_with_the_step():
    model = model_of("dit", 4)
    prompts, images = edits()
    tokens, windows = sampler_for(model, prompts, images).sample_all_tokens(), []
    for step in range(3):
        options = {"window": 1, "window_kind": "sliding", "ratio_norm": step == 2}
        sampler = sampler_for(model, prompts, images, step=step, **options)
        denoising = sampler.prepare_denoising(tokens).denoising
        windows.append(denoising.decisions)
        assert denoising.objective.options.ratio_norm == (step == 2)
    assert windows == [(0,), (1,), (0,)]


@torch.no_grad()
def test_other_programs_do_not_change_the_batches_of_tokens(monkeypatch):
    "Another batch rounds differently, so a run beside a full device would sample other tokens."
    model, batches = model_of("ar", 4), []
    sample = sampler.sample_tokens

    def noted(ar, inputs, index, *more):
        batches.append(len(index))
        return sample(ar, inputs, index, *more)

    monkeypatch.setattr(sampler, "sample_tokens", noted)
    nearly_full = SimpleNamespace(total=16 * 10**9, available=10**5)
    monkeypatch.setattr("psutil.virtual_memory", lambda: nearly_full)
    prompts, images = edits()
    sampler_for(model, prompts[:1], images[:1], samples=4).sample_all_tokens()
    assert batches == [4]


@pytest.mark.parametrize("u", [1.0, 1 - 2**-24])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_largest_uniforms_sample_a_token_of_the_codebook(u, top_p):
    "u times the sum of the probabilities can be rounded up to the sum."
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(500, 64, generator=generator)
    counter = StepCounter(False, "cpu")
    loop = SimpleNamespace(K=64, counter=counter, logits=logits, rotations=torch.zeros(1, 2))
    decisions = Decisions(loop, torch.full((500, 1), u), top_p)
    decisions.decide(decisions.read()[0])
    ids, kept, logprobs = decisions.sampled()
    assert ids.max() < 64 and logprobs.isfinite().all()
    if top_p < 1:
        assert unpack_kept(kept[:, 0], 64).gather(1, ids).all()


def run_once(folder, **options):
    model = GLMImageWrapper(small_model(), "both", device="cpu", lora=folder, **options)
    rollout = model.generate_with_tracking(*edits(), **SMALL | HOT | {"window": 1}, seed=3)
    kept = []

    def keep(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for policy in model.policies.values():  # backward before the other half is awake
            policy.score(policy.samples(rollout, 3)).mean().backward()
    gradients = [p.grad for p in model.get_trainable_parameters()]
    return rollout, model.decode(rollout), gradients, sum(kept)


def test_checkpointing_and_offload_change_only_the_memory(tmp_path):
    model = new_model()
    change_weights(model)
    model.save_pretrained(tmp_path / "both")
    rollout, images, gradients, plain = run_once(tmp_path / "both")
    assert all(gradient.any() for gradient in gradients)
    for options in ({"gradient_checkpointing": True}, {"offload": True}):
        again, images_again, gradients_again, kept = run_once(tmp_path / "both", **options)
        for name in ("token_ids", "token_logprobs", "latents_logprobs"):
            assert torch.equal(rollout[name], again[name])
        assert torch.equal(images, images_again)
        for a, b in zip(gradients, gradients_again, strict=True):
            assert torch.allclose(a, b, atol=1e-7)
        if "gradient_checkpointing" in options:
            assert kept < 0.6 * plain


def test_offload_keeps_one_half_on_the_device():
    model, plain = new_model(offload=True), model_of("both", 4)
    assert repr(model) == repr(plain)
    for awake, asleep in (("ar", "dit"), ("dit", "ar")):
        model.wake(awake)
        halves = {"ar": model.ar, "dit": model.dit}
        size = {half: sum(p.numel() for p in m.parameters()) for half, m in halves.items()}
        adapter = sum(p.numel() for p in model.get_trainable_parameters(asleep))
        assert size[asleep] == adapter < size[awake]
        whole = {"ar": plain.ar, "dit": plain.dit}[awake]
        assert size[awake] == sum(p.numel() for p in whole.parameters())


def test_seeds_together_give_the_images_of_each_alone():
    "As an evaluation asks for them on a GPU; a prompt that comes twice gets two images."
    model, seeds = model_of("dit", 4), ["eval-0", "eval-1"]
    prompts, images = ([given[i] for i in (0, 1, 0)] for given in edits())
    how = HOT | {"height": 64, "width": 64, "noise_level": 0.0, "score": False}
    rows = [seed for seed in seeds for _ in prompts]
    together = model.generate_with_tracking(prompts * 2, images * 2, seed=rows, **how)
    alone = [model.generate_with_tracking(prompts, images, seed=seed, **how) for seed in seeds]
    assert together.prompts == prompts * 2
    assert torch.equal(together.token_ids, torch.cat([one.token_ids for one in alone]))
    made = torch.cat([one.image_tensors for one in alone])
    assert torch.allclose(together.image_tensors, made, atol=1e-4)
    assert len({image.numpy().tobytes() for image in made}) == 6


def test_no_copy_in_8_bits_where_all_steps_are_scored(monkeypatch):
    model = model_of("dit", 4)
    monkeypatch.setattr(model, "float8", None)
    pairs = {"dit_objective": "pairs", "window": None, "window_kind": "random"}
    sample_compiled(model, False, float8=True, **pairs)
    assert model.float8 is None
    sample_compiled(model, False, float8=True)
    assert model.float8


def test_weights_that_train_have_no_copy_in_8_bits():
    model = GLMImageWrapper(small_model(), "dit", device="cpu")
    assert "weights train" in refusal(lambda: Float8Layers(model.pipe.transformer))


def test_kept_sets_make_tokens_likelier():
    "Old and new could both forget the kept sets; the ratio would not show it."
    model = model_of("both", 4)
    prompts, images = edits()
    rollout = model.generate_with_tracking(prompts, images, **SMALL | WIDE)
    without = replace(rollout, tokens=replace(rollout.tokens, kept=None))
    with torch.no_grad():
        gain = rollout.token_logprobs - model.compute_token_logprobs(without)
    assert gain.min() > -1e-5 and gain.mean() > 0.01
