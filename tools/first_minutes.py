"""The first command on a new GPU: about two minutes of checks that a CPU cannot make, then up to
eight minutes in which ways to be faster are timed.

    python tools/first_minutes.py
    python tools/first_minutes.py --device cpu    # skips what needs a GPU

Prints one line per check: pass, FAIL or skipped, and what was found. Exit status 1: a check failed.
Then one line per way: kept (faster, and its numbers are right), dropped (not faster) or changed
(other numbers). The checks use the tiny model of the repository, and one of 40 layers with random
weights; the ways use the published widths with a quarter of the layers, which fit 24 GB.
`python -m glm_grpo.bench --full-size` measures the published sizes afterwards.
"""

import argparse
import contextlib
import copy
import functools
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from glm_grpo.bench import program
from glm_grpo.bench.program import BenchOptions, numbered, seconds_of
from glm_grpo.maths.noise import named_uniforms
from glm_grpo.model.decode_step import CudaGraphs, called_product, recorder_for
from glm_grpo.model import sampling
from glm_grpo.model.denoise import CompiledBlocks, Float8Layers
from glm_grpo.model.denoise import make_conditions, predict_velocity
from glm_grpo.model.latents import decode_latents
from glm_grpo.model.loading import pick_device
from glm_grpo.model.memory import PUBLISHED
from glm_grpo.model.sampling import Decisions, SamplingLoop, sample_tokens
from glm_grpo.model.scoring import score_tokens
from glm_grpo.model.tokens import PromptInputs, masked_attention, prepare_prompts
from glm_grpo.model.tokens import trim, visibility
from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.run.command_line import run_command
from glm_grpo.training.agreement import LOOP_KL, Agreement
from glm_grpo.training.metrics import PeakMemory, gap_numbers
from glm_grpo.training.ranks import Ranks
from glm_grpo.training.trainer import MinimalGRPOTrainer

MODEL = Path(__file__).resolve().parent.parent / "data/tiny-glm-image"
PROMPTS = [  # of different length: the first one is padded
    "a cat in the middle on a red ground",
    'two dogs on a blue ground with a sign that says "A1"',
]
GROUP, SIZE = 4, 64  # images per prompt; pixels
LENGTH = 1344  # 64 modulo 128: cuDNN's gradients were NaN there (pytorch #196678)
HOT = {"temperature": 3.0, "top_p": 0.9}
PUBLISHED_SAMPLING = {"temperature": 0.9, "top_p": 0.75}
KERNELS = {
    "default": None,  # PyTorch's choice among those that the project allows
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class Failed(Exception):
    "What a check found is wrong."


class Skipped(Exception):
    "A check cannot run here."


def judge(work: Callable[[], str]) -> tuple[str, str]:
    "(pass, FAIL or skipped; what was found). An unexpected error is a failure of the check."
    try:
        return "pass", work()
    except Skipped as reason:
        return "skipped", str(reason)
    except Failed as reason:
        return "FAIL", str(reason)
    except Exception as error:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return "FAIL", f"{type(error).__name__}: {first_line}"


def require_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Skipped("needs a CUDA device")


# ---------------------------------------------------------------- attention kernels


def padded_mask(device: torch.device, lengths: list[int]) -> Tensor | None:
    "The project's attention mask of left-padded prompts; None: no prompt is padded."
    longest = max(lengths)
    first = longest - torch.tensor(lengths, device=device)
    real = torch.arange(longest, device=device) >= first[:, None]
    ids = real.long()  # the mask; of ids and positions only the shape counts
    return visibility(PromptInputs(ids, ids, ids, ids, [(1, 1)], lengths=lengths))


def attention_inputs(device: torch.device, rows: int, length: int) -> list[Tensor]:
    "Queries, keys and values in bfloat16. All scores are far below 0, as pytorch #196678 needs."
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(rows, 4, length, 128, generator=generator) for _ in range(3)]
    tensors[0][..., 0], tensors[1][..., 0] = 1.0, -120.0 * 128**0.5
    return [x.to(device, torch.bfloat16).requires_grad_() for x in tensors]


