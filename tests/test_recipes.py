"""The files in `configs/` for the published model: memory, images and estimated minutes of a
training step, in 6_run/17_plan, in the README and in the comments of the files."""

import re

import pytest
from helpers import ROOT, read_json

from glm_grpo.model.memory import PUBLISHED, layout_of
from glm_grpo.run.command_line import parse_args
from glm_grpo.run.plan import GPUS, Step, count_work, estimate_memory, read_machine, step_seconds

REAL = sorted((ROOT / "configs").glob("real_*.yaml"))
PLAN = (ROOT / "nbs/6_run/17_plan.ipynb").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def row_of(name):
    "(machine, GB, images, minutes) of the stored table in 6_run/17_plan."
    row = rf"\| ([^|]*) \| `{name}` \|[^|]*\| ([\d.]+) GB \| (\d+) \| ([\d.]+) \|"
    found = re.search(row, PLAN)
    return found[1], float(found[2]), int(found[3]), float(found[4])


@pytest.fixture(scope="module")
def published():
    return layout_of(PUBLISHED)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_numbers_of_a_recipe_are_those_of_the_formulas(path, published):
    "Each file leaves a tenth of its GPU free; its comments are right within 3 GB."
    machine, gigabytes, images, minutes = row_of(path.stem)
    config, comments = parse_args(["--config", str(path)]), path.read_text(encoding="utf-8")
    assert config.training.machine == machine
    processes, gpu = read_machine(machine)
    step = Step(config, published, processes=processes)
    peak = estimate_memory(step)["peak"]
    assert peak < 0.9 * GPUS[gpu].memory
    assert abs(peak / 1e9 - gigabytes) < 0.1
    said = re.search(r"about (\d+) GB at the peak", comments)
    assert not said or abs(int(said[1]) - gigabytes) < 3
    assert round(sum(step_seconds(step, GPUS[gpu]).values()) / 60, 1) == minutes
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
    "As many decisions, each of one pass instead of two; sampling takes the same time."
    words = ["--config", str(ROOT / "configs/real_dit_80gb.yaml"), "--rollout.window", "null"]
    noisy = parse_args([*words, "--rollout.guidance_scale", "1.5"])
    decisions = noisy.rollout.num_inference_steps - 1
    matched = parse_args([*words, "--rollout.guidance_scale", "1.5"])
    matched.rollout.dit_objective, matched.rollout.matching_times = "matching", decisions
    names = "denoising steps to learn from"
    assert count_work(matched, 1)[names] == count_work(noisy, 1)[names]
    steps = [Step(config, published) for config in (noisy, matched)]
    seconds, matched_seconds = (step_seconds(step, GPUS["H100"]) for step in steps)
    assert matched_seconds["update"] == pytest.approx(seconds["update"] / 2)
    assert matched_seconds["denoising"] == seconds["denoising"]
    kept, matched_kept = (estimate_memory(step)["activations"] for step in steps)
    assert matched_kept == kept // 2


def test_a_token_takes_as_long_as_measured(published):
    "32 rows of 512 x 512 pixels on an H200."
    rows = read_json(ROOT / "data/bench/nvidia-h200-full-size.json")["rows"]
    measured = next(row["ours"] for row in rows if row["name"].startswith("a token of 32 rows"))
    words = "--data.image_size 512 --training.batch_size 4 --reward.grpo.group_size 8"
    step = Step(parse_args(words.split()), published)
    assert step.rows == 32
    milliseconds = 1e3 * step_seconds(step, GPUS["H200"])["tokens"] / step.new_tokens
    assert milliseconds == pytest.approx(measured, rel=0.03)


def test_tokens_that_do_not_fit_together_are_counted_in_batches(published):
    words = "--data.image_size 1024 --training.batch_size 96 --reward.grpo.group_size 8"
    layout, room = published, 11 * 10**9  # bytes, of an H100
    at_once, split = (Step(parse_args(words.split()), layout, room=r) for r in (None, room))
    assert at_once.rows == 768 and 100 < split.rows < 250
    seconds = [step_seconds(step, GPUS["H100"])["tokens"] for step in (at_once, split)]
    assert seconds[0] < seconds[1]


def test_a_kl_takes_a_forward_pass_of_the_reference(published):
    words, seconds = "--model.component both --reward.grpo.beta 0.1".split(), []
    for more in ([], ["--reward.grpo.dit_beta", "0"]):
        step = Step(parse_args([*words, *more]), published)
        seconds.append(step_seconds(step, GPUS["H100"])["update"])
    neither = Step(parse_args(words[:2]), published)
    update = step_seconds(neither, GPUS["H100"])["update"]
    assert seconds[0] == pytest.approx(1.5 * update)
    assert update < seconds[1] < seconds[0]


def test_entropies_and_the_slow_copy_take_a_forward_pass_each(published):
    "An update of one optimizer step scores with gradient, which is two passes with adapters."
    words = "--rollout.token_batch_size 32 --rollout.dit_objective matching".split()
    more = {
        "ar": ["--reward.grpo.entropy_share", "0.2"],
        "dit": ["--reward.grpo.dit_pull_slow", "0.1", "--training.slow_copy_decay", "0.3"],
    }
    for half, extra in more.items():
        config = [*words, "--model.component", half]
        steps = [Step(parse_args(given), published) for given in (config, [*config, *extra])]
        plain, longer = (step_seconds(step, GPUS["H100"])["update"] for step in steps)
        assert longer == pytest.approx(plain * 3 / 2)
