"""Run all cases in processes that are forked from one with the device and the package: importing
these takes longer than most cases. `tests/test_second_device.py` starts this program:

python all_cases.py FOLDER: FOLDER/*.log get what the processes print.
"""

import device  # noqa: F401  before torch

import os
import signal
import sys
from pathlib import Path

import preloaded  # noqa: F401
import pytest


def begin(name, log, **variables):
    "The cases of a file, of which the first that fails ends them -> the process."
    process = os.fork()
    if process:
        return process
    os.environ |= variables
    with open(log, "w") as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
    words = ["-q", "-x", "--noconftest", "-p", "no:cacheprovider", "--basetemp", f"{log}.files"]
    status = pytest.main([*words, str(Path(__file__).with_name(name))])
    sys.stdout.flush()
    os._exit(status)


def end(processes):
    "Wait for all; the first that fails ends the others -> exit status."
    found = 0
    while processes:
        process, status = os.wait()
        processes.remove(process)
        for other in processes if status else ():
            os.kill(other, signal.SIGKILL)
        found |= status != 0
    return found


if __name__ == "__main__":
    folder = sys.argv[1]
    failed = end([begin("cases.py", f"{folder}/cases.log")])
    world, ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, []
    for rank in "01":
        own = world | {"RANK": rank, "LOCAL_RANK": rank}
        ranks.append(begin("rank_cases.py", f"{folder}/rank_{rank}.log", **own))
    sys.exit(failed | end(ranks))
