"""What goes wrong in the middle of a run is told once, with what to do; nothing that was learnt is
lost, nothing half-written stays."""

import errno
import json
import os
import shutil
import subprocess

import pytest
import torch
from helpers import PROMPTS, counting_reward, evaluate_main, files, main, pretend_installed
from helpers import read_jsonl, resume, same_tensors, small, step_of, steps, told, without_images
from helpers import write_images
from PIL import Image
from ranks import in_a_process
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from glm_grpo.data import basics
from glm_grpo.model.policies import ARPolicy

pytestmark = pytest.mark.usefixtures("at_root")


def loads(checkpoint):
    "Read every file of a checkpoint -> its step."
    for f in checkpoint.rglob("*"):
        if f.suffix == ".safetensors":
            load_file(f)
        if f.suffix == ".pt":
            torch.load(f, weights_only=True)
    return step_of(checkpoint)


def check_said(message, *parts):
    for part in parts:
        assert part in message


# 3e38 - -3e38 is more than float32 can hold, so the advantages are not finite
TOO_LARGE = """\
import torch
calls = []
def green(images):
    calls.append(1)
    if len(calls) > 3:
        return torch.tensor([3e38, -3e38] * len(images))[:len(images)]
    return images[:, 1].mean((1, 2))
"""


def test_steps_without_finite_numbers_end_the_run_with_the_rollout_on_disk(folder, capsys):
    (folder / "green.py").write_text(TOO_LARGE)
    run, failed = folder / "run", folder / "run/failed_step"
    words = ["--num_steps", 50, "--reward.grpo.scale", "none", "--training.save_interval", 1]
    assert main(*small(folder, *words, "--output_dir", run)) == 2
    message = told(capsys)
    check_said(message, "not finite 3 times in a row", "Lower the learning rate")
    check_said(message, str(failed), "checkpoint_interrupt")
    assert set((failed / "prompts.txt").read_text().splitlines()) < set(map(repr, PROMPTS))
    assert [Image.open(failed / f"00{i}.png").size for i in (0, 1)] == [(64, 64)] * 2
    saved = load_file(failed / "rollout.safetensors")
    assert {"token_ids", "image_tensors", "ar/advantages"} < set(saved)
    assert torch.allclose(saved["rewards"], torch.tensor([3e38, -3e38]))
    good = load_file(run / "checkpoints/checkpoint_step_2/adapter_model.safetensors")
    stopped = load_file(run / "checkpoints/checkpoint_interrupt/adapter_model.safetensors")
    assert steps(run) == [1, 2, 3, 4] and same_tensors(good, stopped)
    skipped = [line["skipped"] for line in read_jsonl(run / "metrics.jsonl")]
    assert skipped == [0, 1, 1, 1]


BAD = """\
calls = []
def bad(images):
    calls.append(1)
    return [float("{value}") if len(calls) > 3 else 1.0] * len(images)
"""


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_reward_that_is_no_number_is_named(folder, capsys, value):
    """One part of two: a NaN of a part means nothing to score, so both must say so before it is a
    mistake."""
    (folder / "bad.py").write_text(BAD.format(value=value))
    run, bad = folder / "run", f"{folder}/bad.py:bad"
    functions = bad if value == "nan" else f"[{folder}/green.py:green,{bad}]"
    words = ["--num_steps", 5, "--output_dir", run, "--reward.functions", functions]
    assert main(*small(folder, *words)) == 2
    message = told(capsys)
    check_said(message, "reward bad", "checkpoint_interrupt")
    assert "nothing to score" in message or value in message
    assert steps(run) == [1]
    assert loads(run / "checkpoints/checkpoint_interrupt") == 1