def count_nan(kernel: SDPBackend | None, tensors: list[Tensor], mask: Tensor | None):
    """(NaN in the output, NaN in the gradients, output) of queries, keys and values; without a mask
    causal. Skipped: the kernel does not exist here."""
    for x in tensors:
        x.grad = None
    chosen = masked_attention() if kernel is None else sdpa_kernel([kernel])
    try:
        with chosen:
            out = F.scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=mask is None)
    except RuntimeError as error:
        raise Skipped(f"no such kernel for these inputs: {str(error).splitlines()[0]}") from None
    real = torch.nan_to_num(out)
    real.backward(torch.ones_like(real))
    in_gradients = sum(int(x.grad.isnan().sum()) for x in tensors)
    return int(out.isnan().sum()), in_gradients, out.detach()


def without_own_rows(mask: Tensor) -> Tensor:
    "The mask of padded rows that attend to nothing, as a 2-D attention mask would give."
    return mask & mask[:, :, -1:]  # the last row attends to every real token


def check_kernel(device: torch.device, name: str, lengths: list[int]) -> str:
    "No NaN in output and gradients with the project's mask, and the output of float32."
    if device.type != "cuda" and name not in ("default", "math"):
        raise Skipped("needs a CUDA device")
    kernel, mask = KERNELS[name], padded_mask(device, lengths)
    tensors = attention_inputs(device, len(lengths), max(lengths))
    in_output, in_gradients, out = count_nan(kernel, tensors, mask)
    wide = [x.detach().float() for x in tensors]
    with sdpa_kernel([SDPBackend.MATH]):
        expected = F.scaled_dot_product_attention(*wide, attn_mask=mask, is_causal=mask is None)
    error = (out.float() - expected).abs().max().item()
    found = f"NaN: {in_output} in the output, {in_gradients} in the gradients"
    if mask is not None:
        empty = count_nan(kernel, tensors, without_own_rows(mask))[:2]
        found += f"; with rows that attend to nothing: {empty[0]} and {empty[1]}"
    found += f"; largest error of the output {error:.2g}"
    if not (in_output or in_gradients) and error < 0.1:
        return found
    if name == "cudnn":
        return f"{found}. The language model does not use this kernel"
    raise Failed(found)


# ---------------------------------------------------------------- policies


@functools.cache
def load_model(device: torch.device, dtype: str) -> GLMImageWrapper:
    "The tiny model with adapters that change its output."
    quick = {"lora": {"rank": 8}, "gradient_checkpointing": True}
    model = GLMImageWrapper(MODEL, "both", torch_dtype=dtype, device=device, **quick)
    generator = torch.Generator().manual_seed(0)
    for weight in model.get_trainable_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data += (0.02 * noise).to(weight)
    return model


def make_trainer(model: GLMImageWrapper, **options) -> MinimalGRPOTrainer:
    "Of small images, hot."
    how = {"height": SIZE, "width": SIZE, "num_inference_steps": 2, "guidance_scale": 1.5}
    how |= {"callbacks": [], "micro_batch_size": GROUP} | HOT | options
    return MinimalGRPOTrainer(model, [{"prompts": PROMPTS}], numbered, GROUP, **how)


@functools.cache
def measure_agreement(device: torch.device) -> Agreement:
    "Of both policies before the first update, in bfloat16."
    return make_trainer(load_model(device, "bfloat16")).measure_agreement({"prompts": PROMPTS})


def check_ratio(device: torch.device, policy: str) -> str:
    "New log-probs equal the old ones before the first update."
    gap = measure_agreement(device).policies[policy]
    found = f"largest gap {gap.largest:.2g}, mean {gap.mean:.2g} nats, allowed {gap.allowed:.2g}"
    if not gap.largest <= gap.allowed or gap.too_large:  # also NaN
        raise Failed(found)
    return found


def deepen(ar: torch.nn.Module) -> torch.nn.Module:
    "40 layers of width 512 with random weights, and logits with a standard deviation of 3."
    config = copy.deepcopy(ar.config)
    text = config.text_config
    text.num_attention_heads = 512 * text.num_attention_heads // text.hidden_size
    text.num_key_value_heads = text.num_attention_heads // 4
    text.num_hidden_layers, text.hidden_size, text.intermediate_size = 40, 512, 1536
    with torch.random.fork_rng():
        torch.manual_seed(0)
        deep = type(ar)(config).to(ar.device, ar.dtype).eval()
    deep.lm_head.weight.data *= 3 / (text.initializer_range * 512**0.5)
    return deep


