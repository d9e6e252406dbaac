"Options that cannot work, each with its message; bounds of options."

import ast
import copy
import shlex

import pytest
from helpers import ROOT, main, pretend_installed, small

from glm_grpo.data.basics import refusal
from glm_grpo.data.options import check_options, list_options
from glm_grpo.model.adapters import LoraOptions
from glm_grpo.run.build import resolve
from glm_grpo.run.command_line import parse_args
from glm_grpo.run.config import Config, check_config
from glm_grpo.training.options import TrainerOptions, with_options

VALUES = {  # option -> values that are taken, values that are refused
    "model.lora_rank": ((1, 4096), (0, 4097)),
    "training.max_steps": ((1, 10**9), (0, 10**9 + 1)),
    "training.batch_size": ((1, 100_000), (0, 100_001)),
    "training.micro_batch_size": ((1, None), (0,)),
    "training.eval_samples": ((0,), (-1,)),
    "training.seed": ((0, 2**63 - 1), (-1, 2**63)),
    "training.learning_rate": ((1e-9, 0.9), (0, 0.0, -1e-9)),
    "training.ema_decay": ((0.5, 0.9999), (0.0, 1.0, -1.0)),
    "training.max_grad_norm": ((1e-9,), (0, -1e-9)),
    "reward.grpo.beta": ((0, 1.0), (-0.1,)),
    "reward.grpo.group_size": ((2, 10_000), (1, 10_001)),
    "reward.grpo.clip_range": ((1e-9,), (0, -1e-9)),
    "rollout.num_inference_steps": ((1, 1000), (0, 1001)),
    "rollout.top_p": ((0.5, 1.0), (0.0, 1.5)),
    "data.image_size": ((64, [64, 96]), (100, [128, 1, 2], [32, -64], 8192)),
}
OPTIONS = list_options(Config)


