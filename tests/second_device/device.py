"""A second device for tests on machines without a GPU.

Its tensors say `cuda:0` or `cuda:1`, and their numbers lie on the CPU. As on CUDA, an operation on
tensors of two devices raises, and the host waits where it asks for a number or copies a tensor.
Streams must wait for each other's work, a recording that fails leaves its stream current, and a
lock of host memory that fails leaves its error to the next kernel. Each wait is noted with the line
of glm_grpo that caused it:

    with waits() as noted:
        ...
    assert not noted

Import this module before torch, in a process of its own: `pytest -p device` does so.
"""

import contextlib
import copy
import ctypes
import functools
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from guard import TORCH, build_library

PROJECT = Path(__file__).resolve().parents[2]


def load_library() -> ctypes.CDLL:
    "The library that SECOND_DEVICE names, or one that is built now."
    if "torch" in sys.modules:
        raise ImportError("torch is there already: import the second device before it.")
    if built := os.environ.get("SECOND_DEVICE"):
        return ctypes.CDLL(built, mode=ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(build_library(folder)), mode=ctypes.RTLD_GLOBAL)


LIBRARY = load_library()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402


class MixedDevices(RuntimeError):
    "An operation on tensors of two devices."


# ------------------------------------------------------------------------------------- waits
class Wait(NamedTuple):
    "One moment in which the host waits for the device."

    operation: str
    where: str  # file:line of the innermost frame of glm_grpo; without one, of any frame


NOTED: list[list[Wait]] = []  # the lists of the open `waits` blocks


@contextlib.contextmanager
def waits() -> Iterator[list[Wait]]:
    "The waits of this block, of all threads."
    noted = []
    NOTED.append(noted)
    try:
        yield noted
    finally:
        NOTED.remove(noted)


def note_wait(operation: str) -> None:
    graph = graph_in_progress()
    if graph:
        graph.fault = "previous error during capture"
        raise RuntimeError(f"not permitted in a CUDA graph: {operation} at {current_line()}")
    if operation == "synchronize":
        HOST_HAS_SEEN.update({stream: stream.done for stream in STREAMS})
    else:
        HOST_HAS_SEEN[current_stream()] = current_stream().done
    if NOTED:
        wait = Wait(operation, current_line())
        for noted in NOTED:
            noted.append(wait)


OWN_FILES = {"device.py", "collectives.py"}


def current_line() -> str:
    frame, innermost = sys._getframe(1), None
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PROJECT / "glm_grpo"):
            return f"{file.relative_to(PROJECT)}:{frame.f_lineno}"
        foreign = not file.is_relative_to(TORCH) and file.name not in OWN_FILES
        if innermost is None and foreign:
            innermost = f"{file.name}:{frame.f_lineno}"
        frame = frame.f_back
    return innermost or "autograd"


# ------------------------------------------------------------------------------------ tensors
class DeviceTensor(Tensor):
    "A tensor that says `cuda`; its numbers are a tensor on the CPU."

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor, device: torch.device):
        layout = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset()}
        return Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=numbers.dtype, device=device, **layout
        )

    def __init__(self, numbers: Tensor, device: torch.device):
        self.numbers = numbers

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        if not isinstance(value, DeviceTensor):
            raise MixedDevices(f"the data of a tensor on {self.device} from {value.device}")
        Tensor.data.__set__(self, value)
        self.numbers = value.numbers

    def on_host(self, operation: str) -> Tensor:
        note_wait(operation)
        return self.numbers.detach().clone()

    def tolist(self):
        return self.on_host("tolist").tolist()

    def __repr__(self, *, tensor_contents=None):
        return f"{self.on_host('print')!r} on {self.device}"

    def __reduce_ex__(self, protocol):
        return self.on_host("pickle").__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        twin = DeviceTensor(self.numbers.detach().clone(), self.device)
        if isinstance(self, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, self.requires_grad)
        twin.__dict__ |= copy.deepcopy(
            {k: v for k, v in vars(self).items() if k not in ("numbers", "_is_param")}, memo
        )
        return memo.setdefault(id(self), twin)

    def numpy(self, *args, **kwargs):
        raise TypeError(f"a tensor on {self.device} has no numpy array: use .cpu() first")

    __array__ = numpy

    def untyped_storage(self):
        return self.numbers.untyped_storage()

    def data_ptr(self):
        return self.numbers.data_ptr()


