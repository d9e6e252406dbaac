"""Broken files in a checkpoint, a run or a model: one UserError with file and fix."""

import copy
import json
import shutil

import pytest
import torch
from helpers import ROOT, main, make_folder, small, told
from safetensors.torch import load_file, save, save_file

from glm_grpo import GLMImageWrapper
from glm_grpo.data.basics import refusal
from glm_grpo.data.loader import make_dataloader
from glm_grpo.model.adapters import read_adapter
from glm_grpo.model.loading import check_model_folder
from glm_grpo.run.train import read_metrics
from glm_grpo.run.evaluation import PeriodicEvaluation
from glm_grpo.training.callbacks import JsonlLogger
from glm_grpo.toy import ICONS, ToyPainter, icon_images, nearness
from glm_grpo.training.checkpoints import read_note
from glm_grpo.training.trainer import MinimalGRPOTrainer

TINY = ROOT / "data/tiny-glm-image"
SETTINGS = (
    "vae/config.json",
    "processor/processor_config.json",
    "scheduler/scheduler_config.json",
    "vision_language_encoder/generation_config.json",
)
NAMES = list(ICONS)[:3]


def toy_trainer():
    items = []
    for i, (prompt, target) in enumerate(zip(NAMES, icon_images(NAMES))):
        items.append({"prompt": prompt, "target": target, "index": i, "metadata": {}})
    return MinimalGRPOTrainer(
        ToyPainter(NAMES),
        make_dataloader(items, 2),
        nearness,
        learning_rate=0.3,
        ema_decay=0.9,
        callbacks=(),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    trainer = toy_trainer()
    trainer.train(2)
    trainer.save_checkpoint(path)
    return path


@pytest.fixture
def checkpoint(whole, tmp_path):
    "A copy to break."
    return shutil.copytree(whole, tmp_path / "checkpoint_step_2")


def refused(checkpoint):
    "What loading says; nothing has changed."
    trainer = toy_trainer()
    before = trainer.policies["ar"].table.detach().clone()
    message = refusal(trainer.load_checkpoint, checkpoint)
    assert torch.equal(trainer.policies["ar"].table, before)
    assert trainer.step == 0 and not trainer.optimizer.adamw.state
    assert trainer.train_dataloader.state_dict()["batches"] == 0
    assert "\n" not in message and "Use another" in message
    return message


def test_a_broken_note(checkpoint):
    file = checkpoint / "trainer.json"
    note = json.loads(file.read_text())
    contents = [b"", b"{", b"\xff\x00", b"[1]", b"[" * 99999]
    for key, value in [
        *[("step", "2"), ("bad_steps", "none"), ("options", None), ("made_by", None)],
        *[("data", "two"), ("data", {}), ("data", note["data"] | {"batches": None})],
        *[("step", True), ("step", -1), ("bad_steps", 0.5), ("data", [1]), ("written", "now")],
        *[("made_by", note["made_by"] | {"trains": t}) for t in (3, "LoRA x", "LoRA [1]")],
        *[("made_by", note["made_by"] | {"lora": lora}) for lora in (3, "rank 16", [1])],
        ("data", note["data"] | {"batches": -1}),
    ]:
        contents.append(json.dumps({**note, key: value}).encode())
    contents.append(json.dumps({k: v for k, v in note.items() if k != "step"}).encode())
    for content in contents:
        file.write_bytes(content)
        assert "trainer.json: " in refused(checkpoint), content


@pytest.mark.parametrize(
    ("trains", "lora"), [("all weights", None), ('LoRA {"rank": 4}', {"rank": 4})]
)
def test_a_note_of_an_older_version_is_read(checkpoint, trains, lora):
    "It wrote the adapter's options as text."
    file = checkpoint / "trainer.json"
    note = json.loads(file.read_text())
    del note["made_by"]["lora"]
    note["made_by"]["trains"] = trains
    file.write_text(json.dumps(note))
    made_by = read_note(checkpoint)["made_by"]
    assert made_by["lora"] == lora and "trains" not in made_by
    trainer = toy_trainer()
    if lora:
        assert "lora True, not False" in refusal(trainer.load_checkpoint, checkpoint)
        return
    trainer.load_checkpoint(checkpoint)  # the toy has no adapter: it goes on
    assert trainer.step == note["step"] > 0


def test_a_broken_optimizer(checkpoint):
    file = checkpoint / "state/optimizer.pt"
    state = torch.load(file, weights_only=True)
    nan, small_one = copy.deepcopy(state), copy.deepcopy(state)
    nan["state"][0]["exp_avg_sq"][0] = torch.nan
    small_one["state"][0]["exp_avg"] = torch.ones(2)
    for content in (
        *([1], {}, {"state": {}, "param_groups": []}, nan, small_one),
        state | {"param_groups": state["param_groups"] * 2},
        state | {"state": {9: {}}},
    ):
        torch.save(content, file)
        assert "optimizer.pt: no complete checkpoint" in refused(checkpoint)
    for content in (b"", b"x", b"\x80\x02cos\nsystem\n."):
        file.write_bytes(content)
        assert "optimizer.pt: no complete checkpoint" in refused(checkpoint)


def test_a_broken_moving_average(checkpoint):
    file = checkpoint / "state/ema.pt"
    state = torch.load(file, weights_only=True)
    nan = [torch.full_like(state["shadow_params"][0], torch.nan)]
    for changes in (
        {"optimization_step": None},
        {"shadow_params": [torch.ones(2)]},
        {"shadow_params": nan},
    ):
        torch.save(state | changes, file)
        assert "ema.pt: no complete checkpoint" in refused(checkpoint)


# adapters


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter") / "ar"
    model = GLMImageWrapper(TINY, "ar", lora={"rank": 2}, device="cpu")
    model.save_pretrained(path)
    return model, path


def test_a_broken_adapter_is_named_and_changes_nothing(adapter, tmp_path):
    model, path = adapter
    before = [p.detach().clone() for p in model.get_trainable_parameters()]
    tensors = load_file(path / "adapter_model.safetensors")
    first = next(iter(tensors))
    nan = tensors | {first: tensors[first] * torch.nan}
    config = json.loads((path / "adapter_config.json").read_text())
    for name, content, words in (
        ("adapter_model.safetensors", save(nan), "contains NaN or infinity"),
        ("adapter_model.safetensors", save({}), "tensors do not match adapter_config.json"),
        ("adapter_model.safetensors", b"x", "the adapter does not load (SafetensorError"),
        ("adapter_config.json", b"\xff", "the adapter does not load (UnicodeDecodeError"),
        ("adapter_config.json", json.dumps(config | {"r": "two"}).encode(), "(ValueError"),
        ("adapter_config.json", json.dumps(config | {"lora_alpha": None}).encode(), "(TypeError"),
        ("adapter_config.json", json.dumps(config | {"target_modules": 7}).encode(), "(TypeError"),
    ):
        broken = shutil.copytree(path, tmp_path / "broken", dirs_exist_ok=True)
        (broken / name).write_bytes(content)
        message = refusal(model.load_adapter, broken)
        assert words in message and str(broken) in message
        assert "\n" not in message
        shutil.rmtree(broken)
    assert all(map(torch.equal, before, model.get_trainable_parameters()))
    assert read_adapter(path)[0]["rank"] == 2


def test_full_weights_that_are_not_finite_are_refused(tmp_path):
    model = GLMImageWrapper(TINY, "ar", device="cpu")
    model.save_pretrained(tmp_path / "full")
    file = tmp_path / "full/model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] * torch.inf}, file, {"format": "pt"})
    assert "contains NaN or infinity" in refusal(model.load_adapter, tmp_path / "full")
    file.write_bytes(b"x")
    assert "the weights do not load" in refusal(model.load_adapter, tmp_path / "full")


# the files of a run


def test_a_broken_log_is_named(tmp_path):
    log = tmp_path / "metrics.jsonl"
    for content, line in (
        (b"\xff\xfe\x00", 1),
        (b'{"step": 1}\n[2]\n', 2),
        (b'{"step": 1}\n{"step": 2, "kl": [0.5]}\n', 2),
    ):
        log.write_bytes(content)
        assert f"metrics.jsonl, line {line}: " in refusal(read_metrics, log)


def test_the_log_of_a_run_takes_out_lines_without_a_step(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(
        b'{"step": 1, "loss": 0.5}\n[2]\n{"step": "2"}\n{"step": 1, "loss": "low"}\n{"step": 2'
    )
    trainer = toy_trainer()
    trainer.step, trainer.callbacks = 1, [JsonlLogger(log)]
    trainer.train(1)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2]
    log.write_bytes(b"\xff\xfe")
    assert "metrics.jsonl, line 1: not UTF-8" in refusal(trainer.train, 1)
    assert log.read_bytes() == b"\xff\xfe"


def test_a_broken_history_is_named(tmp_path):
    history = tmp_path / "eval_history.jsonl"
    line = {"step": 1, "reward_mean": 0.5, "prompts": ["a"], "seeds": [0], "rewards": [[0.5]]}
    history.write_text(json.dumps(line))
    (one,) = PeriodicEvaluation(history, dict).history
    assert {"step": one.step, **one.record()}.items() >= line.items()
    wrong = [{"rewards": 1}, {"rewards": [["x"]]}, {"metrics": [1]}, {"metrics": {"mse": "low"}}]
    wrong += [{"values": {"mse": [None]}}, {"standard_error": {}}, {"requests": [0, 1]}]
    for content in (
        *(b"\xff\xfe", b"{\n", b'{"step": null, "reward_mean": 0.5}\n'),
        *(json.dumps(line | changes).encode() for changes in wrong),
    ):
        history.write_bytes(content)
        assert "eval_history.jsonl, line 1: " in refusal(PeriodicEvaluation, history, dict)


# the program


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A run of one step."
    folder = make_folder(tmp_path_factory.mktemp("run"))
    options = small(folder, "--model.name", TINY, "--output_dir", folder / "run")
    assert main(*options, "--num_steps", 1) == 0
    return folder


def test_the_program_tells_of_a_broken_checkpoint(run, tmp_path, capsys):
    shutil.copytree(run / "run", tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/checkpoint_final"
    options = small(run, "--model.name", TINY, "--output_dir", tmp_path / "run")
    for name in ("trainer.json", "state/optimizer.pt", "adapter_model.safetensors"):
        whole = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(b"[]")
        assert main(*options, "--num_steps", 2, "--resume", checkpoint) == 2
        message = told(capsys)
        assert str(checkpoint) in message and "another" in message
        (checkpoint / name).write_bytes(whole)
    note = json.loads((checkpoint / "trainer.json").read_text())
    for changes in ({"data": [1]}, {"made_by": note["made_by"] | {"trains": "LoRA x"}}):
        (checkpoint / "trainer.json").write_text(json.dumps(note | changes))
        for found in (checkpoint, "latest"):  # one that cannot be read is not skipped
            assert main(*options, "--num_steps", 2, "--resume", found, "--dry_run") == 2
            assert "trainer.json: no complete checkpoint" in told(capsys)


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ("vision_language_encoder", "{"),
        ("transformer", ""),
        ("vae", "[]"),
        ("text_encoder", "null"),
    ],
)
def test_the_dry_run_tells_of_broken_settings(folder, tmp_path, capsys, part, content):
    model = shutil.copytree(TINY, tmp_path / "model")
    (model / part / "config.json").write_text(content)
    assert main(*small(folder, "--model.name", model, "--dry_run")) == 2
    message = told(capsys)
    assert f"{part}/config.json: " in message and "Download the model again" in message


def test_other_settings_of_a_model_are_read_first(tmp_path):
    for i, file in enumerate(SETTINGS):
        model = shutil.copytree(TINY, tmp_path / str(i))
        (model / file).write_bytes(b"\xff\xfe")
        assert f"{file}: not a valid JSON object" in refusal(check_model_folder, model)
