"""The sampling step can be recorded: the same operations on the same memory each time.

The recorder here notes every operation of one step with its tensors, takes back what the step
changed, and replays the operations without Python's part, as a CUDA graph does.
"""

import copy
import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from glm_grpo.maths.noise import named_uniforms
from glm_grpo.model import sampling
from glm_grpo.model.adapters import LoraOptions, add_lora
from glm_grpo.model.decode_step import CudaGraphs, StepCounter, repeat
from glm_grpo.model.loading import load_pipeline
from glm_grpo.model.sampling import SamplingLoop, sample_tokens
from glm_grpo.model.tokens import prepare_prompts

FOLDER = Path(__file__).parents[1] / "data/tiny-glm-image"
PROMPTS = ["three cats on a blue ground", "a cat in the top left on a red ground"]
INDEX = [0, 0, 1]
SETTINGS = {"hot": (1.5, 1.0), "wide": (2.0, 0.9), "default": (0.9, 0.75)}  # temperature, top_p
SYNCS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recording(TorchDispatchMode):
    "Notes the operations of a step, and can take back what they changed."

    def __init__(self):
        super().__init__()
        self.operations, self.before, self.made = [], {}, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.overloadpacket.__name__ in SYNCS:
            raise RuntimeError(f"{function}: the step waits for the device")
        for argument, value in zip(function._schema.arguments, args):
            if argument.alias_info and argument.alias_info.is_write:
                self.save(value)
        out = function(*args, **kwargs)
        if not function.is_view:
            self.made |= {t.untyped_storage().data_ptr() for t in tensors_in(out)}
        self.operations.append((function, args, kwargs, out))
        return out

    def save(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.made | self.before.keys():
            self.before[storage.data_ptr()] = storage, storage.clone()

    def undo(self):
        for storage, saved in self.before.values():
            storage.copy_(saved)

    def replay(self):
        "Every operation again, into the memory that it wrote when it was recorded."
        for function, args, kwargs, out in self.operations:
            if function.is_view:
                continue  # the same memory still
            again = function(*args, **kwargs)
            for old, new in zip(tree_flatten(out)[0], tree_flatten(again)[0]):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


class Graphs:
    "A recorder on the CPU."

    def __init__(self):
        self.replays = 0

    def warm_up(self, step, times):
        for _ in range(times):
            step()

    def record(self, step):
        self.recording = recording = Recording()
        try:
            with recording:
                step()
        finally:
            recording.undo()

        def replay():
            self.replays += 1
            recording.replay()

        return replay


@pytest.fixture(scope="module")
def pipe():
    return load_pipeline(FOLDER)


@pytest.fixture(scope="module")
def inputs(pipe):
    "24 tokens to sample for two prompts of different length."
    ar = pipe.vision_language_encoder
    whole = prepare_prompts(pipe.processor, ar, PROMPTS, 128, 128)
    positions = whole.decode_position_ids[..., :24]
    return dataclasses.replace(whole, grids=[(3, 8)], decode_position_ids=positions)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "plain"])
def model(request, pipe):
    "With random adapters in two dtypes, and without."
    ar = copy.deepcopy(pipe.vision_language_encoder)
    if request.param == "plain":
        return ar
    model = add_lora(ar.to(getattr(torch, request.param)), LoraOptions(rank=4))
    generator = torch.Generator().manual_seed(0)
    for name, weight in sorted(model.named_parameters()):
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.02
    return model


def sample(model, inputs, setting, **options):
    numbers = named_uniforms([f"sample {i}" for i in INDEX], inputs.num_tokens)
    return sample_tokens(model, inputs, INDEX, numbers, *SETTINGS[setting], **options)


@pytest.mark.parametrize("setting", SETTINGS)
def test_replays_sample_the_same_bit_for_bit(model, inputs, setting):
    graphs = Graphs()
    eager = sample(model, inputs, setting, fixed_shapes=True)
    replayed = sample(model, inputs, setting, fixed_shapes=True, recorder=graphs)
    assert graphs.replays == inputs.num_tokens - 1 - 3  # the last token needs no step after it
    assert torch.equal(eager[0], replayed[0])
    assert (eager[1] is None) == (replayed[1] is None)
    assert eager[1] is None or torch.equal(eager[1], replayed[1])
    assert torch.equal(eager.logprobs, replayed.logprobs)
    assert eager[0].unique().numel() > 3


@pytest.mark.parametrize("fault", ("hidden", "counter", "wait"))
def test_what_a_recording_would_freeze_is_seen(pipe, inputs, fault, monkeypatch):
    "A new tensor for the hidden state, a counter in Python, a step that waits."
    ar = pipe.vision_language_encoder
    advance, plain = SamplingLoop.advance, StepCounter.advance

    def new_hidden(self, ids):
        self.hidden = self.hidden.clone()
        advance(self, ids)

    def python_counter(self):
        self.places = {start: place + 1 for start, place in self.places.items()}
        self.step = self.places[0]

    def waits(self):
        self.step.item()
        plain(self)

    changed = {
        "hidden": (SamplingLoop, new_hidden),
        "counter": (StepCounter, python_counter),
        "wait": (StepCounter, waits),
    }
    eager = sample(ar, inputs, "hot", fixed_shapes=True)[0]
    owner, method = changed[fault]
    monkeypatch.setattr(owner, "advance", method)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        graphs = Graphs()
        found = sample(ar, inputs, "hot", fixed_shapes=True, recorder=graphs)[0]
    if fault == "wait":  # cannot be recorded: told once, and sampled all the same
        assert [str(w.message) for w in told if "CUDA graph" in str(w.message)] == [
            "sampling runs without a CUDA graph, perhaps 1.3 to 2 times slower: "
            "aten._local_scalar_dense.default: the step waits for the device"
        ]
        assert graphs.replays == 0 and torch.equal(found, eager)
    else:
        assert graphs.replays and not torch.equal(found, eager)


def test_other_errors_are_not_hidden():
    class Broken(Graphs):
        def record(self, step):
            raise KeyError("a mistake in the step")

    with pytest.raises(KeyError):
        repeat(lambda: None, 100, Broken())


def test_cuda_gets_graphs_and_a_cpu_none(pipe, inputs, monkeypatch):
    asked = []
    monkeypatch.setattr(sampling, "repeat", lambda step, times, recorder: asked.append(recorder))
    ar = pipe.vision_language_encoder
    sample(ar, inputs, "hot")
    sample(ar, inputs, "hot", fixed_shapes=True)
    assert asked == [None, None]
    monkeypatch.setattr(sampling, "recorder_for", lambda device: CudaGraphs(torch.device("cuda")))
    sample(ar, inputs, "hot", fixed_shapes=True)
    assert isinstance(asked[2], CudaGraphs)


def test_a_step_has_few_operations(model, inputs):
    "Per layer 26 with adapters and 18 without, and four norms: one operation each on CUDA."
    graphs = Graphs()
    sample(model, inputs, "wide", fixed_shapes=True, recorder=graphs)
    done = [f for f, *_ in graphs.recording.operations if not f.is_view]
    names = [f.overloadpacket.__name__ for f in done]
    ar = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = len(ar.model.language_model.layers)
    norms = 4 * layers + 1
    most = 8 * norms + layers * (26 if ar is not model else 18) + 45
    assert len(names) <= most, sorted(names)
