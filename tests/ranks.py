"""Ranks on this machine: processes that start as quickly as a fork does."""

import contextlib
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

from helpers import ROOT


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _be_a_rank(log, variables, function, arguments):
    for name, value in variables.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: str(value)})
    os.chdir(ROOT)
    with open(log, "wb", buffering=0) as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
    sys.exit(function(*arguments))


def _join(processes, seconds, grace):
    """Wait for all. After the first that fails, the others have `grace` seconds left: a rank may
    wait for it for hours."""
    end = time.monotonic() + seconds
    running = {p.sentinel: p for p in processes}
    while running and time.monotonic() < end:
        for sentinel in wait(list(running), timeout=end - time.monotonic()):
            ended = running.pop(sentinel)
            ended.join()
            if ended.exitcode:
                end = min(end, time.monotonic() + grace)
    for process in running.values():
        process.kill()
        process.join()


def start(log, variables, function, arguments):
    """Call a function in a process that is forked from a server, which has imported the package.
    The environment variables that are None are unset; what is printed goes to `log`."""
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(["preloaded"])
    process = fork.Process(target=_be_a_rank, args=(log, variables, function, arguments))
    with contextlib.chdir(ROOT / "tests"):  # the server finds `preloaded` there
        process.start()
    return process


def on_ranks(world, folder, function, *arguments, seconds=300, grace=30, **variables):
    """Call a function on `world` ranks, as a launcher starts them -> (status, what it printed) of
    each."""
    own = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    own |= {"MASTER_PORT": free_port(), **variables}
    logs = [Path(folder, f"rank_{rank}.log") for rank in range(world)]
    processes = []
    for rank, log in enumerate(logs):
        mine = {"RANK": rank, "LOCAL_RANK": rank, **own}
        processes.append(start(log, mine, function, arguments))
    _join(processes, seconds, grace)
    return [(p.exitcode, log.read_text()) for p, log in zip(processes, logs)]


def as_program(module, *words):
    "`python -m MODULE WORDS`, in a session of its own; Ctrl+C goes to all processes of a session."
    os.setsid()
    sys.argv = [module, *map(str, words)]
    runpy.run_module(module, run_name="__main__")


def in_a_process(folder, function, *arguments, seconds=300, **variables):
    "The same -> (exit status, what it printed)."
    log = Path(folder, "process.log")
    process = start(log, variables, function, arguments)
    _join([process], seconds, 0)
    return process.exitcode, log.read_text()


def torchrun(*words):
    "A program on two ranks, with its launcher."
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2]
    command += ["--master_port", free_port(), *words]
    command = [str(word) for word in command]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, cwd=ROOT, env=os.environ | own, **options)
