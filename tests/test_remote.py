"A remote reward as a process of its own, which a notebook cannot show."

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, main, small, steps, told
from ranks import free_port
from test_rewards_remote import BrokenServer, Restarts

from glm_grpo.remote import RemoteReward

REWARD = """
def redness(images, prompts):
    if "fail" in prompts:
        raise RuntimeError("no such prompt, please")
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
"""


def start_server(folder, reward=REWARD, port=0):
    "`python -m glm_grpo.remote`, with a reward of that folder; 0: on any free port."
    (folder / "my_reward.py").write_text(reward)
    env = {name: value for name, value in os.environ.items() if name != "GLM_GRPO_TOKEN"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "glm_grpo.remote", "my_reward.py:redness"]
    command += ["--port", str(port)]
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


def train_with(folder, server, *words):
    "Three steps; the first requests of the server try it, and the fourth is the second step's."
    options = ["--num_steps", 3, "--training.trackers", "null", "--output_dir", folder / "run"]
    options += ["--reward.remote.far", server.url, "--reward.metrics.far", 1]
    return main(*small(folder, *options, "--reward.functions", "null", *words))


DIES = """
import os, pathlib, signal
calls = pathlib.Path(__file__).with_name("calls.txt")
def redness(images):
    with calls.open("a") as file:
        file.write(".")
    if calls.stat().st_size == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return images[:, 0].mean((1, 2))
"""


@pytest.mark.usefixtures("at_root")
def test_a_run_waits_for_a_server_that_restarts(folder, tmp_path, capsys):
    """It is killed while it scores, and started again. It is away for longer than the two quick
    retries, and for longer than the time limit. The run says that it waits, and that it goes on."""
    port, servers = free_port(), []
    servers.append(start_server(tmp_path, DIES, port))
    address = f"http://127.0.0.1:{port}"
    assert servers[0].stdout.readline().startswith(f"redness is served at {address}")

    def restart():
        servers[0].wait(timeout=120)
        time.sleep(2)
        servers.append(start_server(tmp_path, DIES, port))

    restarting = threading.Thread(target=restart)
    restarting.start()
    words = ["--reward.time_limit", 2, "--reward.remote_patience", 2]
    try:
        assert train_with(folder, SimpleNamespace(url=address), *words) == 0
    finally:
        servers[0].kill()
        restarting.join()
        for server in servers:
            server.kill()
            server.communicate()
    said = [line for line in capsys.readouterr().out.splitlines() if " waiting  " in line]
    assert len(said) == 2 and "up to 2 minutes (reward.remote_patience)" in said[0]
    assert "answers again" in said[1] and steps(folder / "run") == [1, 2, 3]


@pytest.mark.usefixtures("at_root")
def test_a_server_that_stays_away_is_told_with_the_steps_saved(folder, capsys):
    begin = time.monotonic()
    with Restarts(999, request=4) as server:
        assert train_with(folder, server, "--reward.remote_patience", 0.05) == 2
    message = told(capsys)
    assert "gave no scores (ConnectError" in message and "1 steps are saved" in message
    assert time.monotonic() - begin < 90 and steps(folder / "run") == [1]


@pytest.mark.usefixtures("at_root")
def test_a_slow_server_has_the_time_limit(folder, capsys):
    with BrokenServer(lambda *request: time.sleep(60)) as server:
        assert train_with(folder, server, "--reward.time_limit", 1) == 2
    assert "far has not answered within 1 s (reward.time_limit)" in told(capsys)
