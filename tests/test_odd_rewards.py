"""Rewards that fail after the first call, that exit the program, or that change its settings: one
message names the reward, and the steps so far are saved. And whose code a run calls."""

import os
import subprocess
import sys

import pytest
import torch
from helpers import (
    GREEN,
    ROOT,
    counting_reward,
    evaluate_main,
    files,
    main,
    resume,
    small,
    step_of,
    steps,
    told,
)

from glm_grpo.data.basics import UserError
from glm_grpo.rewards.remote import RewardServer, serve
from glm_grpo.rewards.weighted import WeightedReward

pytestmark = pytest.mark.usefixtures("at_root")

# A statement that runs from the fourth call on (the second step), and a part of its message.
# The notebook of `call_reward` has more of them.
LATER = {
    "None": ("return None", "returned None for 2 images; it must return one number per image"),
    "an error without a text": ("raise Shy", "raised Shy: its text cannot be read"),
    "an exit": ("sys.exit(0)", "raised SystemExit: 0"),
    "another default type": (
        "torch.set_default_dtype(torch.float64)",
        "called torch.set_default_dtype(torch.float64)",
    ),
}
SHY = """\
import sys
import torch

class Shy(Exception):
    def __str__(self):
        raise RuntimeError
"""


@pytest.mark.parametrize("name", LATER)
def test_a_reward_that_goes_wrong_in_the_second_step_is_told(folder, capsys, name):
    statement, says = LATER[name]
    reward = counting_reward(f"if len(calls) > 3:\n        {statement}", SHY)
    (folder / "green.py").write_text(reward)
    run = folder / "run"
    words = small(folder, "--num_steps", 3, "--training.trackers", "null", "--output_dir", run)
    assert main(*words) == 2
    text = capsys.readouterr().err
    (message,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert message.startswith("error: The reward green ") and says in message
    assert "Traceback" not in text
    assert "1 steps are saved; continue with:" in message and message.endswith("--trust_run_code")
    assert step_of(run / "checkpoints/checkpoint_interrupt") == 1 and steps(run) == [1]
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()


AT_THE_TOP = {
    "an exit": ("sys.exit('no licence')", "green.py cannot be loaded: SystemExit: no licence."),
    "another default type": (
        "torch.set_default_dtype(torch.float64)",
        "its code calls torch.set_default_dtype(torch.float64)",
    ),
    "no gradients": ("torch.set_grad_enabled(False)", "calls torch.set_grad_enabled(False)"),
}


@pytest.mark.parametrize("name", AT_THE_TOP)
def test_a_file_that_leaves_or_changes_torch_is_told_before_anything(folder, capsys, name):
    statement, says = AT_THE_TOP[name]
    (folder / "green.py").write_text(counting_reward("pass", f"{SHY}\n{statement}"))
    there = files(folder)
    assert main(*small(folder, "--num_steps", 1, "--output_dir", folder / "run")) == 2
    assert says in told(capsys)
    assert files(folder) == there
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()


def test_a_reward_without_gradients_of_its_own_spoils_nothing(folder):
    "It switches gradients off during its call, and training continues with gradients."
    (folder / "green.py").write_text(counting_reward("torch.set_grad_enabled(False)", SHY))
    words = small(folder, "--num_steps", 2, "--training.trackers", "null")
    assert main(*words, "--output_dir", folder / "run") == 0
    assert torch.is_grad_enabled() and steps(folder / "run") == [1, 2]


@pytest.mark.parametrize("weight", ["nan", "inf", "-inf"])
def test_a_weight_that_is_no_number_is_refused(folder, capsys, weight):
    "In YAML and on the command line, before anything is written; and in Python."
    there = files(folder)
    metrics = f"{{scene: 1.0, detail: .{weight.lstrip('-')}}}"
    words = ["--data.prompts_file", folder / "prompts.txt", "--output_dir", folder / "run"]
    assert main(*words, "--reward.metrics", metrics) == 2
    text = told(capsys)
    assert "reward.metrics" in text and "detail" in text and files(folder) == there
    with pytest.raises(UserError, match="reward.metrics: the weight of detail"):
        WeightedReward({"detail": brightness}, {"detail": float(weight)})


SPLIT = """\
import hues

def green(images):
    import hues.more  # only now
    return hues.green(images)
"""


@pytest.mark.parametrize("place", ["rewards/mine.py", "mine.py", "rewards.mine"])
def test_a_reward_file_may_import_the_modules_beside_it(tmp_path, place):
    "As with `python rewards/mine.py`; a file there does not hide a module of the program."
    home = tmp_path / "rewards" if "/" in place else tmp_path
    (home / "hues").mkdir(parents=True)
    (home / "hues/__init__.py").write_text(GREEN)
    (home / "hues/more.py").touch()
    (home / "resvg_py.py").write_text("raise SystemExit('hidden')")  # is imported after `load`
    mine = tmp_path / (place if place.endswith(".py") else "rewards/mine.py")
    mine.parent.mkdir(exist_ok=True)
    mine.write_text(SPLIT)
    program = f"""if True:
        import torch
        from glm_grpo.rewards.registry import load_function
        green = load_function({place + ":green"!r})
        assert "resvg_py" not in __import__("sys").modules
        import resvg_py
        assert green(torch.ones(2, 3, 4, 4)).tolist() == [0, 0]
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reward_with_global_random_numbers_is_named(folder):
    (folder / "green.py").write_text(counting_reward("torch.rand(1)", SHY))
    words = small(folder, "--num_steps", 1, "--training.trackers", "null")
    with pytest.warns(UserWarning, match="reward green .*global random numbers of torch"):
        assert main(*words, "--output_dir", folder / "run") == 0


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


def test_evaluate_and_resume_run_no_code_of_others_unasked(run_of_a_stranger, folder, capsys):
    run, trace = run_of_a_stranger
    there = files(run)
    for status in (
        evaluate_main("--checkpoint", run),
        main("--resume", run, "--num_steps", 2),
        main("--resume", run, "--num_steps", 2, "--dry_run"),
    ):
        assert status == 2
    messages = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(messages) == 3
    for message in messages:
        assert "--trust_run_code" in message and f"{folder}/green.py:green" in message
    assert not trace.exists() and files(run) == there


def test_code_that_is_named_or_trusted_runs(run_of_a_stranger, folder):
    run, trace = run_of_a_stranger
    named = ["--reward.functions", f"{folder}/green.py:green"]
    (folder / "mine.yaml").write_text(f"reward: {{functions: {folder}/green.py:green}}\n")
    words = ["--training.eval_samples", 1, "--training.eval_prompts", 1]
    for more in (["--trust_run_code"], named, ["--config", folder / "mine.yaml"]):
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


def test_a_server_that_only_the_run_names_gets_nothing(run_with_a_server, folder, capsys):
    run, url, heard = run_with_a_server
    there = files(run)
    capsys.readouterr()
    for trust in ([], ["--trust_run_code"]):
        assert evaluate_main("--checkpoint", run, *trust) == 2
        assert main("--resume", run, "--num_steps", 2, *trust) == 2
        assert main("--resume", run, "--num_steps", 2, "--dry_run", *trust) == 2
    other = ["--reward.remote.other", "http://127.0.0.1:9"]
    assert main("--resume", run, "--num_steps", 2, *other) == 2
    messages = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(messages) == 7
    for message in messages:
        assert f"{run}/config.yaml: reward.remote" in message and repr(url) in message
        assert "--reward.remote" in message.split("repeat")[1] and "sesame" not in message
    assert heard == [] and files(run) == there


def test_a_server_that_the_command_names_is_used(run_with_a_server, folder):
    run, url, heard = run_with_a_server
    (folder / "mine.yaml").write_text(f"reward: {{remote: {{far: {url}}}}}\n")
    assert main("--resume", run, "--num_steps", 2, "--reward.remote.far", url) == 0
    assert main("--resume", run, "--num_steps", 3, "--config", folder / "mine.yaml") == 0
    more = ["--training.eval_samples", 1, "--training.eval_prompts", 1]
    assert evaluate_main("--checkpoint", run, *more, "--reward.remote", f"{{far: {url}}}") == 0
    assert steps(run) == [1, 2, 3] and {*heard} == {(url, "open-sesame")}
