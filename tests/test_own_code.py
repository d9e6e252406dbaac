"A loss, advantages and callbacks by their files: used, checked before loading, and trusted."

import itertools
import json
import re

import pytest
import torch
from helpers import main, read_jsonl, resume, small, step_of, told

from glm_grpo.data.basics import UserError
from glm_grpo.data.code import load_code
from glm_grpo.maths.loss import LOSSES, compute_grpo_loss
from glm_grpo.rewards.calling import RewardError, call_reward
from glm_grpo.run.build import check_loss
from glm_grpo.run.microscope import read_decisions
from glm_grpo.training.options import GRPOOptions

CODE = """
import torch
from glm_grpo import Callback, compute_grpo_loss

def loss(new, old, advantages, **options):
    value, metrics = compute_grpo_loss(new, old, advantages, **options)
    return value, metrics | {"mine": torch.tensor(7.0)}

def best_only(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups == groups.amax(1, keepdim=True)).float().flatten()

def short(new, old):
    return new.sum(), {}

def scalar(new, old, advantages, **options):
    return (advantages * new.mean(1)).sum() / options["num_samples"]

def mean(new, old, advantages, **options):
    return (advantages * new.mean(1)).mean(), {}

def few(rewards, group_size):
    return rewards[:1]

class Note(Callback):
    def on_evaluate(self, trainer, evaluation):
        print(f"heard {evaluation.reward_mean:.2f} at {evaluation.step}")

    def on_step_end(self, trainer, metrics, experience):
        metrics["noted"] = 3.0

class Fails(Callback):
    def on_step_end(self, trainer, metrics, experience):
        torch.ones(trainer.step).view(3, 5)

class NoCallback:
    pass

def breaks(rewards, group_size):
    return {}["group"]
"""
pytestmark = pytest.mark.usefixtures("at_root")


@pytest.fixture
def mine(folder):
    file = folder / "mine.py"
    file.write_text(CODE)
    return file


def test_a_loss_advantages_and_a_callback_by_file_train_and_resume(folder, mine, capsys):
    out, words = folder / "run", small(folder, "--training.eval_samples", 1)
    words += ["--training.loss", f"{mine}:loss", "--training.callbacks", f"{mine}:Note"]
    words += ["--reward.grpo.advantages", f"{mine}:best_only", "--output_dir", out]
    assert main(*words, "--num_steps", 1) == 0
    (line,) = read_jsonl(out / "metrics.jsonl")
    assert line["mine"] == 7 and line["noted"] == 3 and line["advantage_mean"] > 0.4
    printed = capsys.readouterr().out
    assert "at 0" in printed and "at 1" in printed
    final = out / "checkpoints/checkpoint_final"
    assert main("--resume", final, "--num_steps", 2) == 2
    message = told(capsys)
    assert all(f"mine.py:{name}" in message for name in ("loss", "best_only", "Note"))
    assert resume(final, "--num_steps", 2, "--trust_run_code") == 0
    assert [line["mine"] for line in read_jsonl(out / "metrics.jsonl")] == [7, 7]


@pytest.mark.parametrize(
    "option, name, message",
    [
        ("training.loss", "short", "Write def f(new, old, advantages, **options)"),
        ("training.loss", "scalar", "which returns (loss, metrics): a scalar with gradient"),
        ("training.loss", "mean", "divide a sum over the samples by num_samples"),
        ("training.callbacks", "NoCallback", "no class derived from glm_grpo.Callback"),
        ("reward.grpo.advantages", "short", "Write def f(rewards, group_size)"),
    ],
)
def test_code_that_does_not_fit_is_refused_before_the_model_is_loaded(
    folder, mine, capsys, option, name, message
):
    named = f"{mine}:{name}"
    if name == "short" and "advantages" in option:
        mine.write_text(CODE.replace("def short(new, old)", "def short(new)"))
    words = small(folder, f"--{option}", named, "--output_dir", folder / "run")
    assert main(*words, "--num_steps", 1) == 2
    output = told(capsys)
    assert f"{option} {named}: " in output and message in output
    assert not (folder / "run").exists()


def test_advantages_of_another_shape_stop_the_run(folder, mine, capsys):
    words = small(folder, "--reward.grpo.advantages", f"{mine}:few", "--num_steps", 1)
    assert main(*words, "--output_dir", folder / "run") == 2
    assert "must return as many finite advantages" in told(capsys)


@pytest.mark.parametrize(
    "option, name, line, error",
    [
        ("training.callbacks", "Fails", "view(3, 5)", "RuntimeError: shape '[3, 5]' is invalid"),
        ("reward.grpo.advantages", "breaks", '{}["group"]', "KeyError: 'group'"),
    ],
)
def test_an_error_in_ones_own_code_is_told_with_its_line(
    folder, mine, capsys, option, name, line, error
):
    "And is no bug in the program, also where PyTorch raised it."
    words = small(folder, f"--{option}", f"{mine}:{name}", "--num_steps", 1)
    assert main(*words, "--output_dir", folder / "run") == 2
    output = told(capsys)
    number = mine.read_text().split(line)[0].count("\n") + 1
    assert error in output and "a bug in" not in output
    assert f"({mine}, line {number}, in your own code)" in output


