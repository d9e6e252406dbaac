"""Training on a device that is not the CPU. `all_cases.py` runs these in a process of their own; by
hand, from the root of the repository:

    PYTHONPATH=tests:tests/second_device python -m pytest -p device --noconftest \\
        tests/second_device/cases.py
"""

import dataclasses
import warnings
from collections import Counter
from pathlib import Path

import device
import helpers
import pytest
import torch
from PIL import Image
from test_rewards_judges import clip  # noqa: F401  fixture

from glm_grpo import GLMImageWrapper
from glm_grpo.maths.noise import named_uniforms
from glm_grpo.model import denoise as denoising
from glm_grpo.model import sampler, sampling
from glm_grpo.model.decode_step import WARM_UP, CudaGraphs, StepCounter
from glm_grpo.model.tokens import prepare_prompts
from glm_grpo.rewards.calling import call_reward
from glm_grpo.rewards.judges import ClipScore
from glm_grpo.rewards.weighted import WeightedReward
from glm_grpo.training.trainer import MinimalGRPOTrainer

PROMPTS = ["a cat in the middle on a red ground", 'a sign that says "A1"']
# Waits of an optimizer step on four samples in two micro-batches, the last one after it, for the
# share of weights below epsilon. Lower this when they fall.
WAITS_OF_AN_UPDATE = 31


@pytest.fixture(autouse=True)
def graphs_are_allowed(monkeypatch):
    monkeypatch.setattr(CudaGraphs, "refused", False)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return Path(helpers.small_model())


def reward(images):
    return images.mean((1, 2, 3)) + 0.01 * torch.arange(len(images))


def load_model(folder, component, lora=True, **options):
    return GLMImageWrapper(folder, component, lora={"rank": 2} if lora else None, **options)


def make_trainer(model, mode="t2i", **options):
    own = {"batch_size": 4, "window": 2, "micro_batch_size": 2, "temperature": 1.5, "top_p": 1.0}
    own |= {"height": 64, "width": 64, "num_inference_steps": 3, "learning_rate": 1e-3}
    return MinimalGRPOTrainer(model, [], reward, 2, mode=mode, **own | options)


def make_batch(mode="t2i"):
    batch = {"prompts": PROMPTS}
    if mode == "i2i":
        images = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
        batch["source_images"] = [[image] for image in images]
    return batch


def told(waits) -> str:
    "Waits by line, for the message of a test that fails."
    lines = [f"{n} x {w.operation} at {w.where}" for w, n in Counter(waits).most_common()]
    return "\n".join([f"{len(waits)} waits", *lines])


# ---------------------------------------------------------------------------- the device itself
def test_tensors_of_two_devices_do_not_meet():
    there = torch.ones(3, device="cuda")
    for mixed in (
        lambda: there + torch.ones(3),
        lambda: torch.cat([torch.ones(3), there]),
        lambda: there + there.to("cuda:1"),
        lambda: torch.ones(3)[there.long()],
        lambda: torch.nn.functional.linear(there, torch.ones(2, 3)),
        lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
    ):
        with pytest.raises(device.MixedDevices):
            mixed()
    assert (there + torch.tensor(1.0)).device == torch.device("cuda:0")  # as on CUDA


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: str(x),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
        lambda x: torch.unique(x),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_each_look_at_the_device_is_one_wait(look):
    x = torch.arange(4.0, device="cuda")
    with device.waits() as waits:
        look(x)
    assert len(waits) == 1, told(waits)
    assert waits[0].where.startswith("cases.py:")


def test_work_without_a_look_does_not_wait():
    with device.waits() as waits:
        x = torch.rand(4, 4, device="cuda", requires_grad=True)
        (x @ x).softmax(-1).masked_fill(torch.eye(4, device="cuda").bool(), 0).sum().backward()
        x.detach().add_(x.grad)
        x.detach()[:, torch.arange(2, device="cuda")] = 1
    assert not waits, told(waits)


def test_the_current_device_belongs_to_the_thread():
    import threading

    found = []

    def look():
        found.append(torch.ones(1, device="cuda").device.index)

    with torch.cuda.device(1):
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [1, 0]


def test_a_stream_must_wait_for_what_another_one_writes():
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.ones(3, device="cuda")
    with torch.cuda.stream(aside), pytest.raises(RuntimeError, match="does not wait"):
        x + 1
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        y = x + 1
    with pytest.raises(RuntimeError, match="does not wait"):
        y + 1
    here.wait_stream(aside)
    assert (y + 1).tolist() == [3, 3, 3]


