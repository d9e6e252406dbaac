"A remote reward as a process of its own, which a notebook cannot show."

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm_grpo.remote import RemoteReward

ROOT = Path(__file__).resolve().parent.parent
REWARD = """
def redness(images, prompts):
    if "fail" in prompts:
        raise RuntimeError("no such prompt, please")
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
"""


def start_server(folder):
    "`python -m glm_grpo.remote`, with a reward of that folder, on any free port."
    (folder / "my_reward.py").write_text(REWARD)
    env = {name: value for name, value in os.environ.items() if name != "GLM_GRPO_TOKEN"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "glm_grpo.remote", "my_reward.py:redness", "--port", "0"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def test_command_line(tmp_path):
    "It starts, answers, survives an exception of the reward, and ends quietly at Ctrl+C."
    with start_server(tmp_path) as server:
        try:
            first = server.stdout.readline()
            assert first.startswith("redness is served at http://127.0.0.1:"), (
                first + server.stderr.read()
            )
            assert "wants images, prompts" in first
            remote = RemoteReward(first.split()[4], timeout=20, retries=0)
            assert remote.name == "redness" and remote.wants == ["images", "prompts"]
            generator = torch.Generator().manual_seed(0)
            images = torch.rand(5, 3, 16, 16, generator=generator).mul(255).round() / 255
            with pytest.raises(OSError, match="no such prompt"):
                remote(images, ["fail"] * 5)
            local = images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
            assert torch.allclose(remote(images, ["a cat"] * 5), local, atol=1e-6)
            server.send_signal(signal.SIGINT)
            out, err = server.communicate(timeout=20)
        finally:
            server.kill()
    assert server.returncode == 0 and err == "", (server.returncode, out, err)
    assert out.endswith("ended.\n") and "5 images" in out and "Traceback" in out, out
