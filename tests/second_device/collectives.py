"""Several processes on the second device. Each process is a rank with the device `cuda:LOCAL_RANK`.

Between ranks, gloo moves the numbers. As with NCCL, tensors on the CPU are refused, and tensors on
the device of another rank. Import this module before a process group is made.
"""

import os

import device
import torch
import torch.distributed.distributed_c10d as c10d
from accelerate import state
from accelerate.utils import DistributedType
from device import MixedDevices, current_line

EXCHANGED: list[str] = []  # the operations between ranks so far, by name


def own_device() -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def communicate(func, args, kwargs):
    "An operation between ranks. MixedDevices: a tensor is not on the device of this rank."
    name, tensors = func._schema.name, []
    plain_args = [device.collect(x, tensors) for x in args]
    plain_kwargs = {k: device.collect(x, tensors) for k, x in kwargs.items()}
    foreign = {x.device for x in tensors} - {own_device()}
    if foreign and name != "c10d::barrier":  # torch itself makes the tensor of a barrier
        where = f"{device.name_all(foreign)} on the rank of {own_device()}"
        raise MixedDevices(f"{name} of a tensor on {where}, at {current_line()}")
    if name == "_c10d_functional::_wrap_tensor_autograd":  # for results that are waited for later
        return args[0]
    EXCHANGED.append(name)
    out = func(*plain_args, **plain_kwargs)
    if func.namespace == "_c10d_functional":
        out = torch.ops._c10d_functional.wait_tensor(out)
    return device.on_device(out, own_device(), tensors)


def gloo_for_nccl(state, cpu=False, *args):
    "What accelerate uses: gloo, for one process per GPU."
    several = "LOCAL_RANK" in os.environ and not cpu
    return ("gloo", DistributedType.MULTI_GPU) if several else (None, DistributedType.NO)


def install() -> None:
    device.communicate = communicate
    state.PartialState._prepare_backend = gloo_for_nccl
    # objects are sent as tensors; with NCCL these are on the device
    c10d._get_object_coll_device = lambda group=None: own_device()


install()
