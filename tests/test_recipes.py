"""The files in `configs/` for the published model: memory and images of a training step, in
6_run/11_plan, in the README and in the comments of the files."""

import re
import shlex
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, read_json

from glm_grpo.model.memory import PUBLISHED, layout_of
from glm_grpo.run.command_line import parse_args
from glm_grpo.data.options import option_value
from glm_grpo.data.prompts import T2IDataset
from glm_grpo.run import plan
from glm_grpo.run.config import to_yaml
from glm_grpo.run.export import training_command
from glm_grpo.run.plan import GPUS, Step, count_work, estimate_memory, fit, read_machine
from glm_grpo.training.options import with_options
from glm_grpo.training.ranks import Ranks

REAL = sorted((ROOT / "configs").glob("real_*.yaml"))
PLAN = (ROOT / "nbs/6_run/11_plan.ipynb").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def row_of(name):
    "(machine, GB, images) of the stored table in 6_run/11_plan."
    row = rf"\| ([^|]*) \| `{name}` \|[^|]*\| ([\d.]+) GB[^|]*\| ([\d.]+) GB[^|]*\| (\d+) \|"
    match = re.search(row, PLAN)
    return match[1], float(match[2]), float(match[3]), int(match[4])


@pytest.fixture(scope="module")
def published():
    return layout_of(PUBLISHED)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_numbers_of_a_recipe_are_those_of_the_formulas(path, published):
    "Each file leaves a tenth of its GPU free; its comments are right within 3 GB."
    machine, gigabytes, at_512, images = row_of(path.stem)
    comments, chosen = path.read_text(encoding="utf-8"), []
    words = "--data.image_size 512 --data.eval_image_size 1024"
    for added, expected in (("", gigabytes), (words, at_512)):
        config = parse_args(["--config", str(path), *added.split()])
        assert config.training.machine == machine
        processes, gpu = read_machine(machine)
        step = Step(config, published, processes=processes)
        fitted = fit(step, GPUS[gpu])
        peak = estimate_memory(replace(step, config=fitted))["peak"]
        assert peak < 0.9 * GPUS[gpu]
        assert path.stem == "real_ar_24gb" or abs(peak / 1e9 - expected) < 0.1
        chosen.append(fitted)
    config, small = chosen
    said = re.search(r"about (\d+) GB at the peak", comments)
    assert not said or abs(int(said[1]) - gigabytes) < 3
    if auto := re.search(r"auto, on an (H\d+): (\d), (not )?repeated", comments):
        assert auto[1] == gpu and int(auto[2]) == config.training.micro_batch_size
        assert bool(auto[3]) == (not config.model.gradient_checkpointing)
        assert words in comments and small.data.eval_size == (1024, 1024)
    if auto := re.search(r"at 512 px (\d)", comments):
        assert int(auto[1]) == small.training.micro_batch_size
        assert small.model.gradient_checkpointing is False
    assert count_work(config, 1)["images"] == images * config.training.max_steps
    assert f": {images} images per step" in comments
    assert ("GPUs share the prompts" in comments) == (processes > 1)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_a_recipe_says_what_evidence_it_has(path):
    "And the README says the same."
    kinds = "planned|simulated|short run on an? [A-Z][A-Z0-9]+|full curve"
    second = path.read_text(encoding="utf-8").splitlines()[1]
    kind = re.match(rf"# Evidence: ({kinds})\b", second)[1]
    runs = [run["config"] for run in read_json(ROOT / "tests/memory_at_real_size.json")["runs"]]
    assert kind != "simulated" or path.stem in runs
    (row,) = [line for line in README.splitlines() if f"`{path.stem}`" in line and "|" in line]
    assert re.search(rf"`{path.stem}`[^|;]*\b{kind}\b|\b{kind}[^|;]*`{path.stem}`", row) or (
        row.rstrip(" |").endswith(f"| {kind}")
    )


def test_the_command_of_an_export_has_all_options_of_a_recipe():
    config = parse_args(["--config", str(ROOT / "configs/real_ar_80gb.yaml")])
    words = shlex.split(training_command(config).replace("\\\n", " "))
    again = parse_args(words[words.index("glm_grpo.train") + 1 :])
    names = ("model.lora_target_modules", "training.max_steps", "rollout.num_inference_steps")
    assert config.model.lora_target_modules is None
    assert all(option_value(again, name) == option_value(config, name) for name in names)


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


def test_a_run_on_cuda_fixes_and_prints_what_fits(monkeypatch, tmp_path):
    "Before its model is loaded; the rank with the smallest GPU counts. A CPU keeps the defaults."
    monkeypatch.chdir(ROOT)
    config, ranks, said = parse_args(["--training.micro_batch_size", "auto"]), Ranks(), []
    assert config.model.gradient_checkpointing == "auto"
    sized = ((T2IDataset("data/t2i/train/prompts.txt"), config.data.size),)

    def say(*line):
        said.append(line)

    on_cpu = plan.fit_run(config, sized, ranks, say)
    assert on_cpu == with_options(
        config, {"model.gradient_checkpointing": False, "training.micro_batch_size": 8}
    )
    assert said == []
    monkeypatch.setattr(plan, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 8 * 10**10))
    ranks.device, sizes = "cuda", iter([[8 * 10**10, 2 * 10**8], *[[8 * 10**10] * 2] * 3])
    monkeypatch.setattr(ranks, "gather", lambda own: next(sizes))
    config = with_options(config, {"training.batch_size": 64})
    small, large = (plan.fit_run(config, sized, ranks, say) for _ in "ab")
    assert small.training.micro_batch_size < large.training.micro_batch_size == 8
    assert large.rollout.token_batch_size == 128 > small.rollout.token_batch_size
    assert "for 0 GB: model.gradient_checkpointing" in said[0][1] and len(said) == 2
    # config.yaml has the numbers, so a resumed run has no choice
    (tmp_path / "config.yaml").write_text(to_yaml(large))
    again = parse_args(["--config", str(tmp_path / "config.yaml")])
    assert again == large == plan.fit_run(again, sized, ranks, say)
    older = with_options(large, {"rollout.token_batch_size": None})
    older.resume = str(tmp_path)
    assert plan.fit_run(older, sized, ranks, say) == older
