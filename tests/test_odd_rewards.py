"""Rewards that exit the program or change its settings: one message names the reward, and the
steps so far are saved. And whose code and servers a run uses."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import (
    counting_reward,
    evaluate_main,
    files,
    main,
    read_json,
    read_jsonl,
    resume,
    small,
    steps,
    told,
)
from ranks import as_program, start

from glm_grpo.rewards.remote import RewardServer, serve

pytestmark = pytest.mark.usefixtures("at_root")


SOME = """\
def some(images, prompts):
    "No score for the first image of a call."
    return [None, *images[1:, 1].mean((1, 2)).tolist()]
"""


def test_missing_scores_are_counted_and_told_and_leave_their_image_out(folder, capsys):
    "In training, in evaluations, and on the page."
    (folder / "some.py").write_text(SOME)
    run = folder / "run"
    words = ["--num_steps", 2, "--training.batch_size", 2, "--reward.grpo.group_size", 3]
    words += ["--training.eval_samples", 1, "--training.sample_interval", 1]
    words += ["--reward.functions", f"{folder}/some.py:some", "--output_dir", run]
    with pytest.warns(UserWarning, match="from some for 1 of the 6 images") as told_once:
        assert main(*small(folder, *words)) == 0
    assert sum("No score" in str(one.message) for one in told_once) == 1
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["missing_scores"] for line in lines] == [1, 1]
    assert all(line["reward_mean"] > 0 and line["grad_norm"] > 0 for line in lines)
    for result in read_json(run / "eval.json").values():
        (missing, *others) = [row[0] for row in result["rewards"]]
        assert missing is None and result["missing_scores"] == 1
        assert result["reward_mean"] == pytest.approx(sum(others) / len(others))
    assert "no score" in (run / "page.html").read_text()
    assert "training prompts, 1 without a score" in capsys.readouterr().out
    stopped = [*words[:-1], folder / "stopped", "--reward.grpo.missing_scores", "stop"]
    assert main(*small(folder, *stopped)) == 2
    message = told(capsys)
    assert "reward some has nothing to score in image 0, prompt" in message
    assert "reward.grpo.missing_scores drop" in message


OTHERS = """\
calls = []

def others(images, prompts):
    "Of three images in every second evaluation the last two have a score, else the first."
    if len(prompts) == 3:
        calls.append(prompts)
    first = len(calls) % 2 == 0 or len(prompts) < 3
    return [0.5 if first == (i == 0) else None for i in range(len(prompts))]