class SamplingWork:
    "What the token policy samples in a check."

    def __init__(self, device: torch.device, dtype: str, size: int = SIZE, deep: bool = False):
        wrapper = load_model(device, dtype)
        self.model = deepen(wrapper.ar) if deep else wrapper.ar
        self.inputs = prepare_prompts(wrapper.processor, wrapper.ar, PROMPTS, size, size)
        self.prompt_index = torch.arange(len(PROMPTS), device=device).repeat_interleave(GROUP)
        names = [f"check|{i}" for i in range(len(self.prompt_index))]
        self.uniforms = named_uniforms(names, self.inputs.num_tokens)

    def decisions(self) -> Decisions:
        "A sampling loop as on CUDA, before its first step."
        inputs = trim(self.inputs)
        loop = SamplingLoop(self.model, inputs, self.prompt_index, True, HOT["temperature"])
        decisions = Decisions(loop, self.uniforms, HOT["top_p"])
        decisions.written.zero_()
        return decisions


def check_scoring(device: torch.device, dtype: str, deep: bool = False) -> str:
    "The sampling loop and one scoring pass give a token the same log-prob, up to rounding."
    if deep:
        require_cuda(device)
    work = SamplingWork(device, dtype, deep=deep)
    parts = work.model, work.inputs, work.prompt_index
    how = PUBLISHED_SAMPLING if deep else HOT
    sampled = sample_tokens(*parts, work.uniforms, **how)
    with torch.no_grad():
        scored = score_tokens(*parts, sampled.token_ids, how["temperature"], sampled.kept)
    gap = gap_numbers(scored - sampled.logprobs, "gap")
    allowed = LOOP_KL[dtype != "float32"]
    found = f"largest gap {gap['gap']:.2g}, mean {gap['gap_mean']:.2g} nats, KL {gap['gap_kl']:.2g}"
    found += f", allowed KL {allowed:.2g}"
    if not gap["gap_kl"] <= allowed:  # also NaN
        raise Failed(found)
    return found


# ---------------------------------------------------------------- the sampling loop on a GPU


class Eager:
    "A recorder that repeats the step itself."

    def warm_up(self, step: Callable[[], object], times: int) -> None:
        for _ in range(times):
            step()

    def record(self, step: Callable[[], object]) -> Callable[[], object]:
        return step


def count_launches(work: Callable[[], object]) -> int:
    "Kernels and graphs that the host launches during a call."
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as events:
        work()
        torch.cuda.synchronize()
    return sum(event.count for event in events.key_averages() if "Launch" in event.key)


def timed_steps(work: SamplingWork, recorder: CudaGraphs, launches) -> tuple[Tensor, str]:
    "(tokens of all steps, milliseconds and launches per step)"
    decisions, warm_up = work.decisions(), 3
    recorder.warm_up(decisions.step, warm_up)
    again = recorder.record(decisions.step)
    number, rest = launches(again), work.inputs.num_tokens - warm_up - 1

    def sample():
        for _ in range(rest):
            again()

    milliseconds = 1000 * seconds_of(sample) / rest
    return decisions.sampled().token_ids, f"{milliseconds:.2f} ms and {number} launches"


def compare_recorders(work: SamplingWork, graphs: CudaGraphs, launches=count_launches) -> str:
    "The same tokens with and without recorded steps."
    eager_tokens, eager = timed_steps(work, Eager(), launches)
    graph_tokens, graph = timed_steps(work, graphs, launches)
    found = f"eager {eager}, graph {graph} per step"
    different = int((eager_tokens != graph_tokens).sum())
    if different:
        raise Failed(f"{different} of {eager_tokens.numel()} tokens differ; {found}")
    return f"same tokens; {found}"


def check_graph(device: torch.device) -> str:
    "A CUDA graph of the decode step samples what the eager step samples."
    require_cuda(device)
    with torch.no_grad():
        return compare_recorders(SamplingWork(device, "bfloat16", 256), recorder_for(device))


def count_waits(work: Callable[[], object]) -> int:
    "How often the host waits for the GPU during a call."
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in warned)


def waits_of_loop(work: SamplingWork, steps: int = 4) -> str:
    "No host wait in the sampling loop. An `item()` shows that waits are counted at all."
    decisions = work.decisions()
    decisions.step()

    def sample():
        for _ in range(steps):
            decisions.step()

    if not count_waits(decisions.written.sum().item):
        raise Failed("an item() was not counted as a wait, so the count below means nothing")
    waits = count_waits(sample)
    if waits:
        raise Failed(f"{waits} host waits in {steps} decode steps")
    return f"0 host waits in {steps} decode steps"


