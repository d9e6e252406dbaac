"""The files in `configs/` for the published model: memory and images of a training step, in
6_run/10_plan, in the README and in the comments of the files."""

import re

import pytest
from helpers import ROOT

from glm_grpo.model.memory import PUBLISHED, layout_of
from glm_grpo.run.command_line import parse_args
from glm_grpo.run.plan import GPUS, Step, count_work, estimate_memory, read_machine

REAL = sorted((ROOT / "configs").glob("real_*.yaml"))
PLAN = (ROOT / "nbs/6_run/10_plan.ipynb").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def row_of(name):
    "(machine, GB, images) of the stored table in 6_run/10_plan."
    row = rf"\| ([^|]*) \| `{name}` \|[^|]*\| ([\d.]+) GB \| (\d+) \|"
    match = re.search(row, PLAN)
    return match[1], float(match[2]), int(match[3])


@pytest.fixture(scope="module")
def published():
    return layout_of(PUBLISHED)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_numbers_of_a_recipe_are_those_of_the_formulas(path, published):
    "Each file leaves a tenth of its GPU free; its comments are right within 3 GB."
    machine, gigabytes, images = row_of(path.stem)
    config, comments = parse_args(["--config", str(path)]), path.read_text(encoding="utf-8")
    assert config.training.machine == machine
    processes, gpu = read_machine(machine)
    step = Step(config, published, processes=processes)
    peak = estimate_memory(step)["peak"]
    assert peak < 0.9 * GPUS[gpu]
    assert abs(peak / 1e9 - gigabytes) < 0.1
    said = re.search(r"about (\d+) GB at the peak", comments)
    assert not said or abs(int(said[1]) - gigabytes) < 3
    assert count_work(config, 1)["images"] == images * config.training.max_steps
    assert f": {images} images per step" in comments
    assert ("GPUs share the prompts" in comments) == (processes > 1)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_the_readme_names_the_recipe_with_its_machine(path):
    machine = row_of(path.stem)[0]
    (row,) = [
        line
        for line in README.splitlines()
        if f"| `{path.stem}`" in line or f", `{path.stem}`" in line
    ]
    assert f"({machine.split(' x ')[-1]})" in row.split("|")[1]


def test_a_matched_image_is_learnt_without_guidance(published):
    "As many decisions, each of one pass instead of two."
    words = ["--config", str(ROOT / "configs/real_dit_80gb.yaml"), "--rollout.window", "13"]
    words += ["--rollout.guidance_scale", "1.5"]
    noisy, decisions = parse_args(words), 13
    words += ["--rollout.dit_objective", "matching", "--rollout.matching_times", str(decisions)]
    configs = noisy, parse_args(words)
    work, matched_work = (count_work(c, 1)["denoising steps to learn from"] for c in configs)
    assert matched_work == work
    sizes, matched = (estimate_memory(Step(config, published)) for config in configs)
    assert matched["activations"] == sizes["activations"] // 2
    assert matched["sampling"] == sizes["sampling"]


def test_tokens_that_do_not_fit_together_are_counted_in_batches(published):
    words = "--data.image_size 1024 --training.batch_size 96 --rollout.batch_size 8"
    room = 11 * 10**9  # bytes, of an H100
    at_once, split = (Step(parse_args(words.split()), published, room=r) for r in (None, room))
    assert at_once.rows == 768 and 100 < split.rows < 250
    sizes, smaller = (estimate_memory(step)["sampling"] for step in (at_once, split))
    assert smaller < sizes