"""


def test_evaluations_whose_images_have_no_score_in_common_are_no_error(folder, capsys):
    (folder / "others.py").write_text(OTHERS)
    words = ["--num_steps", 2, "--training.batch_size", 2, "--training.eval_samples", 1]
    words += ["--reward.functions", f"{folder}/others.py:others", "--output_dir", folder / "run"]
    assert main(*small(folder, *words)) == 0
    before, after = (result["rewards"] for result in read_json(folder / "run/eval.json").values())
    assert not any(x[0] and y[0] for x, y in zip(before, after, strict=True))
    assert "no image has a score both before and after" in capsys.readouterr().out
    assert (folder / "run/page.html").exists()


def test_side_effects_that_do_no_harm(folder):
    "Its file switches gradients off, and it draws global random numbers: a warning."
    off = "import torch\ntorch.set_grad_enabled(False)"
    (folder / "green.py").write_text(counting_reward("torch.rand(1)", off))
    words = small(folder, "--num_steps", 2, "--training.trackers", "null")
    with pytest.warns(UserWarning, match="reward green .*global random numbers"):
        assert main(*words, "--output_dir", folder / "run") == 0
    assert torch.is_grad_enabled() and steps(folder / "run") == [1, 2]


@pytest.fixture
def run_of_a_stranger(folder):
    "A run that names a function; loading the function's file now leaves a trace."
    run = folder / "run"
    words = small(folder, "--num_steps", 1, "--training.trackers", "null", "--output_dir", run)
    assert main(*words) == 0
    trace = folder / "it_ran"
    evil = f"from pathlib import Path\nPath({str(trace)!r}).touch()\n"
    (folder / "green.py").write_text(counting_reward("pass", evil))
    return run, trace


def test_code_that_is_named_or_trusted_runs(run_of_a_stranger, folder):
    run, trace = run_of_a_stranger
    named = ["--reward.functions", f"{folder}/green.py:green"]
    words = ["--training.eval_samples", 1, "--training.eval_prompts", 1]
    for more in (["--trust_run_code"], named):
        trace.unlink(missing_ok=True)
        assert evaluate_main("--checkpoint", run, *words, *more) == 0
        assert trace.exists()
    assert resume(run, "--num_steps", 2) == 0
    assert main("--resume", run, "--num_steps", 3, *named) == 0
    assert steps(run) == [1, 2, 3]


def brightness(images):
    return images.mean((1, 2, 3))


@pytest.fixture
def run_with_a_server(folder, monkeypatch):
    "A run of one step with a remote reward, the server's address, and the headers that it got."
    monkeypatch.setenv("GLM_GRPO_TOKEN", "open-sesame")
    run, words = folder / "run", small(folder, "--num_steps", 1, "--training.trackers", "null")
    at, heard = words.index("--reward.functions"), []
    refusal = RewardServer.refusal

    def listened(self, authorization, length):
        heard.append((self.url, authorization.removeprefix("Bearer ")))
        return refusal(self, authorization, length)

    monkeypatch.setattr(RewardServer, "refusal", listened)
    with serve(brightness) as server:
        words[at : at + 2] = ["--reward.remote", f"{{far: {server.url}}}"]
        assert main(*words, "--reward.metrics", "{far: 1}", "--output_dir", run) == 0
        assert {*heard} == {(server.url, "open-sesame")}
        heard.clear()
        yield run, server.url, heard


def test_only_a_server_that_the_command_names_is_used(run_with_a_server, folder, capsys):
    run, url, heard = run_with_a_server
    there = files(run)
    capsys.readouterr()
    other = ["--reward.remote.other", "http://127.0.0.1:9"]
    assert evaluate_main("--checkpoint", run, "--trust_run_code") == 2
    assert main("--resume", run, "--num_steps", 2, "--trust_run_code") == 2
    assert main("--resume", run, "--num_steps", 2, *other) == 2
    messages = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(messages) == 3
    for message in messages:
        assert f"{run}/config.yaml: reward.remote" in message and repr(url) in message
        assert "--reward.remote" in message.split("repeat")[1] and "sesame" not in message
    assert heard == [] and files(run) == there

    (folder / "mine.yaml").write_text(f"reward: {{remote: {{far: {url}}}}}\n")
    assert main("--resume", run, "--num_steps", 2, "--config", folder / "mine.yaml") == 0
    more = ["--training.eval_samples", 1, "--training.eval_prompts", 1]
    assert evaluate_main("--checkpoint", run, *more, "--reward.remote", f"{{far: {url}}}") == 0
    assert steps(run) == [1, 2] and {*heard} == {(url, "open-sesame")}


# rewards whose work other processes do; each line of `started` is one of them
POOL = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor

def work(value):
    open({started!r}, "a").write(f"{{os.getpid()}}\\n")
    {work}
    return value

{begin}

def green(images):
    values = (images[:, 1].mean((1, 2)) - images[:, [0, 2]].mean((1, 2, 3))).tolist()
    {call}
"""
FORK = "ProcessPoolExecutor(2, multiprocessing.get_context('fork'))"
POOLS = {  # at the top of the file, in the function
    "executor": (f"pool = {FORK}", "return list(pool.map(work, values))"),
    "executor, spawn": (
        f"pool = {FORK}".replace("fork", "spawn"),
        "return list(pool.map(work, values))",
    ),
    "when it is needed": (
        "pools = []",
        "pools or pools.append(multiprocessing.get_context('fork').Pool(2))\n"
        "    return pools[0].map(work, values)",
    ),
}


def start_with_pool(folder, name, work="", steps=1000):
    begin, call = POOLS[name]
    values = {"started": str(folder / "started"), "work": work, "begin": begin, "call": call}
    (folder / "green.py").write_text(POOL.format(**values))
    words = ["--num_steps", steps, "--output_dir", folder / "run", "--training.trackers", "null"]
    words = small(folder, *words, "--reward.time_limit", 3 if work else 20)
    if "spawn" in name:  # the new processes import the program
        command = [sys.executable, "-m", "glm_grpo.train", *words]
        return subprocess.Popen(command, stdout=open(folder / "log", "w"))
    return start(folder / "log", {}, as_program, ["glm_grpo.train", *words])


def still_there(folder):
    "The processes of the pool that have not ended."
    found = set()
    for process in set((folder / "started").read_text().split()):
        try:
            with open(f"/proc/{process}/stat") as f:
                found |= {process} if f.read().rpartition(")")[2].split()[0] != "Z" else set()
        except FileNotFoundError:
            pass
    return found


def wait_until(condition, seconds=90):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_pool_of_processes_works_and_ends_with_the_run(folder):
    process = start_with_pool(folder, "when it is needed", steps=2)
    process.join(90)
    assert process.exitcode == 0, (folder / "log").read_text()
    assert steps(folder / "run") == [1, 2] and not still_there(folder)


def test_ctrl_c_in_a_terminal_is_the_business_of_the_run_and_not_of_its_pool(folder):
    process, log = start_with_pool(folder, "executor"), folder / "run/metrics.jsonl"
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) > 1)
    os.killpg(process.pid, signal.SIGINT)
    process.join(60)
    said = (folder / "log").read_text()
    assert process.exitcode == 130 and "saved; continue with" in said
    assert "Traceback" not in said and not still_there(folder)


def test_a_pool_ends_with_a_run_that_is_killed(folder):
    process = start_with_pool(folder, "executor, spawn")
    wait_until((folder / "started").exists)
    process.kill()
    process.wait()
    wait_until(lambda: not still_there(folder), 20)


def test_a_pool_that_hangs_does_not_keep_the_run(folder):
    process = start_with_pool(folder, "executor", work="time.sleep(10000)")
    process.join(90)
    assert process.exitcode == 2
    assert "green has not answered within 3 s" in (folder / "log").read_text()
    wait_until(lambda: not still_there(folder), 5)