def check_waits(device: torch.device) -> str:
    require_cuda(device)
    with torch.no_grad():
        return waits_of_loop(SamplingWork(device, "bfloat16"))


def check_memory(device: torch.device) -> str:
    "The peak counts a tensor that is gone, and a new counter forgets it (CUDA)."
    before, peak = PeakMemory(device).gigabytes(), PeakMemory(device)
    size = torch.zeros(2**24, device=device).nbytes / 1e9  # and it is gone again
    found, after = peak.gigabytes(), PeakMemory(device).gigabytes()
    words, right = f"peak of the process {found:.2f} GB", found > 0
    if device.type == "cuda":
        words = f"{found - before:.3f} GB more for a tensor of {size:.3f} GB; reset to {after:.3f}"
        right = abs(found - before - size) < 0.1 * size and after < found
    if not right:
        raise Failed(words)
    return words


# ---------------------------------------------------------------- what goes wrong


def train_once(trainer: MinimalGRPOTrainer) -> str:
    "A training step with finite numbers."
    metrics = trainer.train_step({"prompts": PROMPTS})
    norms = [value for name, value in metrics.items() if name.endswith("grad_norm")]
    text = f"a training step, norm of the gradient {', '.join(f'{norm:.2g}' for norm in norms)}"
    if not norms or not all(0 < norm < float("inf") for norm in norms):
        raise Failed(text)
    return text


def check_failed_recording(device: torch.device) -> str:
    "A recording that CUDA refuses leaves nothing behind: training goes on without one."
    require_cuda(device)
    here, x = torch.cuda.current_stream(), torch.ones(1, device=device)
    with contextlib.suppress(RuntimeError):
        CudaGraphs(device).record(lambda: x.item())  # the host may not wait in a recording
    try:
        if not CudaGraphs.refused:
            raise Failed("a recording with a host wait was not refused")
        if torch.cuda.current_stream() != here:
            raise Failed("the process stayed on the stream of the recording")
        return train_once(make_trainer(load_model(device, "bfloat16")))
    finally:
        CudaGraphs.refused = False


def check_offload(device: torch.device) -> str:
    "Frozen weights that rest in the host's locked memory: a warning says if it cannot be locked."
    require_cuda(device)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        options = {"lora": {"rank": 8}, "offload": True}
        model = GLMImageWrapper(MODEL, "ar", torch_dtype="bfloat16", device=device, **options)
        found = train_once(make_trainer(model))
    unlocked = any("cannot be locked" in str(note.message) for note in noted)
    return f"{found}, memory {'NOT ' if unlocked else ''}locked"


def fail_alone(words: list[str]) -> None:
    "A rank of two: it samples with sharded weights, and rank 1 fails alone."
    with Ranks.start(*words) as ranks:
        model = GLMImageWrapper(MODEL, "ar", torch_dtype="bfloat16", device=ranks.device)
        ranks.shard(model)
        trainer = make_trainer(model, ranks=ranks)
        experience = trainer.collect({"prompts": PROMPTS})
        if not ranks.first:
            raise RuntimeError("planted")
        trainer.learn(experience)


def check_failing_rank(device: torch.device, limit: float = 180.0) -> str:
    "An error of one rank alone ends both, with its message."
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        raise Skipped("needs two CUDA devices")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", __file__, "--fail-alone", str(device.type)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise Failed(f"the ranks have not ended after {limit:.0f} s") from None
    if not done.returncode or "RuntimeError: planted" not in done.stderr:
        raise Failed(f"status {done.returncode}: {done.stderr.strip()[-300:]}")
    return "both ranks ended, with the message of the one that failed"


# ---------------------------------------------------------------- faster ways

QUARTER = PUBLISHED | {
    "ar": PUBLISHED["ar"]
    | {"text_config": PUBLISHED["ar"]["text_config"] | {"num_hidden_layers": 10}},
    "dit": PUBLISHED["dit"] | {"num_layers": 8},
}
FASTER = 0.98  # of the seconds: less is no chance


def load_quarter(device: torch.device) -> GLMImageWrapper:
    "The published widths with a quarter of the layers, random weights and adapters."
    with mock.patch.object(program, "PUBLISHED", QUARTER):
        return program.load(BenchOptions(full_size=True, device=str(device)), "both")


