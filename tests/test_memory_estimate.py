"""The dry run's memory at the sizes of the published model, against simulated training steps."""

import pytest
from helpers import ROOT, read_json

from glm_grpo.model.memory import PUBLISHED, layout_of, numbers_in
from glm_grpo.run.command_line import parse_args
from glm_grpo.run.plan import Step, estimate_memory

SIMULATED = read_json(ROOT / "tests/memory_at_real_size.json")


def name_of(run):
    return "-".join([run["config"], *map(str, run["changes"].values())])


@pytest.fixture(scope="module")
def published():
    return layout_of(PUBLISHED)


@pytest.mark.parametrize("run", SIMULATED["runs"], ids=name_of)
def test_the_estimate_is_within_a_tenth_of_the_simulated_step(run, published, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["--config", f"configs/{run['config']}.yaml"]
    for name, value in run["changes"].items():
        words += [f"--{name}", str(value)]
    prompt_tokens = SIMULATED["prompt_tokens"]
    found = estimate_memory(Step(parse_args(words), published, prompt_tokens))
    for phase in ("sampling", "update"):
        simulated = run[f"{phase}_with_optimizer"]
        assert found[f"{phase}_peak"] == pytest.approx(simulated, rel=0.1), phase
    assert found["adamw"] == pytest.approx(run["optimizer"], rel=0.1, abs=3e8)
    assert found["peak"] == max(found["sampling_peak"], found["update_peak"])


def test_a_copy_in_8_bits_counts_a_byte_for_each_weight(published, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["--config", "configs/real_ar_80gb.yaml", "--rollout.float8"]
    steps = [Step(parse_args([*words, wanted]), published, 64) for wanted in ("false", "true")]
    plain, eight = (estimate_memory(step)["weights"] for step in steps)
    assert eight - plain == numbers_in(published["dit"]["shapes"])
