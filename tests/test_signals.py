"""Ctrl+C, SIGTERM and SIGHUP at each moment of a program: one line, and status 128 + the signal's
number. What comes while a run trains is in tests/test_cli.py."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from diffusers.training_utils import EMAModel
from helpers import ROOT, counting_reward, load_weights, main, read_json, read_jsonl, resume, small
from helpers import step_of, steps

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


@pytest.mark.parametrize("lora, step", [("true", 1), ("false", 0)])
def test_a_signal_in_the_evaluation_before(folder, capsys, monkeypatch, lora, step):
    "It ends at once, and the checkpoint is the way to go on: there the model is measured anew."
    run, signum = folder / "run", signal.SIGTERM
    words = ["--num_steps", 2, "--training.trackers", "null", "--training.eval_samples", 1]
    words += ["--model.lora", lora]
    evaluate = program.evaluate_config
    monkeypatch.setattr(program, "evaluate_config", interrupted_by(signum, evaluate))
    assert main(*small(folder, *words, "--output_dir", run)) == 128 + signum
    out, err = capsys.readouterr()
    last = out.strip().splitlines()[-1]
    saved = run / "checkpoints/checkpoint_interrupt"
    assert last.split() == [
        *(f"stopped after step {step}, saved; continue with: python -m glm_grpo.train".split()),
        *("--resume", str(saved), "--trust_run_code"),
    ]
    assert "Traceback" not in err and step_of(saved) == step
    monkeypatch.setattr(program, "evaluate_config", evaluate)
    assert resume(saved) == 0 and steps(run) == [1, 2]
    straight = folder / "straight"
    assert main(*small(folder, *words, "--output_dir", straight)) == 0
    results = [read_json(out / "eval.json") for out in (run, straight)]
    for name in ("before", "after"):
        assert results[0][name]["rewards"] == results[1][name]["rewards"]


def test_the_model_before_training_is_measured_after_the_first_step(folder, capsys):
    "The numbers are those of the weights that training began with, and nothing else changes."
    words = ["--num_steps", 2, "--training.trackers", "null", "--training.learning_rate", 0.01]
    words += ["--training.ema_decay", 0.5]  # the average is not what is measured
    runs = folder / "later", folder / "first"
    for run, more in zip(runs, ([], ["--training.eval_interval", 1])):
        given = small(folder, *words, "--training.eval_samples", 1, *more, "--output_dir", run)
        assert main(*given) == 0
    said = capsys.readouterr().out.split("  before  measuring")
    assert ["step 1/2" in part for part in said] == [True, False, True]
    assert ["step 2/2" in part for part in said] == [False, True, True]
    before = [read_json(run / "eval.json")["before"]["rewards"] for run in runs]
    assert before[0] == before[1]
    lines = [read_jsonl(run / "metrics.jsonl") for run in runs]
    for one, other in zip(*lines):
        assert (one["reward_mean"], one["grad_norm"]) == (other["reward_mean"], other["grad_norm"])
    assert [line["step"] for line in read_jsonl(runs[0] / "eval_history.jsonl")] == [0, 2]


@pytest.mark.parametrize("call, step, evaluated", [(3, 1, []), (5, 2, [0])])
def test_a_signal_in_a_step_comes_before_its_evaluations(folder, call, step, evaluated):
    """What asks a run to end may kill it soon: it saves, and evaluates nothing first. The reward is
    called twice as a trial, in step 1, in the evaluation before training, in step 2."""
    run = folder / "run"
    signal_once = f"len(calls) == {call} and os.kill(os.getpid(), signal.SIGTERM)"
    (folder / "green.py").write_text(counting_reward(signal_once, "import os, signal"))
    words = ["--num_steps", 3, "--training.trackers", "null", "--training.eval_samples", 1]
    words += ["--training.eval_interval", 2, "--output_dir", run]
    assert main(*small(folder, *words)) == 143
    assert step_of(run / "checkpoints/checkpoint_interrupt") == step
    history = run / "eval_history.jsonl"
    assert [line["step"] for line in (read_jsonl(history) if history.exists() else [])] == evaluated


def test_a_signal_in_the_only_step_or_after_it(folder, capsys):
    "The last line says how to evaluate what is saved, and no evaluation comes first."
    for call in (3, 4):  # in the step; in the evaluation before training
        run = folder / f"run {call}"
        signal_once = f"len(calls) == {call} and os.kill(os.getpid(), signal.SIGTERM)"
        (folder / "green.py").write_text(counting_reward(signal_once, "import os, signal"))
        words = ["--num_steps", 1, "--training.trackers", "null", "--training.eval_samples", 1]
        words += ["--training.sample_interval", 1, "--output_dir", run]
        assert main(*small(folder, *words)) == 143
        last = capsys.readouterr().out.strip().splitlines()[-1]
        assert "glm_grpo.evaluate --checkpoint" in last and "checkpoint_final" in last
        assert (run / "samples/step_000001.png").is_file()
        assert not (run / "eval_history.jsonl").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_while_the_trained_weights_come_back(folder, monkeypatch, signum):
    "What is saved are the weights of one moment."
    evaluate, restore = program.evaluate_config, EMAModel.restore
    monkeypatch.setattr(program, "evaluate_config", interrupted_by(signal.SIGTERM, evaluate))
    trained = {}

    def half(self, parameters):
        first, second = parameters[::2], parameters[1::2]
        stored = self.temp_stored_params
        trained["weights"] = [tensor.clone() for tensor in stored]
        self.temp_stored_params = stored[::2]
        restore(self, first)
        signal.raise_signal(signum)
        self.temp_stored_params = stored[1::2]
        restore(self, second)

    monkeypatch.setattr(EMAModel, "restore", half)
    words = ["--num_steps", 2, "--training.trackers", "null", "--training.eval_samples", 1]
    assert main(*small(folder, *words, "--output_dir", folder / "run")) in (130, 143)
    (saved,) = load_weights(folder / "run/checkpoints/checkpoint_interrupt").values()
    assert len(saved) == len(trained["weights"])
    assert all(any(torch.equal(w, s) for s in saved.values()) for w in trained["weights"])


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