def fill_disk(monkeypatch, fails):
    "Writing a path for which `fails` is true finds no space."
    sync = basics._sync

    def full(path):
        if fails(str(path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return sync(path)

    monkeypatch.setattr(basics, "_sync", full)


def test_a_disk_that_is_full_from_the_second_checkpoint_on(folder, capsys):
    run = folder / "run"
    first = run / "checkpoints/checkpoint_step_1"
    words = ["--num_steps", 5, "--training.save_interval", 1, "--output_dir", run]
    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch, lambda path: "checkpoint_" in path and "checkpoint_step_1." not in path)
        assert main(*small(folder, *words)) == 2
    message = told(capsys)
    check_said(message, "checkpoint_step_2: the checkpoint cannot be written")
    check_said(message, "No space left", f"--resume {first}")
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["checkpoint_step_1"]
    assert loads(first) == 1
    assert resume("latest", "--output_dir", run, "--num_steps", 2) == 0
    assert steps(run) == [1, 2]


@pytest.fixture
def small_disk(folder):
    "A file system of 2 MB; mounting one takes root."
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_really_is_full(folder, small_disk, capsys):
    run = small_disk / "run"
    words = ["--num_steps", 50, "--training.save_interval", 1]
    words += ["--training.keep_checkpoints", "null", "--output_dir", run]
    assert main(*small(folder, *words)) == 2
    message = told(capsys)
    check_said(message, "o space left", "disk is full")
    check_said(message, f"--resume {run}/checkpoints/checkpoint_step_")
    there = sorted((run / "checkpoints").iterdir())
    assert there
    assert all(loads(checkpoint) for checkpoint in there)
    hidden = [p for p in files(small_disk) if p.name.startswith(".")]
    assert not hidden + [p for p in files(small_disk) if p.parent.name.startswith(".")]


def test_an_image_that_breaks_while_the_run_goes_on(folder, capsys):
    """All were whole before training; the message names the one that is not, and what was learnt is
    kept."""
    run, sources = folder / "run", folder / "source_images"
    whole = {p: p.read_bytes() for p in sources.iterdir()}
    breaking = f'[p.write_bytes(p.read_bytes()[:60]) for p in pathlib.Path("{sources}").iterdir()]'
    reward = counting_reward(f"len(calls) == 4 and {breaking}", "import pathlib")
    (folder / "green.py").write_text(reward)
    assert main(*small(folder, "--num_steps", 4, "--output_dir", run)) == 2
    message = told(capsys)
    check_said(message, "a broken image", str(sources), "2 steps are saved")
    assert steps(run) == [1, 2]
    for p, content in whole.items():
        p.write_bytes(content)
    assert resume("latest", "--output_dir", run) == 0
    assert steps(run) == [1, 2, 3, 4]


LONG_PROMPT = "a cat in the middle on a red ground " * 278  # 10,000 letters
SCRIPTS = [
    "قطة في الوسط على أرضية حمراء",
    "кошка बिल्ली 猫 고양이 🐈 ȩ́ \u200b\u202e \x07",
    "a sign with the word \"UP and a 'cat",
    "“a ”b \"c\" 'd' «e» 「f」",
]
TOO_LONG_PROMPTS = ["x" * 10_000, "一只猫坐在红色的地上" * 1000]


def one_step_on(folder, prompts):
    "Train one step of edits with these prompts -> exit status."
    sources = folder / "source_images"
    shutil.rmtree(folder / "target_images")
    shutil.rmtree(sources)
    write_images(sources, ["olive"] * len(prompts))
    (folder / "prompts.txt").write_text("".join(f"{prompt.strip()}\n" for prompt in prompts))
    words = ["--training.batch_size", len(prompts), "--num_steps", 1]
    return main(*small(folder, *words, "--output_dir", folder / "run"))


@pytest.mark.parametrize("prompts", [[LONG_PROMPT], SCRIPTS], ids=["long", "scripts"])
def test_prompts_of_any_script_train(folder, prompts):
    assert one_step_on(folder, prompts) == 0
    line = json.loads((folder / "run/metrics.jsonl").read_text())
    assert line["ratio_std"] < 1e-4 and line["old_new_gap"] < 1e-3
    assert line["tokens_outside"] == 0


@pytest.mark.parametrize("prompt", TOO_LONG_PROMPTS, ids=["x", "Chinese"])
def test_prompts_that_are_too_long_are_refused(folder, capsys, prompt):
    """The tiny model has 4,096 positions and few words, so that long prompts in unknown scripts do
    not fit; the real one has 131,072."""
    assert one_step_on(folder, [PROMPTS[0], prompt]) == 2
    check_said(told(capsys), "prompts.txt, line 2: ", "Shorten the prompt")
    assert not (folder / "run").exists()


@pytest.mark.parametrize("name", ["logs", "samples"])
def test_a_file_where_the_curves_must_go_is_told_at_once(folder, capsys, name):
    run = folder / "run"
    run.mkdir()
    (run / name).write_text("")
    assert main(*small(folder, "--num_steps", 1, "--output_dir", run)) == 2
    check_said(told(capsys), f"{name} is a file")
    assert files(run) == [run / name]


@pytest.mark.parametrize("updates, saved", [(1, "checkpoint_interrupt"), (2, "checkpoint_step_1")])
def test_out_of_memory_is_told_with_what_to_lower(folder, capsys, monkeypatch, updates, saved):
    """In the last update of the second step. In the middle of a step's updates there is no state
    worth keeping: the older checkpoint is named."""
    calls, score = [], ARPolicy.score

    def tight(self, samples):
        calls.append(1)
        if len(calls) == 2 * updates:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return score(self, samples)

    monkeypatch.setattr(ARPolicy, "score", tight)
    run = folder / "run"
    words = ["--num_steps", 5, "--training.save_interval", 1]
    words += ["--training.updates_per_rollout", updates, "--output_dir", run]
    assert main(*small(folder, *words)) == 2
    message = told(capsys)
    check_said(message, "Out of memory. Lower training.micro_batch_size")
    check_said(message, f"--resume {run}/checkpoints/{saved}")
    assert steps(run) == [1]
    assert all(loads(p) == 1 for p in (run / "checkpoints").iterdir())
    assert resume("latest", "--output_dir", run, "--num_steps", 2) == 0
    assert steps(run) == [1, 2]


def test_curves_go_to_wandb_without_a_network(folder, monkeypatch):
    "With evaluations, also the last one, and the rows and images of `save_rollouts` as a table."
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(folder / "data"))
    points = {}
    start = wandb.init

    def recorded(**options):
        started = start(**options)
        log = started.log

        def kept(values, step):
            points.setdefault(step, {}).update(values)
            log(values, step)

        started.log = kept
        return started

    monkeypatch.setattr(wandb, "init", recorded)
    run = folder / "run"
    words = ["--num_steps", 2, "--training.sample_interval", 1, "--training.save_rollouts", 2]
    words += ["--training.eval_samples", 1, "--training.eval_interval", 1]
    words += ["--training.trackers", "[tensorboard,wandb]", "--output_dir", run]
    assert main(*small(folder, *words)) == 0
    media = next(run.glob("wandb/offline-run-*/files/media"))
    assert list(run.glob("wandb/offline-run-*/*.wandb"))
    assert list(media.glob("images/train/*.png"))
    events = EventAccumulator(str(run / "logs"))
    events.Reload()
    history = read_jsonl(run / "eval_history.jsonl")
    curve = [(point.step, point.value) for point in events.Scalars("eval/reward_mean")]
    assert curve == [(line["step"], pytest.approx(line["reward_mean"])) for line in history]
    assert [step for step, _ in curve] == [0, 1, 2] and "eval/brightness" in events.Tags()[
        "scalars"
    ]
    assert [points[step]["eval/reward_mean"] for step in (0, 1, 2)] == [
        line["reward_mean"] for line in history
    ]
    assert list(media.glob("table/train/rollouts_2_*.json"))
    table, rows = points[2]["train/rollouts"], read_jsonl(run / "rollouts/step_000002.jsonl")
    assert table.columns == ["picture", *rows[0]] and len(rows) == 2
    for (picture, *values), row in zip(table.data, rows, strict=True):
        assert values == [*row.values()] and picture.image.size == (64, 64)


