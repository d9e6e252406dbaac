"Prompts that were trained on are never shown as held out: in files, on the page, on the console."

import json
import re

import pytest
import yaml
from helpers import PROMPTS, counting_reward, evaluate_main, main, read_json, rewards_of, small
from helpers import without_images, write_images
from PIL import Image

from glm_grpo.data.prompts import I2IDataset, split_off
from glm_grpo.run.build import describe_data, open_data
from glm_grpo.run.config import DataConfig

pytestmark = pytest.mark.usefixtures("at_root")
AGAIN = ["--training.eval_samples", 0, "--trust_run_code"]
EVALUATED = ["--training.eval_samples", 1, "--training.max_steps", 1]


@pytest.fixture
def twenty(folder):
    "The folder of the small run, with twenty edits and no target images."
    lines = [f"{PROMPTS[i % 3]}, number {i}" for i in range(20)]
    (folder / "prompts.txt").write_text("\n".join(lines) + "\n")
    write_images(without_images(folder) / "source_images", [(200, 9 * i, 60) for i in range(20)])
    return folder


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
    training, held_out = split_off(I2IDataset(twenty / "prompts.txt", twenty / "source_images"))
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


def test_evaluations_leave_out_nothing(folder):
    "Whatever is left out or in 8 bits in steps of training that are not scored."
    words = ["--training.eval_samples", 1, "--num_steps", 1]
    words += ["--rollout.num_inference_steps", 2, "--rollout.guidance_scale", 2]
    faster = ["--rollout.guided_share", 0.5, "--rollout.float8", "true"]
    evaluated, trained = [], []
    for more in ([], faster):
        out = folder / f"{len(more)}"
        assert main(*small(folder, "--output_dir", out, *words, *more)) == 0
        evaluated.append(read_json(out / "eval.json")["before"]["rewards"])
        trained.append(read_json(out / "metrics.jsonl")["image/brightness"])
    assert evaluated[0] == evaluated[1] and trained[0] != trained[1]
    # on a GPU with less memory
    words = ["--checkpoint", out, "--model.offload", "true", "--trust_run_code"]
    assert evaluate_main(*words, "--output_dir", folder / "again") == 0


def test_what_the_noise_of_training_costs_is_told_at_the_start(folder, capsys):
    "Where denoising steps are decisions; two images of each prompt show how much they differ."
    words = ["--model.component", "dit", "--rollout.num_inference_steps", 2, "--num_steps", 2]
    words += ["--training.eval_samples", 2, "--rollout.noise_level", 0.5]
    assert main(*small(folder, "--output_dir", folder / "run", *words)) == 0
    printed = capsys.readouterr().out
    assert printed.count("noise_level 0.5: reward") == 1
    assert printed.index("noise_level 0.5") < printed.index("step 2/2")
    first = read_json(folder / "run/eval.json")["before"]
    assert f"reward {first['reward_mean']:.3f} -> " in printed  # the same images without noise


def test_a_second_wording_is_measured_and_judged_by_the_prompt(folder, capsys):
    lines = []
    for i, prompt in enumerate(PROMPTS):
        source = f"source_images/{i}.png"
        lines.append({"prompt": prompt, "paraphrase": f"paint {prompt}", "source": source})
    heldout = folder / "heldout.jsonl"
    heldout.write_text("\n".join(map(json.dumps, lines)) + "\n")
    seen = "open(__file__ + '.seen', 'a').writelines(p + '\\n' for p in prompts)"
    (folder / "green.py").write_text(
        f"def green(images, prompts):\n    {seen}\n    return images[:, 1].mean((1, 2))\n"
    )
    words = ["--data.eval_prompts_file", heldout, *EVALUATED]
    run = small(folder, "--output_dir", folder / "run", *words)
    long = lines[0] | {"paraphrase": "fish " * 5000}
    (folder / "long.jsonl").write_text(json.dumps(long) + "\n")
    assert main(*run, "--data.eval_prompts_file", folder / "long.jsonl") == 2
    assert "long.jsonl, line 1: with its image this prompt needs" in capsys.readouterr().err
    assert main(*run) == 0
    assert "in other words" in capsys.readouterr().out
    assert "paint" not in (folder / "green.py.seen").read_text()
    after = read_json(folder / "run/eval.json")["after"]
    same, other = after["rewards"], after["values"]["paraphrase"]
    assert all(a != b for a, b in zip(same, other))  # other words, other images
    gain = sum(b[0] - a[0] for a, b in zip(same, other)) / len(PROMPTS)
    assert after["paraphrase"]["difference"] == pytest.approx(gain, abs=1e-6)
    assert after["metrics"]["paraphrase"] == pytest.approx(after["reward_mean"] + gain, abs=1e-6)
    assert "paraphrase" in (folder / "run/page.html").read_text(encoding="utf-8")
    heldout.write_text(heldout.read_text() + json.dumps(lines[0] | {"paraphrase": ""}) + "\n")
    assert main(*small(folder, "--output_dir", folder / "two", *words)) == 2
    assert "line 4: no text in 'paraphrase'" in capsys.readouterr().err