def assignments(path):
    "What a module assigns to the options of a section, also under the names that code gives it."
    names = {name.rpartition(".")[2] for name in OPTIONS}
    sections = {"data", "training", "rollout", "grpo"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        called = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr"
        written = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if called or (written and node.attr in names):
            words = ast.unparse(node).split(".")[:-1]
            if not (called or {"config", "options"} & {*words} or words[-1] in sections):
                continue
            yield f"{path.relative_to(ROOT)}: {ast.unparse(node)}"


def test_nothing_writes_into_options():
    "What config.yaml says is what every part of a run saw. A copy: `with_options`."
    lines = [line for path in (ROOT / "glm_grpo").rglob("*.py") for line in assignments(path)]
    # the copy, the parser, the benchmark's own options, and what is none: a method, columns
    allowed = "training/options.py", "run/command_line.py", "bench/program.py"
    allowed += "data/options.py", "data/prompts.py"
    assert [line for line in lines if not any(file in line for file in allowed)] == []


def test_a_run_trains_with_the_options_that_it_resolved(folder, at_root, monkeypatch):
    "Not even its callbacks and its evaluation change them."
    resolved = []

    def noted(config):
        before, resolved[:] = copy.deepcopy(config), [resolve(config)]
        assert config == before
        resolved.append(copy.deepcopy(resolved[0]))
        return resolved[0]

    monkeypatch.setattr("glm_grpo.run.train.resolve", noted)
    assert main(*small(folder, "--num_steps", 1, "--training.eval_samples", 1)) == 0
    config, before = resolved
    assert config == before and config.training.output_dir is None


def of_type(*types):
    "The names of the options of these types, also where they may be null."
    kinds = {kind for one in types for kind in (one, one | None)}
    return [name for name, o in OPTIONS.items() if o.type in kinds and "." in name]


def with_value(name, value):
    return with_options(Config(), {name: value})


FROZEN = ROOT / "tests/options.txt"


def options_now():
    "A line for each option of a run, a trainer and its adapters: name, type, default."
    for cls in (Config, TrainerOptions, LoraOptions):
        yield f"[{cls.__name__}]"
        for name, declared in list_options(cls).items():
            kind = declared.type.__name__ if isinstance(declared.type, type) else declared.type
            yield f"{name}: {kind} = {declared.default!r}".replace("typing.", "")


def test_options_are_those_of_the_list():
    "A new option, another default or another type is a decision, which the list records."
    now = "".join(f"{line}\n" for line in options_now())
    assert now == FROZEN.read_text(encoding="utf-8"), (
        "The options differ from tests/options.txt. If that is meant, update the list with "
        "`python tests/test_config.py`, commit it, and say in the CHANGELOG what changes for users."
    )


@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_taken_and_refused(name):
    taken, refused = VALUES[name]
    for value in taken:
        check_options(with_value(name, value))
    for value in refused:
        assert refusal(check_config, with_value(name, value)).startswith(f"{name} {value}: ")


def test_every_number_text_and_choice_is_checked():
    "Nothing but a bound keeps 10**40 steps or images from ending in a raw error."
    wrong = {name: [-(10**40), 10**40] for name in of_type(int, float)}
    for name in of_type(float):
        wrong[name] += [float("nan"), float("inf")]
    wrong |= {name: ["", "  "] for name in of_type(str)}
    wrong |= {name: ["something"] for name, o in OPTIONS.items() if "Literal" in str(o.type)}
    assert len(wrong) > 50
    for name, values in wrong.items():
        for value in values:
            assert refusal(check_config, with_value(name, value)).startswith(f"{name} ")


SLIPS = {  # words -> a part of the message
    "--reward.grpo.group_size 1": "reward.grpo.group_size 1: must be at least 2",
    "--reward.grpo.beta 0.1 --model.lora false": "needs model.lora true",
    "--model.component both --model.torch_dtype float16": "cannot train",
    "--model.component dit --reward.grpo.delta 2": "Set reward.grpo.dit_delta",
    "--model.component dit --reward.grpo.clip_range_high 0.1": "dit_clip_range_high, and",
    "--reward.grpo.dit_beta 0.1": "Set reward.grpo.beta",
    "--data.image_size 100": "The nearest that works is 96",
    "--reward.metrics.edit 1": "edit judges edits",
    "--model.component dit --rollout.noise_level 0": "rollout.noise_level",
    "--model.component both --rollout.num_inference_steps 1": "num_inference_steps",
    "--model.component both --rollout.noise_level 1.5": "rollout.noise_level",
    "--reward.dit_metrics {sign:\\ 1}": "they are for model.component both",
    "--reward.metrics {scene:\\ 0}": "all weights are 0",
    "--reward.metrics.beauty 1": "reward.metrics.beauty: no such metric",
    "--reward.functions redness.py": "write it as file.py:name",
    "--reward.functions [a.py:f,b.py:f]": "there is a reward called f already",
    "--reward.functions a.py:f --reward.remote {f:\\ http://x}": "a function has this name",
    "--reward.models.scene x": "reward.models.scene: no such metric",
    "--reward.grpo.delta 1.1": "reward.grpo.delta",
    "--reward.grpo.dit_delta 1.0001": "reward.grpo.dit_delta",
    "--reward.grpo.loss_type sapo --reward.grpo.delta 3": "loss_type sapo has no such bound",
    "--reward.grpo.loss_type cispo --reward.grpo.dit_clip_range_high 1": "dit_clip_range_high",
    "--reward.grpo.preview_share 0.5 --model.component dit": "trains none",
    "--reward.grpo.entropy_share 0.5 --model.component dit": "entropy_share is for tokens",
    "--reward.grpo.clip_range 0.1 --model.component dit": "Set reward.grpo.dit_clip_range",
    "--training.eval_interval 5 --training.eval_samples 0": "nothing is measured",
    "--reward.grpo.preview_share 0.5 --training.mode i2i": "an edit has no preview",
    "--reward.grpo.dit_beta 1 --model.component dit --model.lora false": "needs model.lora true",
    "--reward.dit_metrics.beauty 1 --model.component both": "reward.dit_metrics.beauty",
    "--training.trackers [tensorboard,comet]": "training.trackers comet: ",
    "--training.shard true": "training.shard",
    "--training.shard true --model.lora false --training.ema_decay 0.9": "training.ema_decay",
    "--training.shard true --model.lora false --model.component dit --rollout.compile true": (
        "Set rollout.compile to auto or false"
    ),
    "--rollout.float8 true --model.offload true": "Set model.offload false",
    "--rollout.float8 true --model.component dit --model.lora false": "must stay there and not",
    "--model.component dit --rollout.pairs_churn 0.1": "rollout.pairs_churn, rollout.pairs_clip",
    "--rollout.dit_objective pairs": "model.component ar does not train the DiT",
    "--model.component dit --rollout.dit_objective pairs --reward.grpo.loss_type sapo": "a loss of "
    "its own",
}


def problems(line):
    return refusal(lambda: check_config(parse_args(shlex.split(line))))


@pytest.mark.parametrize(("line", "part"), SLIPS.items())
def test_slips_are_refused(line, part):
    assert part in problems(line)


FINE = [
    "--reward.grpo.beta 0.1 --model.torch_dtype bfloat16",
    "--training.shard true --model.lora false --rollout.compile true",
    "--rollout.float8 true --model.lora false",
    "--reward.metrics.beauty 1 --reward.functions a.py:beauty",
    "--reward.metrics.clip 1 --reward.models.clip models/clip",
    "--reward.metrics.clip 1 --reward.remote.clip http://127.0.0.1:8000",
    "--reward.metrics {scene:\\ 1,mse:\\ 0}",
    "--reward.metrics.edit 1 --training.mode i2i",
    "--model.component both --reward.dit_metrics.detail 1",
]


@pytest.mark.parametrize("line", FINE)
def test_what_goes_together_is_accepted(line):
    check_config(parse_args(shlex.split(line)))


@pytest.mark.parametrize(
    ("line", "package"),
    [
        ("--training.optimizer adamw_8bit", "bitsandbytes"),
        ("--training.trackers [tensorboard,mlflow]", "mlflow"),
    ],
)
def test_packages_that_options_need(line, package, monkeypatch):
    pretend_installed(monkeypatch, package, False)
    assert package in problems(line)
    check_config(parse_args(shlex.split(line)), trains=False)  # an evaluation uses neither
    pretend_installed(monkeypatch, package, True)
    check_config(parse_args(shlex.split(line)))


WORDS = {  # words -> a part of the message
    "--training.max_step 1": "Did you mean training.max_steps?",
    "--num_stepz 1": "--num_stepz: no such option. Did you mean num_steps?",
    "--seeed 1": "--seeed: no such option. Did you mean training.seed?",
    "--data.image_size big": "--data.image_size big: ",
    "--model.component vit": "dit",
    "--output_dir ''": "--training.output_dir '': is empty. Give a value",
    "--seed --mode i2i": "--training.seed '': is empty. Give a value",
    "--rollout.compile maybe": "this is not of type bool or auto",
    "--reward.grpo.loss_type dpo": "take grpo, bnpo",
    "--trust_run_code maybe": "--trust_run_code maybe: this is not of type bool",
    "--num_steps 3 stray": "'stray' belongs to no option",
    "--reward.metrics {scene:\\ good}": "--reward.metrics ",
    "--training 3": "--training: this is a section",
    "--config nowhere.yaml": "nowhere.yaml: ",
}


@pytest.mark.parametrize(("line", "part"), WORDS.items())
def test_words_that_mean_nothing(line, part):
    said = refusal(parse_args, shlex.split(line))
    assert part in said and "\n" not in said


if __name__ == "__main__":
    FROZEN.write_text("".join(f"{line}\n" for line in options_now()), encoding="utf-8")
