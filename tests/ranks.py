"""Ranks on this machine: processes that start as quickly as a fork does."""

import multiprocessing
import os
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
    os.environ.update(variables)
    os.chdir(ROOT)
    with open(log, "wb", buffering=0) as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
    sys.exit(function(*arguments))


def _join(processes, seconds, grace=30):
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


def on_ranks(world, folder, function, *arguments, seconds=300, **variables):
    """Call a function on `world` ranks, as a launcher starts them -> (status, what it printed) of
    each. They are forked from a server that has imported the package."""
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(["glm_grpo.run.train"])
    own = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    own |= {"MASTER_PORT": free_port(), **variables}
    logs = [Path(folder, f"rank_{rank}.log") for rank in range(world)]
    processes = []
    for rank, log in enumerate(logs):
        mine = {
            name: str(value) for name, value in {**own, "RANK": rank, "LOCAL_RANK": rank}.items()
        }
        processes.append(fork.Process(target=_be_a_rank, args=(log, mine, function, arguments)))
    for process in processes:
        process.start()
    _join(processes, seconds)
    return [(p.exitcode, log.read_text()) for p, log in zip(processes, logs)]


def torchrun(*words):
    "A program on two ranks, with its launcher."
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2]
    command += ["--master_port", free_port(), *words]
    command = [str(word) for word in command]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, cwd=ROOT, env=os.environ | own, **options)
