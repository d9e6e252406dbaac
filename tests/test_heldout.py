"Prompts that were trained on are never shown as held out: in files, on the page, on the console."

import re

import pytest
import yaml
from helpers import PROMPTS, counting_reward, evaluate_main, main, read_json, rewards_of, small
from helpers import without_images
from PIL import Image

from glm_grpo.data.prompts import T2IDataset, split_off
from glm_grpo.run.build import describe_data, open_data
from glm_grpo.run.config import DataConfig

pytestmark = pytest.mark.usefixtures("at_root")
AGAIN = ["--training.eval_samples", 0, "--trust_run_code"]
EVALUATED = ["--training.eval_samples", 1, "--training.max_steps", 1]


@pytest.fixture
def twenty(folder):
    "The folder of the small run, with twenty prompts and no target images."
    lines = [f"{PROMPTS[i % 3]}, number {i}" for i in range(20)]
    (folder / "prompts.txt").write_text("\n".join(lines) + "\n")
    return without_images(folder)


def run(folder, *words):
    out = folder / "run"
    assert main(*small(folder, "--output_dir", out, *EVALUATED, *words)) == 0
    return out


def test_few_prompts_are_called_training_prompts_everywhere(folder, capsys):
    out = run(folder)
    console = capsys.readouterr().out
    assert "3 training prompts" in console and "none held out" in console
    assert "held-out" not in console and " training prompts, " in console
    found = read_json(out / "eval.json")
    assert [found[name]["prompts_are_held_out"] for name in ("before", "after")] == [False] * 2
    assert "No prompts were held out" in (out / "page.html").read_text(encoding="utf-8")


def test_a_tenth_is_split_off_and_stays_when_the_run_goes_on(twenty, capsys):
    out = run(twenty)
    console = capsys.readouterr().out
    assert "18 training prompts" in console
    assert "2 held out of the same file (seed 0)" in console and "held-out prompts" in console
    first = read_json(out / "eval.json")["after"]
    assert first["prompts_are_held_out"] is True
    training, held_out = split_off(T2IDataset(twenty / "prompts.txt"))
    assert first["prompts"] == held_out.prompts and not {*training.prompts} & {*held_out.prompts}
    assert "No prompts were held out" not in (out / "page.html").read_text(encoding="utf-8")
    assert yaml.safe_load((out / "config.yaml").read_text())["data"]["eval_prompts_file"] is None
    # the order of another number of training prompts would be refused
    assert main("--resume", out, "--num_steps", 2, *AGAIN) == 0
    assert "18 training prompts" in capsys.readouterr().out
    # an evaluation with another seed must not take prompts that were trained on
    words = ["--output_dir", twenty / "other", "--training.seed", 5, "--training.eval_samples", 1]
    assert evaluate_main("--checkpoint", out, "--trust_run_code", *words) == 0
    assert read_json(twenty / "other" / "eval.json")["after"]["prompts"] == held_out.prompts
    assert "2 images of 2 held-out prompts" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["prompts.txt", "sub/../prompts.txt", "link.txt", "copy.txt"])
def test_the_training_file_named_for_evaluations_is_not_held_out(twenty, name):
    "Also as another path, through a link, or as a copy."
    (twenty / "sub").mkdir()
    (twenty / "link.txt").symlink_to("prompts.txt")
    (twenty / "copy.txt").write_bytes((twenty / "prompts.txt").read_bytes())
    files = {"prompts_file": twenty / "prompts.txt", "eval_prompts_file": twenty / name}
    data = DataConfig(**{key: str(path) for key, path in files.items()})
    training, evaluated = open_data(data, "t2i")
    assert len(training) == 20 and evaluated.trained_on
    assert "none held out" in describe_data(data, training, evaluated)


def test_evaluations_have_a_size_of_their_own(folder, capsys):
    "Training and its evaluations, `glm_grpo.evaluate`, and the memory of the dry run."
    note = "(pathlib.Path(__file__).parent / f'{images.shape[-1]}').touch()"
    (folder / "green.py").write_text(counting_reward(note, "import pathlib"))
    words = small(folder, "--data.eval_image_size", 96, "--num_steps", 1, "--output_dir")
    words += [folder / "run", "--training.eval_samples", 1]
    assert main(*words) == 0
    assert {file.name for file in folder.glob("[0-9]*")} == {"64", "96"}
    for name in ("0_0", "0_source"):  # the reward was also tried on images of no model
        assert Image.open(folder / f"run/before/{name}.png").size == (96, 96)
    result = read_json(folder / "run/eval.json")
    assert evaluate_main("--trust_run_code", "--checkpoint", folder / "run") == 0
    again = read_json(folder / "run/eval_checkpoint_final/eval.json")
    assert rewards_of(again) == rewards_of(result)
    memory = []
    for size in (96, 512):
        capsys.readouterr()
        more = ["--output_dir", folder / "new", "--data.eval_image_size", size]
        assert main(*words, "--dry_run", *more) == 0
        memory.append(re.search(r"about ([\d.]+) GB on cpu", capsys.readouterr().out)[1])
    assert float(memory[1]) > 1.5 * float(memory[0])
