"Options that cannot work, each with its message; bounds of options."

import shlex

import pytest
from helpers import pretend_installed

from glm_grpo.data.basics import check_options, list_options, option_value, refusal
from glm_grpo.run.command_line import parse_args
from glm_grpo.run.config import Config, check_config

BOUNDS = {  # option -> least and largest value; beyond the largest no memory holds the run
    "model.lora_rank": (1, 4096),
    "training.max_steps": (1, 10**9),
    "training.batch_size": (1, 100_000),
    "training.micro_batch_size": (1, 10**9),
    "training.eval_samples": (0, 10**9),
    "training.seed": (0, 2**63 - 1),
    "reward.grpo.beta": (0, 10**9),
    "reward.grpo.group_size": (2, 10_000),
    "rollout.num_inference_steps": (1, 1000),
}
ABOVE_ZERO = ("training.learning_rate", "training.max_grad_norm", "reward.grpo.clip_range")
OPTIONS = list_options(Config)


def of_type(*types):
    "The names of the options of these types, also where they may be null."
    kinds = {kind for one in types for kind in (one, one | None)}
    return [name for name, o in OPTIONS.items() if o.type in kinds and "." in name]


def with_value(name, value):
    config = Config()
    section, _, last = name.rpartition(".")
    setattr(option_value(config, section), last, value)
    return config


@pytest.mark.parametrize("name", BOUNDS)
def test_least_and_largest_values(name):
    least, most = BOUNDS[name]
    for value in (least, most):
        check_options(with_value(name, value))
    for value in (least - 1, most + 1):
        assert refusal(check_config, with_value(name, value)).startswith(f"{name} {value}: ")


@pytest.mark.parametrize("name", of_type(str))
def test_empty_texts(name):
    for empty in ("", "  "):
        assert refusal(check_config, with_value(name, empty)).startswith(f"{name} '{empty}': ")


@pytest.mark.parametrize("name", ABOVE_ZERO)
def test_values_above_zero(name):
    check_options(with_value(name, 1e-9))
    for value in (0, 0.0, -1e-9):
        assert refusal(check_config, with_value(name, value)).startswith(f"{name} {value}: ")


@pytest.mark.parametrize("name", of_type(int, float))
def test_every_number_has_bounds(name):
    "Nothing but a bound keeps 10**40 steps or images from ending in a raw error."
    wrong = [-(10**40), 10**40]
    if name in of_type(float):
        wrong += [float("nan"), float("inf")]
    for value in wrong:
        assert name in refusal(check_options, with_value(name, value))


@pytest.mark.parametrize(
    ("name", "wrong"), [("training.ema_decay", (0.0, 1.0, -1.0)), ("rollout.top_p", (0.0, 1.5))]
)
def test_shares(name, wrong):
    for value in (0.5, 0.9999):
        check_options(with_value(name, value))
    for value in wrong:
        assert refusal(check_config, with_value(name, value)).startswith(f"{name} {value}: ")


@pytest.mark.parametrize("name", [n for n, o in OPTIONS.items() if "Literal" in str(o.type)])
def test_names_outside_the_list(name):
    said = refusal(check_config, with_value(name, "something"))
    assert said.startswith(f"{name} something: take ")


SLIPS = {  # words -> a part of the message
    "--reward.grpo.group_size 1": "a group needs at least 2. Start with 8",
    "--reward.grpo.beta 0.1 --model.lora false": "needs model.lora true",
    "--model.torch_dtype float16 --model.lora false": "float16 cannot train all weights",
    "--data.image_size 100": "The nearest that works is 96",
    "--data.image_size [128,1,2]": "give one number, or [height, width]",
    "--data.image_size [32,-64]": "from 32 to 4096. The nearest that works is 32",
    "--rollout.temperature 1e-9": "rollout.temperature 1e-09: must be at least 0.01",
    "--reward.metrics.edit 1": "edit judges edits",
    "--model.component dit --rollout.noise_level 0": "rollout.noise_level 0",
    "--model.component both --rollout.num_inference_steps 1": "num_inference_steps 1",
    "--model.component both --rollout.noise_level 1.5": "rollout.noise_level 1.5",
    "--reward.dit_metrics {sign:\\ 1}": "there is one reward",
    "--model.component dit --reward.dit_functions a.py:f": "there is one reward",
    "--reward.metrics {scene:\\ 0}": "all weights are 0",
    "--reward.metrics.beauty 1": "reward.metrics.beauty: no such metric",
    "--reward.functions redness.py": "write it as file.py:name",
    "--reward.functions [a.py:f,b.py:f]": "there is a reward called f already",
    "--reward.functions a.py:scene": "there is a reward called scene already",
    "--reward.functions a.py:f --reward.remote {f:\\ http://x}": "a function has this name",
    "--reward.models.scene x": "reward.models.scene: no such metric",
    "--reward.use_advanced false --reward.normalise group": "compares the parts",
    "--training.eval_interval 5 --training.eval_samples 0": "no evaluation",
    "--reward.grpo.delta 1.1": "reward.grpo.delta 1.1",
    "--reward.dit_metrics.beauty 1 --model.component both": "reward.dit_metrics.beauty",
    "--training.trackers [tensorboard,comet]": "comet: no such tracker",
    "--training.shard true": "training.shard",
    "--training.shard true --model.lora false --training.ema_decay 0.9": "training.ema_decay",
}


def problems(line):
    return refusal(check_config, parse_args(shlex.split(line)))


@pytest.mark.parametrize(("line", "part"), SLIPS.items())
def test_slips_are_refused(line, part):
    assert part in problems(line)


FINE = [
    "--reward.grpo.beta 0.1 --model.torch_dtype float16",
    "--training.shard true --model.lora false",
    "--reward.metrics.beauty 1 --reward.functions a.py:beauty",
    "--reward.metrics.clip 1 --reward.models.clip models/clip",
    "--reward.metrics.clip 1 --reward.remote.clip http://127.0.0.1:8000",
    "--reward.metrics {scene:\\ 1,mse:\\ 0}",
    "--reward.metrics.edit 1 --training.mode i2i",
    "--model.component both --reward.dit_metrics.detail 1",
    "--reward.use_advanced false --reward.normalise group --reward.functions a.py:f",
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
    pretend_installed(monkeypatch, package, True)
    check_config(parse_args(shlex.split(line)))


WORDS = {  # words -> a part of the message
    "--training.learningrate 1": "Did you mean training.learning_rate?",
    "--learning_rate 1": "Did you mean training.learning_rate?",
    "--seeed 1": "--seeed: no such option. Did you mean training.seed?",
    "--data.image_size big": "--data.image_size big: ",
    "--model.component vit": "dit",
    "--training.max_steps 2.5": "--training.max_steps 2.5: ",
    "--num_steps": "--num_steps: a value is missing",
    "--output_dir ''": "--output_dir: a value is missing",
    "--num_steps 3 stray": "'stray' belongs to no option",
    "''": "'' belongs to no option",
    "--xyzzy 3": "--xyzzy: no such option. --help lists them all",
    "--reward.metrics {scene:\\ good}": "--reward.metrics ",
    "--training 3": "--training: this is a section",
    "--config nowhere.yaml": "nowhere.yaml: ",
}


@pytest.mark.parametrize(("line", "part"), WORDS.items())
def test_words_that_mean_nothing(line, part):
    said = refusal(parse_args, shlex.split(line))
    assert part in said and "\n" not in said