# ------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("mode, lora", [("t2i", True), ("i2i", False)])
def test_a_training_step(model_folder, mode, lora):
    """It works, its ratio is 1, it moves weights, and its update waits no more often than it did.
    Edits with adapters: the programs."""
    model = load_model(model_folder, "both", lora)
    assert model.dtype == torch.bfloat16 and model.device.type == "cuda"
    trainer = make_trainer(model, mode)
    experience = trainer.collect(make_batch(mode))
    before = [p.detach().clone() for p in trainer.optimizer.stepped]
    with device.waits() as waits:
        metrics = trainer.learn(experience)
    for half in ("ar", "dit"):
        assert metrics[f"{half}/ratio_mean"] == 1 and metrics[f"{half}/old_new_gap"] == 0
    moved = [not torch.equal(p, old) for p, old in zip(trainer.optimizer.stepped, before)]
    assert any(moved)
    assert all(p.device == torch.device("cuda:0") for p in trainer.optimizer.trained)
    if mode == "t2i":
        assert len(waits) <= WAITS_OF_AN_UPDATE, told(waits)


def test_the_same_images_as_on_the_cpu(model_folder):
    "The second device does not change what is calculated."
    images = []
    for where in ("cpu", "cuda"):
        model = load_model(model_folder, "dit", device=where, torch_dtype="float32")
        rollout = make_trainer(model, "i2i").collect(make_batch("i2i")).rollout
        images.append(rollout.image_tensors)
    assert (images[0] - images[1]).abs().max() < 0.02


def test_a_step_after_loading_is_the_step_without(model_folder, tmp_path):
    "Offload, moving average, checkpoint of all weights. Adapters: `rank_cases`."
    options = {"ema_decay": 0.9}
    straight = make_trainer(load_model(model_folder, "ar", False, offload=True), "i2i", **options)
    batch = make_batch("i2i")
    straight.train_step(batch)
    straight.save_checkpoint(tmp_path / "one")
    straight.train_step(batch)
    resumed = make_trainer(load_model(model_folder, "ar", False, offload=True), "i2i", **options)
    resumed.load_checkpoint(tmp_path / "one")
    resumed.train_step(batch)
    for a, b in zip(straight.optimizer.stepped, resumed.optimizer.stepped):
        assert a.device == b.device == torch.device("cuda:0") and torch.equal(a, b)


def test_offload_locks_one_block_per_half(model_folder):
    "Of the size of its frozen weights; rounded up, blocks would take a quarter more."
    device.LOCKED.clear()
    model = load_model(model_folder, "ar", offload=True)
    sizes = [copy.nbytes for pairs in model.offload.frozen.values() for _, copy in pairs]
    assert len(device.LOCKED) == 2
    assert 0 <= sum(device.LOCKED) - sum(sizes) < 64 * len(sizes)
    for half, other in (("ar", model.dit), ("dit", model.ar), ("ar", model.dit)):
        with device.waits() as waits:
            model.wake(half)
        assert not waits, told(waits)  # fetched while the program goes on
        frozen_numbers = [p.numel() for p in other.parameters() if not p.requires_grad]
        assert sum(frozen_numbers) == 0


def test_offload_goes_on_where_memory_cannot_be_locked(model_folder, monkeypatch):
    "Each refusal leaves an error behind, which would end the next operation on the device."
    monkeypatch.setattr(device.LOCKS, "refused", True)
    with pytest.warns(UserWarning, match="cannot be locked") as told:
        model = load_model(model_folder, "ar", offload=True)
    assert len(told) == 2 and not device.LOCKS.latched
    assert make_trainer(model, "i2i").train_step(make_batch("i2i"))["ratio_mean"] == 1


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_offload_never_has_both_halves_on_the_device(model_folder, monkeypatch, lora):
    "Neither while the model is loaded nor afterwards. Full weights train and stay: the AR's."
    on_device = device.bytes_on_device(monkeypatch)
    model = load_model(model_folder, "ar", lora, offload=True)
    frozen = {h: sum(copy.nbytes for _, copy in w) for h, w in model.offload.frozen.items()}
    rest = [*model.pipe.vae.parameters(), *model.pipe.text_encoder.parameters()]
    stays = sum(p.nbytes for p in rest + model.get_trainable_parameters())
    buffers = sum(b.nbytes for half in (model.ar, model.dit) for b in half.buffers())
    assert stays <= on_device.peak <= stays + 2 * buffers + 2**16
    for half in ("ar", "dit", "ar"):
        model.wake(half)
    assert on_device.peak <= stays + max(frozen.values()) + 2 * buffers + 2**16
    assert all(p.device.type == "cuda" for part in (model.ar, model.dit) for p in part.parameters())


