"""What a program says and where: a terminal, a pipe, a file that cannot be written, a narrow
encoding; the lines of progress; and the environment variables that it reads."""

import contextlib
import io
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from accelerate import PartialState
from helpers import counting_reward, main, read_jsonl, small, steps, told

from glm_grpo.training.callbacks import ProgressBar
from glm_grpo.training.interrupts import steady_output
from glm_grpo.training.trainer import MinimalGRPOTrainer

pytestmark = pytest.mark.usefixtures("at_root")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def tell_steps(bar, last=7, policies=("ar",), **numbers):
    "Let a line of progress see some steps."
    trainer = SimpleNamespace(last_step=last, step=0, policies=dict.fromkeys(policies))
    bar.on_train_begin(trainer)
    for step in range(1, last + 1):
        trainer.step = step
        bar.on_step_end(trainer, {"reward_mean": step / 10, **numbers}, None)
    bar.on_train_end(trainer)


@pytest.mark.parametrize("every, told_steps", [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 3, 6, 7])])
def test_a_line_per_logged_step_in_a_file(every, told_steps):
    text = io.StringIO()
    tell_steps(ProgressBar(text, every), grad_norm=1.0, clip_fraction=0.5, kl=0.0, alarms=2.0)
    lines = text.getvalue().splitlines()
    assert "\r" not in text.getvalue() and text.getvalue().isascii()
    assert [int(re.search(r"step (\d)/7", line)[1]) for line in lines] == told_steps
    pattern = (
        r"\d\d:\d\d:\d\d  step 7/7  reward 0\.700 \(last 3: 0\.600, \+0\.300\), grad 1, "
        r"clip 50\.0%, kl 0, 2 WARNINGS above, \S+ s/step, 0:00:00 left"
    )
    assert re.fullmatch(pattern, lines[-1]), lines[-1]


@pytest.mark.parametrize("watched", [True, False])
def test_a_bar_only_where_output_and_errors_both_go_to_a_terminal(watched):
    screen, out = Terminal(), Terminal() if watched else io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(screen):
        tell_steps(ProgressBar())
    assert ("100%" in screen.getvalue()) == watched
    assert "step 7/7" in out.getvalue() and ("\r" in out.getvalue()) <= watched


def test_the_console_says_what_to_watch(folder, capsys):
    words = small(folder, "--num_steps", 3, "--training.trackers", "null", "--log_interval", 2)
    assert main(*words, "--output_dir", folder / "run") == 0
    out, err = capsys.readouterr()
    assert "\r" not in out + err
    assert "the loss is zero by construction with one update per rollout" in out
    shown = re.findall(r"^\d\d:\d\d:\d\d  step (\d)/3  reward ", out, re.M)
    assert shown == ["1", "2", "3"]  # the first, every second, the last
    assert max(abs(line["loss"]) for line in read_jsonl(folder / "run/metrics.jsonl")) < 1e-6


@pytest.fixture
def fault(monkeypatch):
    "The program has a fault in its third step."
    learn = MinimalGRPOTrainer.learn

    def break_down(self, experience):
        if self.step == 2:
            raise KeyError("shape")
        return learn(self, experience)

    monkeypatch.setattr(MinimalGRPOTrainer, "learn", break_down)


@pytest.mark.parametrize("debug", [True, False])
def test_a_fault_of_the_program_is_one_message(folder, capsys, fault, debug):
    run = folder / "run"
    words = small(folder, "--num_steps", 3, "--training.trackers", "null", "--output_dir", run)
    assert main(*words, *["--debug"] * debug) == 1
    text = capsys.readouterr().err
    assert ("Traceback" in text) == debug
    message = text.strip().splitlines()[-1]
    assert message.startswith("error: KeyError: 'shape'") and "2 steps are saved" in message
    assert f"The traceback is in {run}/traceback.txt." in message
    assert "break_down" in (run / "traceback.txt").read_text() and steps(run) == [1, 2]


def shell(command, folder, **environment):
    "Run the program in a shell; TRAIN stands for it -> status, output."
    words = small(folder, "--num_steps", 2, "--training.trackers", "null")
    train = " ".join([sys.executable, "-m glm_grpo.train", *map(repr, words)])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command.replace('TRAIN', train)}"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("out", ["| head -c 5", "> /dev/full 2>&1"])
def test_a_run_whose_output_cannot_be_written_goes_on(folder, out):
    if "/dev/full" in out and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    status, said = shell(f"TRAIN --output_dir {folder}/run {out}", folder)
    assert status == 0 and "rror" not in said
    assert steps(folder / "run") == [1, 2]
    assert (folder / "run/checkpoints/checkpoint_final").is_dir()


def test_names_that_the_output_cannot_encode(folder, monkeypatch):
    named = folder / "Käfer_猫"
    (folder / "prompts.txt").rename(folder / "猫.txt")
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    words = small(folder, "--num_steps", 1, "--training.trackers", "null", "--output_dir", named)
    words += ["--data.prompts_file", folder / "猫.txt"]
    assert main(*words) == 0
    assert main(*words) == 2  # the run is there already
    assert rb"\u732b.txt" in out.buffer.getvalue() and rb"\u732b" in err.buffer.getvalue()
    assert steps(named) == [1]


def test_output_that_was_closed_before_the_start(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with steady_output():
        print("lost")
        print("lost", file=sys.stderr)
    assert sys.stdout is None and sys.stderr is closed


@pytest.mark.parametrize("dry", [[], ["--dry_run"]])
def test_a_world_size_that_is_no_number_is_told(folder, capsys, monkeypatch, dry):
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert main(*small(folder, "--output_dir", folder / "run", *dry)) == 2
    assert "WORLD_SIZE=two: this environment variable must be a whole number" in told(capsys)
    assert not (folder / "run").exists()


@pytest.fixture
def no_launcher():
    """No variable of a launcher is set. accelerate sets some itself and keeps a state: later tests
    of this process must not see either."""
    with mock.patch.dict(os.environ):
        for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        PartialState._reset_state()
        yield
        PartialState._reset_state()


def test_a_world_without_its_ranks_is_told(folder, capsys, monkeypatch, no_launcher):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(*small(folder, "--output_dir", folder / "run")) == 2
    assert "WORLD_SIZE=2" in told(capsys)


def test_nothing_depends_on_assertions(folder):
    "`python -O` takes them out: a run and its refusals are the same."
    (folder / "green.py").write_text(counting_reward("if len(calls) > 3:\n        return None"))
    optimized = f"TRAIN --output_dir {folder}/run".replace("TRAIN", "PYTHONOPTIMIZE=1 TRAIN")
    status, said = shell(optimized, folder)
    assert status == 2 and "The reward green returned None" in said
    assert steps(folder / "run") == [1]