def test_a_reward_that_pytorch_stops_is_told_with_its_own_line(tmp_path):
    path = tmp_path / "halves.py"
    call = "torch.nn.functional.interpolate(images, (1, 2, 3))"
    path.write_text(f"import torch\ndef halves(images):\n    return {call}\n")
    reward = load_code(f"{path}:halves", "reward.functions")
    with pytest.raises(RewardError, match=re.escape(f"({path}, line 3;")):
        call_reward(reward, torch.zeros(2, 3, 5, 5), ["a cat", "a dog"])


def test_a_run_ends_when_the_held_out_reward_is_enough(folder, capsys):
    out, words = folder / "run", small(folder, "--training.eval_samples", 1, "--num_steps", 5)
    words += ["--training.eval_interval", 1, "--training.stop_at", -9, "--output_dir", out]
    assert main(*words) == 0
    assert len(read_jsonl(out / "metrics.jsonl")) == 1 and (out / "eval.json").exists()
    assert "training.stop_at -9" in capsys.readouterr().out
    assert (out / "checkpoints/checkpoint_best").exists()
    assert step_of(out / "checkpoints/checkpoint_final") == 1
    assert main(*words, "--resume", "auto") == 0  # as a queue does
    assert len(read_jsonl(out / "metrics.jsonl")) == 1
    assert main(*small(folder, "--training.patience", 2)) == 2
    assert "training.patience, training.stop_at: they need evaluations" in told(capsys)


def test_auto_starts_goes_on_and_sets_a_dead_run_aside(folder, capsys):
    run = folder / "run"
    words = small(folder, "--training.eval_samples", 1, "--resume", "auto")
    words += ["--output_dir", run, "--num_steps"]
    run.mkdir()
    (run / "config.yaml").write_text("of a run that was killed before its first checkpoint")
    assert main(*words, 1) == 0
    printed = capsys.readouterr()
    assert "no checkpoint in" in printed.out + printed.err
    assert [path.name for path in (run / "without_checkpoint_1").iterdir()] == ["config.yaml"]
    assert main(*words, 2) == 0  # the same command: it names the code, so it needs no trust
    printed = capsys.readouterr()
    assert "going on from" in printed.out + printed.err
    assert "before  as measured when the run began" in printed.out
    results = json.loads((run / "eval.json").read_text())
    assert results["before"]["prompts"] and (run / "before_after.png").exists()
    assert main(*words, 3, "--rollout.temperature", 2) == 0  # another model before training
    assert "as measured" not in capsys.readouterr().out
    assert len(read_jsonl(run / "metrics.jsonl")) == 3
    assert main(*small(folder, "--resume", "auto")) == 2 and "Give one" in told(capsys)


def test_rollouts_are_saved_as_tables(folder):
    out, words = folder / "run", small(folder, "--model.component", "both", "--num_steps", 2)
    words += ["--rollout.num_inference_steps", 2, "--training.save_rollouts", 2]
    words += ["--training.updates_per_rollout", 2]
    assert main(*words, "--output_dir", out) == 0
    lines = read_jsonl(out / "metrics.jsonl")
    for line in lines:  # the first step, and each second one
        rows = read_jsonl(out / f"rollouts/step_{line['step']:06d}.jsonl")
        assert [(row["sample"], row["image"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        rewards = [row["reward"] for row in rows]
        assert sum(rewards) / 4 == pytest.approx(line["reward_mean"])
        assert rewards == [row["reward/green"] for row in rows]
        assert all((out / "rollouts" / row["file"]).exists() for row in rows)
        of_dit = [row["dit/advantage"] for row in rows]
        assert (
            of_dit[0] == pytest.approx(-of_dit[1])
            and rows[0]["ar/advantage"] == rows[1]["ar/advantage"]
        )
    seen = read_decisions(out)  # for `microscope.html`
    page = (out / "microscope.html").read_text(encoding="utf-8")
    assert seen == json.loads(page.split('id="data">')[1].split("<")[0])
    for step, line in zip(seen["steps"], lines):
        assert step["step"] == line["step"] and step["prompts"][0]["source"].startswith("data:")
        assert [*step["policies"]] == ["ar", "dit"]
        assert step["policies"]["ar"]["grids"] == [[2, 2]]
        assert step["policies"]["dit"]["names"] == ["Denoising step 1 of 2, at noise 1.00"]
        for name, facts in step["policies"].items():
            for ours, theirs in (("ratio", "ratio_mean"), ("clipped", "clip_fraction")):
                assert facts[ours] == pytest.approx(line[f"{name}/{theirs}"], abs=1e-6)


def test_the_check_of_a_loss_accepts_the_built_in_ones():
    for loss_type, level in itertools.product(LOSSES, ("token", "sequence")):
        for beta in (0.0, 0.1):
            options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": beta}
            check_loss(compute_grpo_loss, "built in", GRPOOptions(**options))


def test_a_loss_is_tried_with_an_advantage_for_each_token():
    "Where a run has them: `advantages[:, None]` would pair each sample with all others."

    def loss(new, old, advantages, *, num_decisions, **options):
        value = -((new - old).exp() * advantages[:, None]).sum() / num_decisions
        return value, {}

    def right(new, old, advantages, **options):
        return loss(new, old, advantages.view(len(advantages), -1)[:, 0], **options)

    check_loss(loss, "my.py:loss", GRPOOptions())
    for changes in ({"preview_share": 0.5}, {"entropy_share": 0.2}):
        grpo = GRPOOptions(**changes)
        with pytest.raises(UserError, match="where each token has an advantage of its own"):
            check_loss(loss, "my.py:loss", grpo)
        check_loss(right, "my.py:right", grpo)
        check_loss(compute_grpo_loss, "built in", grpo)