class BytesOnDevice:
    "Bytes of all tensors made on the device since, counted by storage; and their peak."

    def __init__(self):
        self.storages, self.now, self.peak = {}, 0, 0

    def add(self, tensor: DeviceTensor) -> None:
        storage = tensor.numbers.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not size:
            return
        if key not in self.storages:
            self.now += size
            self.peak = max(self.peak, self.now)
            self.storages[key] = [size, 0]
        self.storages[key][1] += 1
        weakref.finalize(tensor.numbers, self.release, key)

    def release(self, key: int) -> None:
        self.storages[key][1] -= 1
        if not self.storages[key][1]:
            self.now -= self.storages.pop(key)[0]


def bytes_on_device(monkeypatch) -> BytesOnDevice:
    "Count from now on, until the test ends."
    counted, start = BytesOnDevice(), DeviceTensor.__init__

    def start_and_count(tensor, numbers, device):
        start(tensor, numbers, device)
        counted.add(tensor)

    monkeypatch.setattr(DeviceTensor, "__init__", start_and_count)
    return counted


def numbers_of(x):
    return x.numbers if type(x) is DeviceTensor else x


def with_index(device: str | torch.device) -> torch.device:
    "cuda alone is the current device of the thread."
    device = torch.device(device)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", LIBRARY.current_device())


# --------------------------------------------------------------------------------- operations
# they ask for a number, or the size of their output is one that the host must know
LOOKS = {name: name for name in ("bincount", "equal", "masked_select", "nonzero")}
LOOKS |= dict.fromkeys(("unique_consecutive", "unique_dim", "_unique2"), "unique")
LOOKS["_local_scalar_dense"] = "item"
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# CUDA takes a single number from the host here, next to the elementwise operations
TAKE_HOST_NUMBERS = {"fill_", "masked_fill", "masked_fill_", "index_fill", "index_fill_", "where"}


class Operation(NamedTuple):
    "What is looked up once per operator of PyTorch."

    name: str
    takes_host_numbers: bool
    changes_shape: bool

    @classmethod
    @functools.cache
    def of(cls, func) -> "Operation":
        name = func._schema.name.removeprefix("aten::")
        takes = torch.Tag.pointwise in func.tags or name in TAKE_HOST_NUMBERS
        return cls(name, takes, torch.Tag.inplace_view in func.tags)


def dispatch(func, args, kwargs):
    "One operation with tensors or an output on the device."
    operation = Operation.of(func)
    name = operation.name
    tensors = []
    plain_args = [collect(x, tensors) for x in args]
    plain_kwargs = {k: collect(x, tensors) for k, x in kwargs.items()}
    if len(tensors) > 1:
        check_devices(operation, tensors, args)
    if name == "copy_":
        return copy_into(func, *args, **kwargs)
    if name == "_to_copy":
        return move(func, args[0], **kwargs)
    if name == "_fused_sdp_choice":
        return 0  # plain attention: the others are kernels of CUDA
    note_operation(name, args, kwargs)
    if not (func.is_view or name.startswith("empty") or name.startswith("new_empty")):
        raise_latched_error()
    device = next((x.device for x in tensors if type(x) is DeviceTensor), None)
    if kwargs.get("device") is not None:
        device = with_index(kwargs["device"])
        plain_kwargs["device"] = "cpu"
        check_generator(name, kwargs.get("generator"), device)
    out = calculate(func, plain_args, plain_kwargs)
    if device is None or device.type != "cuda":
        return out
    if not func.is_view:
        given = [x.numbers for x in tensors if type(x) is DeviceTensor]
        check_order(device, given, all_tensors(out))
    if operation.changes_shape:
        return take_shape(args[0])
    return on_device(out, device, tensors)


def take_shape(tensor: DeviceTensor) -> DeviceTensor:
    "Its numbers have changed their shape in place."
    Tensor.data.__set__(tensor, DeviceTensor(tensor.numbers, tensor.device))
    return tensor


def collect(x, tensors: list):
    "An argument with plain tensors; the tensors in it are added to the list."
    if isinstance(x, Tensor):
        tensors.append(x)
        return numbers_of(x)
    if type(x) in (list, tuple):
        return [collect(y, tensors) for y in x]
    return x


