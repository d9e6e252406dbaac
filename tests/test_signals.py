"""Ctrl+C, SIGTERM and SIGHUP at each moment of a program: one line, and status 128 + the signal's
number. What comes while a run trains is in tests/test_cli.py."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, counting_reward, main, resume, small, step_of, steps

from glm_grpo.run import train as program

pytestmark = pytest.mark.usefixtures("at_root")

NAMES = {signal.SIGINT: "Ctrl+C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


@pytest.mark.parametrize("module, signum", list(zip(("train", "evaluate"), NAMES)))
def test_a_signal_while_packages_are_imported(module, signum):
    words = [sys.executable, "-X", "importtime", "-m", f"glm_grpo.{module}"]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:  # a line per module that was imported
            if line.rstrip().endswith(" glm_grpo.training.interrupts"):
                break
        time.sleep(0.2)
        process.send_signal(signum)
        rest = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    said = [line for line in rest.splitlines() if line and not line.startswith("import time:")]
    assert process.returncode == 128 + signum
    assert said == [f"stopped by {NAMES[signum]} before anything started."]


def interrupted_by(signum, function):
    "The function, after a signal to this process."

    def work(*args, **kwargs):
        signal.raise_signal(signum)
        return function(*args, **kwargs)

    return work


@pytest.mark.parametrize(
    "moment, signum", list(zip(("parse_args", "open_data", "load_on_ranks"), NAMES))
)
def test_a_signal_before_there_is_anything_to_save(folder, capsys, monkeypatch, moment, signum):
    run = folder / "run"
    monkeypatch.setattr(program, moment, interrupted_by(signum, getattr(program, moment)))
    before = [signal.getsignal(s) for s in NAMES]
    assert main(*small(folder, "--num_steps", 2, "--output_dir", run)) == 128 + signum
    said = capsys.readouterr().err.strip()
    assert said.endswith(f"stopped at once by {NAMES[signum]}, without saving.")
    assert "Traceback" not in said
    assert not run.exists() and before == [signal.getsignal(s) for s in NAMES]


def test_a_signal_in_the_evaluation_before(folder, capsys, monkeypatch):
    "The folder is there, so its checkpoint of step 0 is the way to go on."
    run, signum = folder / "run", signal.SIGTERM
    words = ["--num_steps", 1, "--training.trackers", "null", "--output_dir", run]
    evaluate = program.evaluate_config
    monkeypatch.setattr(program, "evaluate_config", interrupted_by(signum, evaluate))
    assert main(*small(folder, *words, "--training.eval_samples", 1)) == 128 + signum
    out, err = capsys.readouterr()
    last = out.strip().splitlines()[-1]
    saved = run / "checkpoints/checkpoint_interrupt"
    assert last.split() == [
        *("stopped after step 0, saved; continue with: python -m glm_grpo.train".split()),
        *("--resume", str(saved), "--trust_run_code"),
    ]
    assert "Traceback" not in err and step_of(saved) == 0
    monkeypatch.setattr(program, "evaluate_config", evaluate)
    assert resume(saved, "--training.eval_samples", 0) == 0 and steps(run) == [1]


def test_a_terminal_that_is_closed_saves(folder):
    "Both the shell and the system send SIGHUP."
    run, hang_up = folder / "run", "os.kill(os.getpid(), signal.SIGHUP)"
    hang_up = f"[{hang_up}, time.sleep(0.3), {hang_up}, time.sleep(0.3)]"
    reward = counting_reward(f"len(calls) == 4 and {hang_up}", "import os, signal, time")
    (folder / "green.py").write_text(reward)
    words = small(folder, "--num_steps", 50, "--training.trackers", "null", "--output_dir", run)
    assert main(*words) == 129
    assert step_of(run / "checkpoints/checkpoint_interrupt") == 2 == steps(run)[-1]


def test_nohup_keeps_a_run_going(folder):
    run = folder / "run"
    hang_up = "os.kill(os.getpid(), signal.SIGHUP)"
    (folder / "green.py").write_text(counting_reward(hang_up, "import os, signal"))
    words = small(folder, "--num_steps", 2, "--training.trackers", "null", "--output_dir", run)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(*words) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert steps(run) == [1, 2]


def test_a_signal_while_results_are_written(folder, capsys, monkeypatch):
    "Training is done: the last line says how to evaluate it."
    run = folder / "run"
    finish = interrupted_by(signal.SIGTERM, program.Training.finish)
    monkeypatch.setattr(program.Training, "finish", finish)
    words = small(folder, "--num_steps", 1, "--training.trackers", "null", "--output_dir", run)
    assert main(*words, "--training.eval_samples", 1) == 143
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert "continue with: python -m glm_grpo.evaluate" in last
    assert (run / "reward_curve.png").is_file() and os.listdir(run / "checkpoints")
    assert "1 of 1" in (run / "page.html").read_text(encoding="utf-8")