def test_a_tracker_whose_package_is_missing_is_told_before_anything(folder, capsys, monkeypatch):
    pretend_installed(monkeypatch, "wandb", False)
    words = ["--training.trackers", "wandb", "--output_dir", folder / "run"]
    assert main(*small(folder, *words)) == 2
    check_said(told(capsys), "training.trackers wandb", "with pip")
    assert not (folder / "run").exists()


@pytest.mark.parametrize("dry", [[], ["--dry_run"]])
def test_wandb_without_a_key_is_told_before_anything_is_loaded(folder, tmp_path_factory, dry):
    pytest.importorskip("wandb", reason="pip install wandb")
    words = small(folder, *dry, "--num_steps", 1, "--training.trackers", "[tensorboard,wandb]")
    words += ["--output_dir", folder / "run"]
    none = dict.fromkeys(name for name in os.environ if "WANDB" in name)
    none |= {"HOME": folder, "WANDB_MODE": None, "WANDB_API_KEY": None}
    logs = tmp_path_factory.mktemp("logs")
    status, said = in_a_process(logs, main, *words, **none)
    assert status == 2 and "loading" not in said
    check_said(said.strip().splitlines()[-1], "training.trackers wandb", "`wandb login`")
    assert not (folder / "run").exists()
    for name, value in {"WANDB_MODE": "offline", "WANDB_API_KEY": "a" * 40}.items():
        if dry:
            assert in_a_process(logs, main, *words, **none | {name: value})[0] == 0, name


def test_a_held_out_prompt_that_is_too_long_is_refused(folder, capsys):
    held = folder / "held/prompts.txt"
    held.parent.mkdir()
    held.write_text("a cat\n" + "x" * 10_000 + "\n")
    words = ["--data.eval_prompts_file", held, "--output_dir", folder / "run"]
    assert main(*small(folder, *words, mode="t2i")) == 2
    check_said(told(capsys), "held/prompts.txt, line 2: ")
    assert not (folder / "run").exists()


def test_evaluate_refuses_a_prompt_that_is_too_long(folder, capsys):
    (folder / "prompts.txt").write_text("a cat\n" + "x" * 10_000 + "\n")
    assert evaluate_main(*small(without_images(folder), "--output_dir", folder / "out")) == 2
    check_said(told(capsys), "prompts.txt, line 2: ")
    assert not (folder / "out").exists()
