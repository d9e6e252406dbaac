"""Training on a device that is not the CPU: the cases of `second_device/cases.py`."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

FOLDER = ROOT / "tests/second_device"


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds the second device")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the second device stands in for a GPU")
def test_the_cases_of_the_second_device(tmp_path):
    "In a process of their own: in it torch.cuda is replaced."
    paths = [str(ROOT), str(ROOT / "tests"), str(FOLDER)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    own = ["-p", "device", "--noconftest", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/cases"]
    command = [sys.executable, "-m", "pytest", "-q", *own, str(FOLDER / "cases.py")]
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert found.returncode == 0, f"{found.stdout[-20000:]}\n{found.stderr[-5000:]}"
    passed = re.search(r"(\d+) passed", found.stdout)
    assert int(passed[1]) >= 40 and "skipped" not in found.stdout