def far(old: list[Tensor], new: list[Tensor]) -> float:
    "The largest difference, in units of the largest number."
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(new, old))


@dataclass
class Way:
    "A way to compute something, and one that may be faster."

    name: str
    old: Callable[[], list[Tensor]]
    new: Callable[[], list[Tensor]]
    allowed: float | None  # see `far`; 0: bit for bit; None: other numbers are as right
    like: Callable[[], list[Tensor]] | None = None  # what the new way must give; None: the old one

    def judge(self, times: int = 5) -> tuple[str, str]:
        "(kept, dropped or changed; what was found). Both take turns."
        difference = far((self.like or self.old)(), self.new())
        self.old()
        turns = [(seconds_of(self.old), seconds_of(self.new)) for _ in range(times)]
        before, after = (statistics.median(seconds) for seconds in zip(*turns))
        found = f"{1000 * before:.1f} -> {1000 * after:.1f} ms ({before / after:.2f} x), "
        found += "same bits" if difference == 0 else f"differs by {difference:.1g}"
        if self.allowed is not None and not difference <= self.allowed:  # also NaN
            return "changed", found
        return "kept" if after < FASTER * before else "dropped", found


def token_ways(model: GLMImageWrapper, size: int, rows: int) -> Iterator[Way]:
    "Products of the decode step together or one by one; rows together or a quarter at a time."
    inputs = prepare_prompts(model.processor, model.ar, PROMPTS[:1], size, size)
    uniforms = named_uniforms([f"way|{i}" for i in range(rows)], inputs.num_tokens)

    @torch.no_grad()
    def sample(number, at_once):
        parts = []
        for part in uniforms[:number].split(at_once):
            index = torch.zeros(len(part), dtype=torch.long)
            how = inputs, index, part, *PUBLISHED_SAMPLING.values()
            sampled = sample_tokens(model.ar, *how)
            parts.append((sampled.token_ids.float(), sampled.logprobs))
        return [torch.cat(values) for values in zip(*parts)]

    def apart(*numbers):
        with mock.patch.object(sampling, "joined_product", called_product):
            return sample(*numbers)

    few = rows // 4
    one_by_one, together = (functools.partial(way, few, few) for way in (apart, sample))
    yield Way(f"decode step of {few} rows, joined products", one_by_one, together, 0)
    quarters, at_once = (functools.partial(sample, rows, number) for number in (few, rows))
    yield Way(f"{rows} rows of tokens at a time, not {few}", quarters, at_once, None)


def velocity_ways(model: GLMImageWrapper, side: int) -> Iterator[Way]:
    "A DiT step of an image with guidance: blocks as they are written, compiled, or in 8 bits."
    dit, device = model.dit, model.device
    large = torch.zeros(1, side**2, dtype=torch.long, device=device)
    glyph = torch.zeros(1, dit.config.text_embed_dim, device=device, dtype=dit.dtype)
    conditions = make_conditions(model.pipe, large, (side, side), [glyph], glyph)
    shape = 1, dit.config.in_channels, 4 * side, 4 * side
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    asked = dit, conditions, latents, torch.tensor(500.0, device=device)

    def velocity(way, gradients):
        with torch.set_grad_enabled(gradients):
            return [way(*asked).detach().float()]

    compiled = CompiledBlocks(dit)
    ways = {}
    for gradients in (False, True):
        ways["eager", gradients] = functools.partial(velocity, predict_velocity, gradients)
        ways["compiled", gradients] = functools.partial(velocity, compiled.velocity, gradients)
    pair = ways["eager", False], ways["compiled", False]
    yield Way("DiT compiled, steps that are not scored", *pair, 0.05)
    # decisions are sampled without gradients and scored with them: only equal bits count
    eight = functools.partial(Float8Layers(dit).velocity, compiled.velocity)
    pair = ways["compiled", False], functools.partial(velocity, eight, False)
    yield Way("DiT in 8 bits and compiled, not only compiled", *pair, 0.2)
    pair = ways["eager", True], ways["compiled", True]
    yield Way("DiT compiled, decisions", *pair, 0, like=ways["compiled", False])


