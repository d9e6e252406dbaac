"Going on with a run: which options count, which checkpoint is meant, when checkpoints are written."

import contextlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers import GREEN, PROMPTS, ROOT, contents, evaluate_main, main, make_folder
from helpers import read_json, resume, small, step_of, steps

from glm_grpo.run.command_line import parse_args
from glm_grpo.training.callbacks import CheckpointCallback

pytestmark = pytest.mark.usefixtures("at_root")


def notes(capsys):
    "What was said before anything started."
    lines = capsys.readouterr().out.splitlines()
    return [line.split(None, 1)[1] for line in lines if line.strip().startswith("note ")]


@pytest.fixture(scope="module")
def began(tmp_path_factory):
    "A run of one step that began with a file and with words over it."
    folder = tmp_path_factory.mktemp("began")
    for name, prompts in (("prompts.txt", PROMPTS), ("one.txt", PROMPTS[:1])):
        (folder / name).write_text("\n".join(prompts) + "\n")
    (folder / "green.py").write_text(GREEN)
    file = folder / "mine.yaml"
    file.write_text("training: {batch_size: 2, sample_interval: 7, output_dir: outputs/mine}\n")
    words = small(folder, "--num_steps", 1, "--output_dir", folder / "run")  # batches of 1
    with contextlib.chdir(ROOT):
        assert main("--config", file, *words) == 0
    return folder


@pytest.fixture
def run(began, tmp_path, capsys):
    "A copy of that run."
    capsys.readouterr()
    return Path(shutil.copytree(began / "run", tmp_path / "run"))


def test_the_file_of_the_beginning_changes_nothing(run, began, capsys):
    file = began / "mine.yaml"
    again = ["--config", file, "--trust_run_code", "--resume", run, "--num_steps", 2]
    assert main("--dry_run", *again) == 0
    said = notes(capsys)
    assert "the run began with this file, so it changes nothing" in said[0]
    assert said[1:] == ["training.max_steps: 1 in the run, 2 on the command line"]
    assert main(*again) == 0
    assert notes(capsys) == said
    assert steps(run) == [1, 2]
    config = parse_args(["--trust_run_code", "--resume", str(run)])
    assert (config.training.batch_size, config.training.sample_interval) == (1, 0)
    assert str(file) in config.read_from


def test_another_file_changes_what_it_spells_out_and_nothing_else(run, tmp_path, capsys):
    file = tmp_path / "other.yaml"
    file.write_text("training: {max_steps: 2, learning_rate: 1e-4, output_dir: elsewhere}\n")
    assert main("--config", file, "--trust_run_code", "--resume", run) == 0
    assert set(notes(capsys)[:2]) == {
        f"training.max_steps: 1 in the run, 2 in {file}",
        f"training.learning_rate: 0.002 in the run, 0.0001 in {file}",
    }
    assert steps(run) == [1, 2]
    config = parse_args(["--trust_run_code", "--resume", str(run)])
    assert config.training.learning_rate == 1e-4 and config.rollout.temperature == 3


@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["run", "dry run"])
def test_what_a_checkpoint_does_not_fit_is_refused_with_a_list(run, began, tmp_path, capsys, dry):
    file, before = tmp_path / "other.yaml", contents(run)
    file.write_text(
        "model: {lora_rank: 4, lora_alpha: 8}\ntraining: {batch_size: 2, max_steps: 9, seed: 5}\n"
    )
    assert main("--config", file, "--trust_run_code", "--resume", run, *dry) == 2
    told = capsys.readouterr()
    for part in (
        "lora_rank 16, not 4",
        "lora_alpha 32.0, not 8.0",
        "batch_size 1, not 2",
        "seed 0, not 5",
    ):
        assert part in told.err
    assert f"model.lora_rank: 16 in the run, 4 in {file}" in told.out
    words = ["--num_steps", 2, "--data.prompts_file", began / "one.txt"]
    assert main("--trust_run_code", "--resume", run, *words, *dry) == 2
    assert f"number of prompts {len(PROMPTS)}, not 1" in capsys.readouterr().err
    assert contents(run) == before


def test_a_run_that_is_done_says_how_it_goes_on(run, tmp_path, capsys):
    file = tmp_path / "other.yaml"
    file.write_text("training: {max_steps: 1, learning_rate: 1e-4}\n")
    assert main("--config", file, "--trust_run_code", "--resume", run) == 2
    assert "1 steps are done, and training.max_steps is 1" in (err := capsys.readouterr().err)
    assert "such as --num_steps 2" in err


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    "A run of four steps that kept the last two checkpoints."
    folder = make_folder(tmp_path_factory.mktemp("long"))
    words = ["--training.save_interval", 1, "--training.keep_checkpoints", 2]
    words += ["--training.ema_decay", 0.9, "--training.learning_rate", 1e-3, "--num_steps", 4]
    words += ["--training.lr_scheduler", "linear"]
    with contextlib.chdir(ROOT):
        assert main(*small(folder, *words, "--output_dir", folder / "run")) == 0
    return folder / "run"


