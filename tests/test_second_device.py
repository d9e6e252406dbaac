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
from ranks import free_port
from second_device.guard import build_library

FOLDER = ROOT / "tests/second_device"


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds the second device")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the second device stands in for a GPU")
def test_all_cases_pass(tmp_path):
    write_images(tmp_path / "sources", ["red", "blue", "green"])
    rows = [{"prompt": p, "source": f"sources/{i}.png"} for i, p in enumerate(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "green.py").write_text(GREEN)
    own = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", FOLDER))),
        "OMP_NUM_THREADS": "1",
        "SECOND_DEVICE": str(build_library(tmp_path)),
        "SMALL_MODEL": small_model(),
        "RANKS_FOLDER": str(tmp_path),
        "PORTS": " ".join({str(free_port()) for _ in range(9)}),
    }
    command = [sys.executable, FOLDER / "all_cases.py", tmp_path]
    status = subprocess.run(command, cwd=ROOT, env=os.environ | own, timeout=900).returncode
    logs = [(tmp_path / f"{name}.log").read_text() for name in ("cases", "rank_0", "rank_1")]
    assert status == 0 and not any("skipped" in text for text in logs), "".join(logs)
    passed = [int(re.search(r"(\d+) passed", text)[1]) for text in logs]
    assert passed[0] > 35 and passed[1:] == [5, 5]
