"""Training on devices that are not the CPU: the cases in `second_device/`, in processes of their
own, for in these torch.cuda is replaced."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import GREEN, PROMPTS, ROOT, small_model, write_images
from ranks import free_port, on_ranks
from second_device.guard import build_library


FOLDER = ROOT / "tests/second_device"

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds the second device"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the second device stands in for a GPU"),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    "Environment variables of the processes."
    folder = tmp_path_factory.mktemp("second_device")
    paths = [str(ROOT), str(ROOT / "tests"), str(FOLDER)]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "SECOND_DEVICE": str(build_library(folder)),
        "SMALL_MODEL": small_model(),
    }


def cases_of(file):
    "The command that runs the cases of a file. The first that fails ends it."
    own = ["-p", "device", "--noconftest", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "-q", "-x", *own, str(FOLDER / file)]


def check(status, text, least):
    "All cases have passed, and there are at least so many."
    assert status == 0, text[-20000:]
    assert int(re.search(r"(\d+) passed", text)[1]) >= least and "skipped" not in text


def test_the_cases_of_the_second_device(prepared, tmp_path):
    command = [*cases_of("cases.py"), f"--basetemp={tmp_path}/cases"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    found = subprocess.run(command, cwd=ROOT, env=os.environ | prepared, timeout=900, **options)
    check(found.returncode, found.stdout, 40)


def test_the_cases_of_two_ranks(prepared, tmp_path):
    write_images(tmp_path / "sources", ["red", "blue", "green"])
    rows = [{"prompt": p, "source": f"sources/{i}.png"} for i, p in enumerate(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "green.py").write_text(GREEN)
    ports = " ".join(str(free_port()) for _ in range(9))
    own = prepared | {"RANKS_FOLDER": tmp_path, "PORTS": ports}
    command = cases_of("rank_cases.py")
    for status, text in on_ranks(2, tmp_path, os.execv, command[0], command, seconds=600, **own):
        check(status, text, 6)
