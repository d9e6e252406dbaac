"""The files in `configs/` for the published model: images and estimated minutes of a training step,
in the table of 6_run/17_plan, in the README's table and in the comments of the files."""

import re

import pytest
from helpers import ROOT

from glm_grpo.model.sizes import published_layout
from glm_grpo.run import plan
from glm_grpo.run.command_line import parse_args
from glm_grpo.run.plan import SPEEDS, step_seconds
from glm_grpo.run.work import count_work

REAL = sorted((ROOT / "configs").glob("real_*.yaml"))
PLAN = (ROOT / "nbs/6_run/17_plan.ipynb").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def row_of(name):
    "(processes, images, minutes, GPU) of the stored table in 6_run/17_plan."
    found = re.search(rf"\| (\d+) of [^|]*\| `{name}` \|.*\| (\d+) \| ([\d.]+) \((.*?)\) \|", PLAN)
    return int(found[1]), int(found[2]), float(found[3]), found[4]


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_images_and_minutes_of_a_step_are_those_of_the_formula(path):
    processes, images, minutes, gpu = row_of(path.stem)
    config = parse_args(["--config", str(path)])
    seconds = step_seconds(config, published_layout(), SPEEDS[gpu], processes=processes)
    assert round(sum(seconds.values()) / 60, 1) == minutes
    assert count_work(config, 1)["pictures"] == images * config.training.max_steps
    assert f": {images} images per step" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_the_readmes_table_is_that_of_the_dry_run(path):
    _, images, minutes, gpu = row_of(path.stem)
    (row,) = [line for line in README.splitlines() if f"`{path.stem}` (" in line]
    assert f"`{path.stem}` ({images} images, {minutes} min)" in row
    assert f"({gpu})" in row.split("|")[1]


def test_the_readme_names_the_assumptions():
    for share in (plan.FLOP_REACHED, plan.BANDWIDTH_REACHED):
        assert f"{100 * share:.0f} % of" in README
    assert f"{plan.HOST_BANDWIDTH / 1e9:.0f} GB/s from the host" in README