def on_device(out, device, given):
    "An output as tensors of the device. In-place operations give the tensor that they got."
    if isinstance(out, Tensor):
        for x in given:
            if type(x) is DeviceTensor and x.numbers is out:
                return x
        return DeviceTensor(out, device)
    if isinstance(out, (list, tuple)):
        return type(out)(on_device(x, device, given) for x in out)
    return out


def calculate(func, args, kwargs):
    "An operation on the numbers; a CUDA graph that is being recorded notes it."
    graph = graph_in_progress()
    if graph:
        graph.before(func, args, kwargs)
    out = calculate_now(func, args, kwargs)
    if graph:
        graph.after(func, args, kwargs, out)
    return out


def calculate_now(func, args, kwargs):
    if func is torch.ops.aten.convolution.default and args[0].dtype == torch.bfloat16:
        # many CPUs take many times as long as in float32, in which a GPU adds up as well
        wide = [x.float() if isinstance(x, Tensor) else x for x in args]
        return func(*wide, **kwargs).bfloat16()
    try:
        return func(*args, **kwargs)
    except NotImplementedError:  # only CUDA has it as one operation
        out = func.decompose(*args, **kwargs)
        if out is NotImplemented:
            raise
        return out


def check_devices(operation: Operation, tensors, args) -> None:
    "MixedDevices: CUDA would refuse these tensors together."
    name, devices = operation.name, {x.device for x in tensors}
    if len(devices) < 2 or name in ("copy_", "_to_copy"):
        return
    if name in INDEXING and type(args[0]) is DeviceTensor:  # indices may be on the host
        values = args[2:3] if name != "index" else ()
        tensors = [args[0], *(x for x in values if x.dim() > 0)]
    elif operation.takes_host_numbers:
        tensors = [x for x in tensors if x.device.type != "cpu" or x.dim() > 0]
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        raise MixedDevices(f"{name} of tensors on {name_all(devices)}, at {current_line()}")


def check_generator(name, generator, device) -> None:
    if generator is not None and generator.device.type != device.type:
        both = name_all((generator.device, device))
        raise MixedDevices(f"{name}: generator and output on {both}, at {current_line()}")


def name_all(devices) -> str:
    return " and ".join(sorted(map(str, devices)))


def note_operation(name, args, kwargs) -> None:
    "Note what makes the host wait."
    if name in LOOKS:
        note_wait(LOOKS[name])
    elif name == "repeat_interleave" and kwargs.get("output_size") is None:
        note_wait(name)
    elif name in INDEXING and type(args[0]) is DeviceTensor:
        for index in args[1]:
            if index is not None and not isinstance(index, DeviceTensor):
                note_wait(f"{name} with indices on the host")
            elif index is not None and index.dtype in (torch.bool, torch.uint8):
                note_wait(f"{name} with a mask")


def copy_into(func, to, source, non_blocking=False):
    if source.device.type != to.device.type and not non_blocking:
        note_wait("copy_")
    calculate(func, [numbers_of(to), numbers_of(source)], {})
    if to.device == source.device:
        check_order(to.device, [to.numbers, source.numbers], [to.numbers])
    return to


def move(func, source, device=None, non_blocking=False, pin_memory=None, **kwargs):
    "Tensor.to: another dtype, or another device."
    device = with_index(source.device if device is None else device)
    if source.device.type != device.type and not non_blocking:
        note_wait(f"to {device.type}")
    numbers = calculate(func, [numbers_of(source)], kwargs)
    if device.type == "cuda":
        check_order(device, [source.numbers] if source.device == device else [], [numbers])
    return DeviceTensor(numbers, device) if device.type == "cuda" else numbers


BETWEEN_RANKS = {"c10d", "_c10d_functional"}
OWN_TYPES = {DeviceTensor, Tensor, torch.nn.Parameter}


def communicate(func, args, kwargs):
    "An operation between processes. The module `collectives` replaces this function."
    raise NotImplementedError(f"{func}: import collectives")


class Factories(TorchDispatchMode):
    "Sees the operations that make a tensor on the device out of nothing."

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled here, and importing dynamo takes seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if set(types) - OWN_TYPES:
            return NotImplemented  # a DTensor calls the operation on its own part, and we see that
        if func.namespace in BETWEEN_RANKS:
            return communicate(func, args, kwargs)
        device = kwargs.get("device")
        if DeviceTensor in types or (device is not None and torch.device(device).type == "cuda"):
            return dispatch(func, args, kwargs)
        return func(*args, **kwargs)