def test_the_programs(model_folder, tmp_path, monkeypatch, capsys):
    "Evaluate, train, save, evaluate; go on from there."
    monkeypatch.chdir(helpers.ROOT)
    run = tmp_path / "run"
    words = helpers.small(
        helpers.make_folder(tmp_path), "--model.name", model_folder, "--model.component", "both"
    )
    words += ["--rollout.num_inference_steps", "2", "--training.eval_samples", "1"]
    words += ["--training.eval_prompts", "1"]
    words += ["--output_dir", run]
    assert helpers.main(*words, "--num_steps", 1) == 0
    resume = run / "checkpoints/checkpoint_final"
    assert helpers.read_json(run / "eval.json").keys() == {"before", "after"}
    words += ["--training.eval_samples", "0"]
    assert helpers.main(*words, "--num_steps", 2, "--resume", resume) == 0
    assert helpers.steps(run) == [1, 2]


# ---------------------------------------------------------------------------------------- waits
def waits_of_a_rollout(model, **options):
    options = {"height": 64, "width": 128} | options
    with device.waits() as waits:
        rollout = make_trainer(model, "i2i", **options).collect(make_batch("i2i")).rollout
    return waits, rollout.token_ids.shape[1]


@pytest.fixture(scope="module")
def dit_model(model_folder):
    return load_model(model_folder, "dit")


@pytest.fixture(scope="module")
def short(dit_model):
    "Waits and tokens of a short rollout."
    return waits_of_a_rollout(dit_model)


def check_loop(few, many):
    "What happens more often in the longer rollout must not wait."
    more = list((Counter(many) - Counter(few)).elements())
    assert not more, f"in the loop: {told(more)}"


def check_more_tokens(model, short):
    waits, tokens = waits_of_a_rollout(model, width=256)
    assert tokens == 2 * short[1] == 16
    check_loop(short[0], waits)


def check_more_steps(model, short):
    check_loop(short[0], waits_of_a_rollout(model, num_inference_steps=5)[0])


def test_sampling_tokens_does_not_wait(dit_model, short):
    "And nearly all steps are replays of a CUDA graph."
    before = device.Graph.replays
    check_more_tokens(dit_model, short)
    assert device.Graph.replays - before == 16 - 1 - WARM_UP


def test_denoising_does_not_wait(dit_model, short):
    check_more_steps(dit_model, short)


class Eager:
    "A recorder that repeats the step itself."

    def warm_up(self, step, times):
        for _ in range(times):
            step()

    def record(self, step):
        return step


def tokens_of(model, temperature=1.5, top_p=1.0, recorder=None):
    "The first 24 tokens of three samples of two prompts of different length."
    inputs = prepare_prompts(model.processor, model.ar, PROMPTS, 64, 64)
    inputs.grids, inputs.decode_position_ids = [(4, 6)], inputs.decode_position_ids[..., :24]
    numbers = named_uniforms(["a", "b", "c"], inputs.num_tokens)
    how = {"temperature": temperature, "top_p": top_p, "recorder": recorder}
    return sampling.sample_tokens(model.ar, inputs, [0, 1, 1], numbers, **how)


@pytest.mark.parametrize(
    "dtype, lora, temperature, top_p",
    [("float32", True, 2.0, 0.9), ("bfloat16", True, 1.5, 1.0), ("bfloat16", False, 0.9, 0.75)],
)
def test_replays_sample_the_same_bit_for_bit(model_folder, dtype, lora, temperature, top_p):
    "Also where an adapter changes what is sampled."
    adapted = load_model(model_folder, "ar", lora, torch_dtype=dtype)
    with torch.no_grad():
        for weight in adapted.get_trainable_parameters() if lora else ():
            weight.add_(0.02)
    before = device.Graph.replays
    graph = tokens_of(adapted, temperature, top_p)
    assert device.Graph.replays - before == graph.token_ids.shape[1] - 1 - WARM_UP
    for replayed, eager in zip(graph, tokens_of(adapted, temperature, top_p, Eager())):
        assert (replayed is None and eager is None) or torch.equal(replayed, eager)
    assert graph.token_ids.unique().numel() > 3


@pytest.mark.parametrize("owner", [sampling.SamplingLoop, StepCounter])
def test_what_a_recording_would_freeze_is_seen(dit_model, owner, monkeypatch):
    "A new tensor for the logits, and a counter in Python."
    eager, advance = tokens_of(dit_model, recorder=Eager()), owner.advance

    def new_logits(loop, *args):
        loop.logits = loop.logits.clone()
        advance(loop, *args)

    def python_counter(counter):
        counter.step = counter.step + 1

    faults = {sampling.SamplingLoop: new_logits, StepCounter: python_counter}
    monkeypatch.setattr(owner, "advance", faults[owner])
    assert not torch.equal(tokens_of(dit_model).token_ids, eager.token_ids)


