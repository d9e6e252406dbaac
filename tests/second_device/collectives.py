"""Several processes on the second device. Each process is a rank with the device `cuda:LOCAL_RANK`.

Between ranks, gloo moves the numbers. As with NCCL, tensors on the CPU are refused, and tensors on
the device of another rank; and leaving the group waits for all ranks. A group that is made as gloo
exchanges tensors on the CPU. Import this module before a process group is made.
"""

import os
from datetime import timedelta

import device
import torch
import torch.distributed.distributed_c10d as c10d
from accelerate import state
from accelerate.utils import DistributedType
from device import MixedDevices, current_line

new_group, leave = torch.distributed.new_group, torch.distributed.destroy_process_group
EXCHANGED: list[str] = []  # the operations between ranks so far, by name
GROUPS_ON_CPU = []


def own_device() -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def communicate(func, args, kwargs):
    "An operation between ranks. MixedDevices: a tensor is not on the device of this rank."
    name, tensors = func._schema.name, []
    plain_args = [device.collect(x, tensors) for x in args]
    plain_kwargs = {k: device.collect(x, tensors) for k, x in kwargs.items()}
    if on_the_cpu(func, args, kwargs):
        return func(*args, **kwargs)  # gloo itself refuses tensors of a device
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


def on_the_cpu(func, args, kwargs) -> bool:
    "Whether the operation is one of a group that was made as gloo."
    names = [argument.name for argument in func._schema.arguments]
    group = (dict(zip(names, args)) | kwargs).get("process_group")
    return group is not None and c10d.ProcessGroup.unbox(group) in GROUPS_ON_CPU


def make_group(*args, **kwargs):
    "torch.distributed.new_group"
    group = new_group(*args, **kwargs)
    if kwargs.get("backend") == "gloo":
        GROUPS_ON_CPU.append(group)
    return group


def leave_together(group=None) -> None:
    "destroy_process_group as with NCCL: it waits until all ranks call it."
    rank, world = c10d.get_rank(), c10d.get_world_size()
    store = c10d._get_default_store()
    c10d._store_based_barrier(rank, store, "leave", world, timedelta(hours=6))
    leave(group)


def gloo_for_nccl(state, cpu=False, *args):
    "What accelerate uses: gloo, for one process per GPU."
    several = "LOCAL_RANK" in os.environ and not cpu
    return ("gloo", DistributedType.MULTI_GPU) if several else (None, DistributedType.NO)


def install() -> None:
    device.communicate = communicate
    state.PartialState._prepare_backend = gloo_for_nccl
    torch.distributed.destroy_process_group = leave_together
    torch.distributed.new_group = make_group
    # objects are sent as tensors; with NCCL these are on the device
    c10d._get_object_coll_device = lambda group=None: (
        torch.device("cpu") if group in GROUPS_ON_CPU else own_device()
    )


install()