# -------------------------------------------------------------------------------- CUDA graphs
class Graph:
    "torch.cuda.CUDAGraph: the operations of a recording, again and on the same memory."

    replays = 0  # of all graphs

    def __init__(self):
        self.operations, self.written, self.made = [], {}, set()
        self.fault, self.joined = None, set()  # streams that have joined the recording

    def capture_begin(self, pool=None, **options) -> None:
        self.stream, self.pool = current_stream(), pool
        if self.stream in DEFAULT_STREAMS.values():
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        RECORDING.graph = self
        POOLS_IN_USE.add(pool)

    def capture_end(self) -> None:
        RECORDING.graph = None
        self.take_back()
        if self.joined:
            self.fault = "capturing stream has unjoined work"
        if self.fault:
            raise RuntimeError(f"CUDA error: {self.fault}")
        POOLS_IN_USE.discard(self.pool)

    def before(self, func, args, kwargs) -> None:
        "A recording has no effect: keep what an operation overwrites."
        arguments = func._schema.arguments
        given = kwargs | {a.name: value for a, value in zip(arguments, args)}
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                storage = given[argument.name].untyped_storage()
                if storage.data_ptr() not in self.made:
                    self.written.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def after(self, func, args, kwargs, out) -> None:
        self.operations.append((func, args, kwargs, out))
        given = {x.untyped_storage().data_ptr() for x in all_tensors([*args, *kwargs.values()])}
        self.made |= {x.untyped_storage().data_ptr() for x in all_tensors(out)} - given

    def take_back(self) -> None:
        for storage, before in self.written.values():
            storage.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        Graph.replays += 1
        stream = current_stream()
        check_order(stream.device, [], [storage for storage, _ in self.written.values()])
        with _disable_current_modes():
            for func, args, kwargs, out in self.operations:
                new = calculate_now(func, args, kwargs)
                for old, fresh in zip(all_tensors(out), all_tensors(new)):
                    if old.data_ptr() != fresh.data_ptr():
                        old.copy_(fresh)


def all_tensors(x) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [t for y in x for t in all_tensors(y)] if isinstance(x, (list, tuple)) else []


class Event:
    "torch.cuda.Event. What comes before it has happened already."

    def __init__(self, **options):
        self.stream = None

    def record(self, stream=None) -> None:
        self.stream = stream or current_stream()


class Stream:
    """torch.cuda.Stream. Everything happens at once, but what a stream has written, another one may
    use only after a wait."""

    def __init__(self, device=None, priority=0):
        self.device = torch.device("cuda", index_of(device))
        self.done = 0  # number of operations
        self.has_seen = {}  # stream -> number of its operations
        STREAMS.append(self)

    def wait_stream(self, other: "Stream") -> None:
        for stream, done in [*other.has_seen.items(), (other, other.done)]:
            self.has_seen[stream] = max(done, self.has_seen.get(stream, 0))
        graph = graph_in_progress()
        if graph and self is graph.stream:
            graph.joined.discard(other)
        elif graph and other in {graph.stream, *graph.joined}:
            graph.joined.add(self)

    def wait_event(self, event: Event) -> None:
        if event.stream:
            self.wait_stream(event.stream)  # also for what came after the event

    def record_event(self, event=None) -> Event:
        event = event or Event()
        event.record(self)
        return event


STREAMS: list[Stream] = []  # all that were made
DEFAULT_STREAMS: dict[int, Stream] = {}  # by device
CURRENT = threading.local()  # .streams: device -> stream
HOST_HAS_SEEN: dict[Stream, int] = {}
POOLS_IN_USE: set[int] = set()  # memory pools that take all allocations


def current_stream(device=None) -> Stream:
    index = index_of(device)
    if index not in DEFAULT_STREAMS:
        DEFAULT_STREAMS[index] = Stream(index)
    return vars(CURRENT).get("streams", {}).get(index, DEFAULT_STREAMS[index])


def set_stream(stream: Stream) -> None:
    CURRENT.streams = vars(CURRENT).get("streams", {}) | {stream.device.index: stream}
    LIBRARY.set_device(stream.device.index)