def test_a_planted_wait_of_the_sampling_loop_is_found(dit_model, short, monkeypatch):
    decide = sampling.Decisions.decide

    def look(decisions, u):
        ids = decide(decisions, u)
        assert ids.max().item() >= 0
        return ids

    monkeypatch.setattr(sampling.Decisions, "decide", look)
    with pytest.raises(AssertionError, match=r"item at glm_grpo/model/sampling.py"):
        check_more_tokens(dit_model, short)


def test_a_planted_wait_of_the_denoising_loop_is_found(dit_model, short, monkeypatch):
    step = denoising.sde_step

    def look(velocity, *args, **options):
        assert velocity.isfinite().all()
        return step(velocity, *args, **options)

    monkeypatch.setattr(denoising, "sde_step", look)
    with pytest.raises(AssertionError, match=r"item at glm_grpo/model/denoise.py"):
        check_more_steps(dit_model, short)


def sample_twice(model) -> list[str]:
    "The warnings of sampling twice."
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            tokens_of(model)
    return [str(w.message) for w in told if "CUDA graph" in str(w.message)]


def test_a_recording_that_fails_leaves_nothing_behind(dit_model, monkeypatch):
    "The step asks for a number. PyTorch's own `graph` does not go back to the stream from before."
    advance, here = sampling.SamplingLoop.advance, torch.cuda.current_stream()

    def look(loop, ids, rotation):
        ids.max().item()
        advance(loop, ids, rotation)

    monkeypatch.setattr(sampling.SamplingLoop, "advance", look)
    told = sample_twice(dit_model)
    assert len(told) == 1 and "previous error during capture" in told[0]  # one attempt
    assert torch.cuda.current_stream() is here and not device.POOLS_IN_USE


def test_sampling_uses_one_stream_of_its_own_per_device(model_folder, dit_model):
    tokens_of(dit_model)
    before = len(device.STREAMS)
    assert not sample_twice(dit_model) and len(device.STREAMS) == before
    with torch.cuda.device(1):
        assert not sample_twice(load_model(model_folder, "dit"))
    assert len(device.STREAMS) <= before + 2  # on each device the default one and another


def test_the_hooks_of_a_layer_are_not_recorded(dit_model):
    "As those of FSDP, they start work on a stream that the recording would have to wait for."
    aside = torch.cuda.Stream()

    def start_work(module, args):
        aside.wait_stream(torch.cuda.current_stream())

    hook = dit_model.ar.lm_head.register_forward_pre_hook(start_work)
    assert not sample_twice(dit_model)
    hook.remove()


def test_a_planted_mix_up_is_found(dit_model, monkeypatch):
    prepare = sampler.prepare_prompts

    def forget_mask(*args):
        inputs = prepare(*args)
        return dataclasses.replace(inputs, attention_mask=inputs.attention_mask.cpu())

    monkeypatch.setattr(sampler, "prepare_prompts", forget_mask)
    where = r"cpu and cuda:0, at glm_grpo/model/\w+.py:\d+"
    with pytest.raises(device.MixedDevices, match=where):
        make_trainer(dit_model).collect(make_batch())


# --------------------------------------------------------------------------------------- judges
@pytest.mark.parametrize("index", [0, 1])
def test_a_judge_of_each_rank_works_in_the_thread_of_its_reward(clip, index):  # noqa: F811
    "A new thread's current device is 0, whatever the rank's is."
    images, prompts = torch.rand(2, 3, 40, 48), ["a cat", "a cat a cat"]
    with torch.cuda.device(index):
        judge = ClipScore(clip)
        here = judge(images, prompts)
        reward = WeightedReward({"clip": judge}, {"clip": 1.0}, 60)
        there = call_reward(reward, images, prompts)
    assert judge.device == torch.device("cuda", index)
    assert torch.equal(here, there)


@pytest.mark.parametrize("index", [0, 1])
def test_a_reward_calculates_on_the_device_of_its_rank(index):
    "Where it says `cuda`, without a number; also where the worker's thread was used before."
    found = []

    def mean(images):
        there = images.to("cuda") * torch.ones(1, device="cuda")
        found.append(there.device.index)
        return there.mean((1, 2, 3))

    reward = WeightedReward({"mean": mean}, {"mean": 1.0}, 60)
    for rank_device in (index, 1 - index):
        with torch.cuda.device(rank_device):
            call_reward(reward, torch.rand(2, 3, 8, 8), ["a cat", "a dog"])
    assert found == [index, 1 - index]
