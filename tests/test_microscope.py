"The page of a run's decisions: its numbers against the trainer's own, and what it holds."

import base64
import hashlib
import json
import re
import shutil

import numpy as np
import pytest
from helpers import read_jsonl

from glm_grpo.run.microscope import (
    KINDS,
    SavedStep,
    policy_facts,
    read_decisions,
    write_microscope,
)
from glm_grpo.toy import ToyStudio, icon_images, nearness
from glm_grpo.training.callbacks import JsonlLogger, RolloutTable
from glm_grpo.training.trainer import MinimalGRPOTrainer

PROMPTS = ["a red heart", "a blue cross", "a black ring"]


def train(folder, saved, **changes):
    "Two steps of both toy policies -> their weights."
    batch = {"prompts": PROMPTS, "target_images": icon_images(PROMPTS)}
    options = {"group_size": 4, "images_per_sample": 2, "learning_rate": 0.3} | changes
    callbacks = [JsonlLogger(folder / "metrics.jsonl")]
    if saved:
        callbacks.append(RolloutTable(folder / "rollouts", every=2))
    toy = ToyStudio(PROMPTS)
    trainer = MinimalGRPOTrainer(toy, [batch], nearness, callbacks=callbacks, **options)
    trainer.train(2)
    return [weight.detach().numpy() for weight in toy.weights()]


def numbers(run):
    "metrics.jsonl without times."
    lines = read_jsonl(run / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not re.match("seconds|memory", k)} for line in lines]


def unpack(table):
    values = np.frombuffer(base64.b64decode(table["data"]), KINDS[table["kind"]])
    return values.reshape(table["shape"])


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(folder, saved=True)
    return folder


@pytest.fixture
def toy_run(saved_run, tmp_path):
    "A copy of a saved run, to break."
    return shutil.copytree(saved_run, tmp_path / "run")


CASES = [("grpo", 1, 1), *((name, 3, 2) for name in ("grpo", "sapo", "dppo"))]


@pytest.mark.parametrize("loss_type, updates, batches", CASES)
def test_the_numbers_are_the_trainers_and_training_is_the_same(
    tmp_path, loss_type, updates, batches
):
    options = {"loss_type": loss_type, "updates_per_rollout": updates, "mini_batches": batches}
    (tmp_path / "plain").mkdir()
    weights = train(tmp_path / "plain", saved=False, **options)
    for one, other in zip(train(tmp_path, saved=True, **options), weights):
        assert np.array_equal(one, other)
    lines = numbers(tmp_path)
    assert lines == numbers(tmp_path / "plain")
    shown = read_decisions(tmp_path, prompts=9)
    assert [step["step"] for step in shown["steps"]] == [1, 2]
    for step, line in zip(shown["steps"], lines):
        for name, facts in step["policies"].items():
            assert facts["updates"] == updates * batches
            assert facts["ratio"] == pytest.approx(line[f"{name}/ratio_mean"], abs=1e-5)
            assert facts["clipped"] == pytest.approx(line[f"{name}/clip_fraction"], abs=1e-6)
            assert facts["ratio_mean"] == line[f"{name}/ratio_mean"]
            tables = [prompt["policies"][name] for prompt in step["prompts"]]
            total = sum(
                np.abs(
                    np.broadcast_to(gradient, (len(gradient), table["samples"], facts["decisions"]))
                )
                for table in tables
                for gradient in [np.nan_to_num(unpack(table["gradient"]))]
            )
            assert total.sum((1, 2)) == pytest.approx(facts["weight"], rel=1e-4)


def test_decisions_of_several_ranks_are_read_together(tmp_path):
    train(tmp_path, saved=True, updates_per_rollout=2)
    alone = read_decisions(tmp_path)["steps"][1]
    table, folder = tmp_path / "rollouts/step_000002.jsonl", tmp_path / "rollouts/step_000002"
    rows = read_jsonl(table)
    rows += [row | {"rank": 1} for row in rows]
    table.write_text("\n".join(map(json.dumps, rows)))
    shutil.copy(folder / "0.safetensors", folder / "1.safetensors")
    both = read_decisions(tmp_path)["steps"][1]
    for name, facts in alone["policies"].items():
        assert both["policies"][name]["ratio"] == pytest.approx(facts["ratio"])
        twice = [2 * weight for weight in facts["weight"]]
        assert both["policies"][name]["weight"] == pytest.approx(twice)
    (folder / "0_000.png").unlink()  # its prompt is left out, and the run's end does not fail
    assert len(read_decisions(tmp_path, prompts=9)["steps"][1]["prompts"]) == 4


@pytest.mark.parametrize(
    "name", ["step_000001/0.safetensors", "step_000001/0_000.png", "step_000001.jsonl"]
)
def test_a_step_with_a_broken_file_is_left_out_with_a_note(toy_run, capsys, name):
    path = toy_run / "rollouts" / name
    data = path.read_bytes()
    path.write_bytes(data[: int(0.6 * len(data))] + b"junk")
    shown = write_microscope(toy_run / "page.html", toy_run, prompts=9)
    assert [step["step"] for step in shown["steps"]] == [2]
    (note,) = capsys.readouterr().out.splitlines()
    assert str(path) in note and "leaves this step out" in note


def test_a_table_that_lost_rows_is_left_out(toy_run, capsys):
    path = toy_run / "rollouts/step_000002.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert [step["step"] for step in read_decisions(toy_run)["steps"]] == [1]
    assert str(path) in capsys.readouterr().out


def test_of_pairs_the_better_images_are_those_of_higher_reward(toy_run):
    step = SavedStep(toy_run / "rollouts/step_000001.jsonl")
    arrays = step.arrays[0]["dit"]
    before = policy_facts(step, "dit", {})
    signs = np.where(np.arange(arrays["old"].shape[1]) % 2, -1.0, 1.0)
    arrays["advantages"] = np.broadcast_to(signs, arrays["old"].shape)
    after = policy_facts(step, "dit", {})
    assert not before["pairs"] and after["pairs"]
    assert after["better"] == pytest.approx(before["better"])
    assert after["worse"] == pytest.approx(before["worse"])


def test_the_page_runs_its_own_script_only(tmp_path):
    "Whatever a prompt holds, and with nothing from elsewhere."
    train(tmp_path, saved=True)
    table = tmp_path / "rollouts/step_000002.jsonl"
    nasty = "</script><script>alert(1)</script><!--"
    rows = [row | {"prompt": nasty} for row in read_jsonl(table)]
    table.write_text("\n".join(map(json.dumps, rows)))
    shown = write_microscope(tmp_path / "page.html", tmp_path)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert nasty not in text and text.count("<script") == 2 and "://" not in text
    (data,) = re.findall('id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data) == shown
    assert shown["steps"][1]["prompts"][0]["prompt"] == nasty
    for tag in ("script", "style"):
        (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in text
