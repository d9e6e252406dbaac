"""What a program says and where: a terminal, a pipe, a file that cannot be written, a narrow
encoding; the lines of progress; and the environment variables that it reads."""

import ast
import io
import os
import re
import sys
from unittest import mock

import pytest
from accelerate import PartialState
from helpers import ROOT, main, read_jsonl, small, steps, told
from ranks import as_program, in_a_process

from glm_grpo.training.trainer import MinimalGRPOTrainer

pytestmark = pytest.mark.usefixtures("at_root")


def test_the_console_says_what_to_watch(folder, capsys):
    words = small(folder, "--num_steps", 4, "--training.trackers", "null", "--log_interval", 3)
    assert main(*words, "--output_dir", folder / "run") == 0
    out, err = capsys.readouterr()
    assert "\r" not in out + err and out.isascii()
    assert "the loss is zero by construction with one update per rollout" in out
    numbers = r"reward \S+ .*grad \S+, ratio 1\.000, clip \S+%, kl \S+, \S+ s/step, \d\d:\d\d left"
    shown = re.findall(rf"^\d\d:\d\d:\d\d  step (\d)/4  {numbers}$", out, re.M)
    assert shown == ["1", "3", "4"]  # the first, every third, the last
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


def with_broken_output(*words):
    "The program, whose standard output nobody reads, and whose standard error is full."
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    as_program("glm_grpo.train", *words)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_run_whose_output_cannot_be_written_goes_on(folder):
    words = small(folder, "--num_steps", 2, "--training.trackers", "null")
    words += ["--output_dir", str(folder / "run")]
    assert in_a_process(folder, with_broken_output, *words)[0] == 0
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


def test_nothing_depends_on_assertions():
    "`python -O` takes them out of the package."
    for path in (ROOT / "glm_grpo").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], path