def decoding_way(model: GLMImageWrapper, side: int) -> Way:
    "The VAE of an image, pixels in the order of channels (NCHW) or channels last (NHWC)."
    vae, channels = model.pipe.vae, model.dit.config.in_channels
    latents = torch.randn((1, channels, side, side), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def decode(order):
        placed = latents.to(model.device).contiguous(memory_format=order)
        return [decode_latents(model.pipe, placed)]

    def last():
        vae.to(memory_format=torch.channels_last)
        try:
            return decode(torch.channels_last)
        finally:
            vae.to(memory_format=torch.contiguous_format)

    first = functools.partial(decode, torch.contiguous_format)
    return Way(f"VAE in channels_last, {8 * side} px", first, last, 0.05)


def update_way(model: GLMImageWrapper, size: int) -> Way:
    "The gradients of two images, with gradient checkpointing and without."
    options = BenchOptions(image_size=size, prompts=1, group=2, num_inference_steps=4)
    options = replace(options, micro_batch=2)
    trainer = program.make_trainer("ours", model, options, compile=False)
    minibatch = next(trainer.learner.minibatches(trainer.collect({"prompts": PROMPTS[:1]}), 0))

    def gradients(again):
        model.gradient_checkpointing = model.dit.gradient_checkpointing = again
        trainer.learner.gradients(minibatch)
        weights = [weight.grad.float() for weight in model.get_trainable_parameters()]
        trainer.optimizer.zero_grad()
        return [weight for weight in weights if weight.any()]

    twice, once = (functools.partial(gradients, again) for again in (True, False))
    return Way(f"update without checkpointing, {size} px", twice, once, 0.05)


def ways_of(model: GLMImageWrapper, side: int, rows: int) -> Iterator[Way]:
    "The ways for images of side x side tokens of the large grid, and up to so many rows."
    yield from token_ways(model, 8 * side, rows)
    yield from velocity_ways(model, side)
    yield decoding_way(model, 4 * side)
    yield update_way(model, 16 * side)


def time_ways(ways: Iterator[Way], times: int = 5) -> None:
    "Print a line for each way."
    for way in ways:
        try:
            verdict, found = way.judge(times)
        except Exception as error:  # a compiler that is missing, a GPU that is too small
            verdict, found = "FAIL", f"{type(error).__name__}: {str(error).strip()[:200]}"
        print(f"{verdict:<8} {way.name:<44} {found}", flush=True)


# ---------------------------------------------------------------- the program


def checks(device: torch.device) -> dict[str, Callable[[], str]]:
    "Name -> check, in the order of the table."
    found = {}

    def add(name, check, *given):
        found[name] = functools.partial(check, device, *given)

    for what, lengths in (("padded", [LENGTH - 10, LENGTH]), ("no padding", [LENGTH] * 2)):
        for name in KERNELS:
            add(f"attention: {name}, {what}", check_kernel, name, lengths)
    for policy in ("ar", "dit"):
        add(f"ratio 1 in bfloat16: {policy}", check_ratio, policy)
    for dtype in ("float32", "bfloat16"):
        add(f"sampled against scored: {dtype}", check_scoring, dtype)
        add(f"sampled against scored: {dtype}, 40 layers", check_scoring, dtype, True)
    add("decode step: eager against CUDA graph", check_graph)
    add("decode step: host waits", check_waits)
    add("a training step after a failed recording", check_failed_recording)
    add("offload to locked memory", check_offload)
    add("two ranks, one fails", check_failing_rank)
    add("peak memory", check_memory)
    return found


def main(argv: list[str] | None = None) -> int:
    "Exit status: 1 if a check failed."
    parser = argparse.ArgumentParser(
        prog="python tools/first_minutes.py", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--device", help="cuda, mps or cpu (default: the best one available)")
    parser.add_argument("--fail-alone", metavar="DEVICE", help="what a check runs on two ranks")
    own = parser.parse_args(argv)
    if own.fail_alone:
        return fail_alone([own.fail_alone])
    device, verdicts = pick_device(own.device), []
    print(f"torch {torch.__version__}, {device}", flush=True)
    if device.type == "cuda":
        name, cudnn = torch.cuda.get_device_name(device), torch.backends.cudnn.version()
        print(f"CUDA {torch.version.cuda}, cuDNN {cudnn}, {name}", flush=True)
    for name, check in checks(device).items():
        verdict, found = judge(check)
        verdicts.append(verdict)
        print(f"{verdict:<8} {name:<44} {found}", flush=True)
    passed, failed, skipped = map(verdicts.count, ("pass", "FAIL", "skipped"))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    if device.type == "cuda":
        time_ways(ways_of(load_quarter(device), side=32, rows=128))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