@pytest.fixture
def copied(long, tmp_path, capsys):
    "A copy whose files have other times: the older a checkpoint, the later its files."
    run = Path(shutil.copytree(long, tmp_path / "copied"))
    for checkpoint in (run / "checkpoints").iterdir():
        for path in checkpoint.rglob("*"):
            os.utime(path, (1e9 - step_of(checkpoint), 1e9 - step_of(checkpoint)))
    capsys.readouterr()
    return run


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_latest_goes_by_the_step_and_not_by_the_times_of_files(copied):
    for way in (["latest", "--output_dir", copied], [copied]):
        assert (
            resume(*way, "--num_steps", step_of(copied / "checkpoints/checkpoint_final") + 1) == 0
        )
    assert steps(copied) == [1, 2, 3, 4, 5, 6]
    assert names(copied) == ["checkpoint_final", "checkpoint_step_5", "checkpoint_step_6"]


def test_a_resume_from_an_older_checkpoint_loses_no_newer_one(copied, capsys):
    older = copied / "checkpoints/checkpoint_step_3"
    older.rename(older.with_name("checkpoint_step_1"))
    older = older.with_name("checkpoint_step_1")
    note = read_json(older / "trainer.json")
    (older / "trainer.json").write_text(json.dumps(note | {"step": 1}))
    words = ["--num_steps", 3, "--training.keep_checkpoints", 1]
    assert resume(older, *words, "--dry_run") == 0
    said = notes(capsys)
    assert any("checkpoints after step 1: checkpoint_final, checkpoint_step_4" in x for x in said)
    assert resume(older, *words) == 0
    assert steps(copied) == [1, 2, 3]
    kept = ["checkpoint_final", "checkpoint_final_of_step_4", "checkpoint_step_3"]
    assert names(copied) == [*kept, "checkpoint_step_4"]
    assert step_of(copied / "checkpoints/checkpoint_final_of_step_4") == 4


def test_a_run_that_becomes_longer_says_how_its_learning_rate_changes(long, capsys):
    assert resume(long, "--num_steps", 8, "--dry_run") == 0
    text = capsys.readouterr().out
    assert "minutes: 4 steps of " in text and f"as measured in {long}" in text
    said = next(line for line in text.splitlines() if "rises again" in line)
    assert "from 25% of its value at step 4 to 50% at step 5" in said
    keep = said.partition("To keep it: ")[2].split()
    assert keep == "--training.lr_scheduler constant --training.learning_rate 0.00025".split()
    for other in (["--num_steps", 8, *keep], ["--num_steps", 5]):
        assert resume(long, *other, "--dry_run") == 0
        assert not any("rises" in note for note in notes(capsys))


def test_the_averages_of_a_checkpoint_are_measured_with_the_options_of_the_run(copied, capsys):
    ema = copied / "checkpoints/checkpoint_final/ema"
    few = ["--training.eval_samples", 1, "--training.eval_prompts", 1, "--trust_run_code"]
    for way in (ema, ema / "adapter_model.safetensors", ema.parent):
        assert evaluate_main("--checkpoint", way, *few) == 0
        assert "in no run's folder" not in capsys.readouterr().out
    found = [read_json(copied / f"eval_checkpoint_final{end}/eval.json") for end in ("", "_ema")]
    assert found[0]["after"]["rewards"] == found[1]["after"]["rewards"]
    assert "green" in found[1]["after"]["metrics"]
    alone = shutil.copytree(ema.parent, copied.parent / "alone")
    assert evaluate_main("--checkpoint", alone / "ema", "--model.torch_dtype", "float16") == 2
    assert "in no run's folder" in capsys.readouterr().out


def saved_by(folder, *numbers, **options):
    "Steps that are saved, with a clock that moves on by four minutes after each step."
    found = []
    with mock.patch("time.monotonic", return_value=0.0) as clock:
        callback = CheckpointCallback(folder, **options)
        for number in numbers:
            clock.return_value += 240
            ranks = SimpleNamespace(first=False, shards={})
            trainer = mock.Mock(ranks=ranks, step=number, last_step=99)
            callback.on_step_end(trainer, {}, None)
            found += [number for _ in trainer.save_checkpoint.call_args_list]
    return found


def test_checkpoints_by_the_clock_and_by_steps(tmp_path):
    numbers = range(1, 10)
    assert saved_by(tmp_path, *numbers, minutes=10) == [3, 6, 9]
    assert saved_by(tmp_path, *numbers, minutes=10, every=4) == [3, 4, 7, 8]
    assert saved_by(tmp_path, *numbers, every=4) == [4, 8]
    assert saved_by(tmp_path, *numbers) == []


@pytest.mark.parametrize("first_says", [True, False])
def test_with_sharded_weights_the_first_rank_looks_at_the_clock(tmp_path, first_says):
    ranks = SimpleNamespace(shards={"ar": 1}, first=False, gather=lambda own: [first_says, own])
    trainer = SimpleNamespace(ranks=ranks, step=1, last_step=9, save_checkpoint=mock.Mock())
    with mock.patch("time.monotonic", side_effect=[0, 0 if first_says else 99, 99]):
        callback = CheckpointCallback(tmp_path, minutes=1)
        callback.on_step_end(trainer, {}, None)
    assert trainer.save_checkpoint.called == first_says


def test_a_run_saves_by_the_clock_without_being_asked(folder):
    run = folder / "run"
    words = ["--num_steps", 4, "--output_dir", run, "--training.save_minutes", 1e-9]
    assert main(*small(folder, *words)) == 0
    found = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert found == ["checkpoint_final", *(f"checkpoint_step_{n}" for n in (2, 3, 4))]
    note = read_json(run / "checkpoints/checkpoint_step_3/trainer.json")
    assert note["step"] == 3
    assert parse_args([]).training.save_minutes == 10
