"""What several test files need: small runs of the program, and what they left on disk."""

import functools
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = [
    "a cat in the middle on a red ground",
    "two dogs on a blue ground",
    "a key left of a snail on a green ground",
]

# A reward. Tests that make it fail put something before its `return`.
GREEN = """\
def green(images):
    others = images[:, [0, 2]].mean((1, 2, 3))
    return images[:, 1].mean((1, 2)) - others
"""


@functools.cache
def small_model():
    """The folder of the tiny model with one layer instead of four and one block instead of five:
    faster. Made once in a session; SMALL_MODEL names it for other processes."""
    if "SMALL_MODEL" not in os.environ:
        from glm_grpo.model.loading import load_pipeline, quiet

        folder = Path(tempfile.mkdtemp(), "small-glm-image")
        shutil.copytree(ROOT / "data/tiny-glm-image", folder)
        pipe = load_pipeline(folder)
        ar, dit = pipe.vision_language_encoder, pipe.transformer
        language_model = ar.model.language_model
        language_model.layers = language_model.layers[:1]
        ar.config.text_config.num_hidden_layers = 1
        dit.transformer_blocks = dit.transformer_blocks[:1]
        dit.register_to_config(num_layers=1)
        with quiet():  # a test may read what is printed meanwhile
            ar.save_pretrained(folder / "vision_language_encoder")
            dit.save_pretrained(folder / "transformer")
        os.environ["SMALL_MODEL"] = str(folder)
    return os.environ["SMALL_MODEL"]


def main(*words):
    "`python -m glm_grpo.train` in this process -> exit status."
    from glm_grpo.train import main

    return main([str(word) for word in words])


def resume(*words):
    """The same with --resume and these words. The runs of the tests name a reward of their own, and
    a resumed run calls it only after --trust_run_code."""
    return main("--resume", *words, "--trust_run_code")


def evaluate_main(*words):
    "`python -m glm_grpo.evaluate` in this process -> exit status."
    from glm_grpo.evaluate import main

    return main([str(word) for word in words])


def make_folder(folder):
    "Prompts with sources and targets, and a reward that can score any image."
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    (folder / "green.py").write_text(GREEN)
    numbers = range(len(PROMPTS))
    write_images(folder / "source_images", [(200, 40 * i, 60) for i in numbers])
    write_images(folder / "target_images", [(40 * i, 90, 60) for i in numbers])
    return folder


def without_images(folder):
    "The same folder for prompts of any number and text."
    for name in ("source_images", "target_images"):
        shutil.rmtree(folder / name)
    return folder


def small(folder, *words, mode=None):
    """Options of the smallest run: one prompt, two images of 64 pixels. It is hot: otherwise both
    images would be the same and teach nothing. Where the folder has source images they are edited:
    an edit has no preview, so sampling takes 4 steps and not 260."""
    options = {
        "--mode": mode or ("i2i" if (folder / "source_images").exists() else "t2i"),
        "--model.name": small_model(),
        "--data.prompts_file": folder / "prompts.txt",
        "--data.image_size": 64,
        "--training.batch_size": 1,
        "--reward.grpo.group_size": 2,
        "--rollout.num_inference_steps": 1,
        "--rollout.guidance_scale": 1,
        "--rollout.temperature": 3,
        "--rollout.top_p": 1,
        "--reward.functions": f"{folder}/green.py:green",
        "--training.eval_samples": 0,
        "--training.sample_interval": 0,
    }
    return [str(word) for pair in options.items() for word in pair] + [str(w) for w in words]


def write_images(folder, colours):
    "0.png, 1.png... of 64 pixels, each of one colour."
    folder.mkdir()
    for i, colour in enumerate(colours):
        Image.new("RGB", (64, 64), colour).save(folder / f"{i}.png")


def counting_reward(statement, imports=""):
    "The reward GREEN, with a statement that may look at `calls`, the number of calls so far."
    body = GREEN.replace("    return", f"    calls.append(1)\n    {statement}\n    return")
    return f"{imports}\ncalls = []\n{body}"


def files(top):
    "All files, without Python's own next to a user's reward.py."
    found = [path for path in top.rglob("*") if path.is_file()]
    return sorted(path for path in found if path.parent.name != "__pycache__")


def contents(top):
    return {path: path.read_bytes() for path in files(top)}


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def steps(run):
    "The steps of metrics.jsonl."
    return [line["step"] for line in read_jsonl(run / "metrics.jsonl")]


def step_of(checkpoint):
    return read_json(checkpoint / "trainer.json")["step"]


def without_seconds(run):
    "The lines of metrics.jsonl, without what differs from run to run. Each number has a legend."
    from glm_grpo.training.metrics import LEGEND, legend_key

    measured = ("seconds", "memory")
    lines = read_jsonl(run / "metrics.jsonl")
    assert {legend_key(name) for line in lines for name in line} <= {*LEGEND}, "05_metrics"
    return [{k: v for k, v in line.items() if not k.startswith(measured)} for line in lines]


def rewards_of(result):
    "eval.json -> before, after -> rewards."
    return {name: part["rewards"] for name, part in result.items()}


def load_weights(checkpoint):
    "Relative path -> tensors, for all safetensors files of a checkpoint."
    paths = sorted(checkpoint.rglob("*.safetensors"))
    return {str(path.relative_to(checkpoint)): load_file(path) for path in paths}


def same_tensors(a, b):
    "Whether two dictionaries of tensors are equal bit for bit."
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def coarse_compile(call, **options):
    "In place of torch.compile, which takes seconds: the same results, rounded to a tenth."
    return lambda *args, **kwargs: [part.round(decimals=1) for part in call(*args, **kwargs)]


def told(capsys):
    "The last line on stderr."
    return capsys.readouterr().err.strip().splitlines()[-1]


def pretend_installed(monkeypatch, package, installed):
    "Let `importlib.util.find_spec` say that a package is there, or that it is not."
    find = importlib.util.find_spec

    def pretend(name, *args):
        if name == package:
            return True if installed else None
        return find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", pretend)