class use_stream:
    "torch.cuda.stream"

    def __init__(self, stream: Stream):
        self.stream = stream

    def __enter__(self):
        self.before = current_stream()
        set_stream(self.stream)

    def __exit__(self, *error):
        set_stream(self.before)


def check_order(device: torch.device, read: list, written: list) -> None:
    "RuntimeError: another stream has written there, and this one has not waited for it."
    here, graph = current_stream(device), graph_in_progress()
    if graph and here is not graph.stream:
        raise RuntimeError(f"a stream of {device} that is not recorded, at {current_line()}")
    if graph:
        return  # nothing happens yet
    here.done += 1
    for storage in map(storage_of, [*read, *written]):
        stream, number = vars(storage).get("written", (here, 0))
        seen = max(here.has_seen.get(stream, 0), HOST_HAS_SEEN.get(stream, 0))
        if stream is not here and stream.device == here.device and seen < number:
            raise RuntimeError(f"a stream does not wait for another, at {current_line()}")
    for storage in map(storage_of, written):
        storage.written = here, here.done  # the operation that wrote there last


def storage_of(x) -> torch.UntypedStorage:
    return x if isinstance(x, torch.UntypedStorage) else x.untyped_storage()


RECORDING = threading.local()


def graph_in_progress() -> Graph | None:
    "Of this thread."
    return getattr(RECORDING, "graph", None)


# --------------------------------------------------------------------------------- torch.cuda
def index_of(device=None) -> int:
    if isinstance(device, int):
        return device
    return with_index("cuda" if device is None else device).index


class device_context:
    "torch.cuda.device"

    def __init__(self, device):
        self.index = index_of(device)

    def __enter__(self):
        self.before = LIBRARY.current_device()
        LIBRARY.set_device(self.index)

    def __exit__(self, *error):
        LIBRARY.set_device(self.before)


LOCKED: list[int] = []  # bytes of each block of the host's memory that is locked
LOCKS = SimpleNamespace(refused=False, latched=False)


def lock_memory(pointer: int, size: int, flags: int) -> int:
    if LOCKS.refused:
        LOCKS.latched = True
        return 2
    LOCKED.append(size)
    return 0


def raise_latched_error() -> None:
    "A kernel's launch finds the error that a call before it has left."
    if LOCKS.latched:
        LOCKS.latched = False
        raise RuntimeError("CUDA error: out of memory")


def end_pool(index: int, pool) -> None:
    if pool not in POOLS_IN_USE:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    POOLS_IN_USE.remove(pool)


def replace_torch_cuda() -> None:
    "torch.cuda answers for the second device. It measures no memory."
    runtime = SimpleNamespace(cudaHostRegister=lock_memory, cudaHostUnregister=lambda pointer: 0)
    properties = SimpleNamespace(name="second device", total_memory=80 * 10**9, major=9, minor=0)
    answers = {
        "_lazy_init": lambda: None,
        "CUDAGraph": Graph,
        "Event": Event,
        "Stream": Stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: DEFAULT_STREAMS[index_of(device)],
        "graph_pool_handle": object,
        "mem_get_info": lambda device=None: (8 * 10**10, 8 * 10**10),
        "memory_reserved": lambda device=None: 0,
        "set_stream": set_stream,
        "stream": use_stream,
        "cudart": lambda: runtime,
        "current_device": lambda: LIBRARY.current_device(),
        "device": device_context,
        "device_count": lambda: LIBRARY.count_devices(),
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "is_available": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "set_device": lambda device: LIBRARY.set_device(index_of(device)),
        "set_rng_state": lambda state, device=None: None,
        "synchronize": lambda device=None: note_wait("synchronize"),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch._C._host_emptyCache = lambda: None
    torch._C._cuda_endAllocateToPool = end_pool


def install() -> None:
    "From now on the second device is there, in all threads of this process."
    LIBRARY.register_devices()
    replace_torch_cuda()
    # Module.to: a parameter on the CPU becomes one on the device and stays the same object
    torch.__future__.set_swap_module_params_on_conversion(True)
    # torch.tensor(..., device="cuda"): made on the CPU, then copied, where we see it
    torch._C._set_only_lift_cpu_tensors(True)
    # tensors around tensors cannot follow inference mode
    torch.inference_mode = torch.no_grad
    Factories().__enter__()
    run = threading.Thread.run

    def run_with_factories(thread):
        with Factories():
            run(thread)

    threading.Thread.run = run_with_factories


install()
