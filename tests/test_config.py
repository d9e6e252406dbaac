"Options that cannot work, each with its message; bounds of options."

import shlex

import pytest

from glm_grpo.data.basics import refusal
from glm_grpo.data.basics import check_options, list_options, option_value
from glm_grpo.run.checks import check_config
from glm_grpo.run.command_line import parse_args
from glm_grpo.run.config import Config

AT_LEAST = {
    "model.lora_rank": 1,
    "training.max_steps": 1,
    "training.batch_size": 1,
    "training.micro_batch_size": 1,
    "training.save_interval": 0,
    "training.eval_samples": 0,
    "training.weight_decay": 0,
    "reward.grpo.group_size": 2,
    "reward.grpo.beta": 0,
    "rollout.window": 1,
}
ABOVE_ZERO = ("training.learning_rate", "training.max_grad_norm", "reward.grpo.clip_range")
AT_MOST = {
    "model.lora_rank": 4096,
    "training.seed": 2**63 - 1,
    "training.batch_size": 100_000,
    "training.learning_rate": 1,
    "reward.grpo.group_size": 10_000,
    "rollout.num_inference_steps": 1000,
    "rollout.temperature": 100,
}
OPTIONS = list_options(Config)
FLOATS = [name for name, o in OPTIONS.items() if o.type in (float, float | None)]


def with_value(name, value):
    config = Config()
    section, _, last = name.rpartition(".")
    setattr(option_value(config, section), last, value)
    return config


@pytest.mark.parametrize(("name", "least"), AT_LEAST.items())
def test_least_values(name, least):
    check_options(with_value(name, least))
    said = refusal(check_config, with_value(name, least - 1))
    assert said.startswith(f"{name} {least - 1}: ") and f"at least {least}" in said


@pytest.mark.parametrize(("name", "most"), AT_MOST.items())
def test_largest_values(name, most):
    "Beyond it no memory holds the run, or its numbers become NaN."
    check_options(with_value(name, most))
    for value in (2 * most + 2, 10**40):
        said = refusal(check_config, with_value(name, value))
        assert said.startswith(f"{name} ") and said.endswith(f": must be at most {most}.")


TEXTS = [name for name, o in OPTIONS.items() if o.type in (str, str | None) and "." in name]


@pytest.mark.parametrize("name", TEXTS)
def test_empty_texts(name):
    for empty in ("", "  "):
        said = refusal(check_config, with_value(name, empty))
        assert said.startswith(f"{name} '{empty}': is empty.")


@pytest.mark.parametrize("name", ABOVE_ZERO)
def test_values_above_zero(name):
    check_options(with_value(name, 1e-9))
    for value in (0, 0.0, -1e-9):
        assert refusal(check_config, with_value(name, value)).startswith(f"{name} {value}: ")


def test_every_number_has_bounds():
    "Nothing but a bound keeps 10**40 steps or images from ending in a raw error."
    numbers = [n for n, o in OPTIONS.items() if o.type in (int, int | None, float, float | None)]
    for name in numbers:
        for value in (-(10**40), 10**40):
            assert name in refusal(check_options, with_value(name, value)), name


@pytest.mark.parametrize("name", FLOATS)
def test_numbers_are_finite(name):
    for value in ("nan", "inf", "-inf"):
        said = refusal(check_config, with_value(name, float(value)))
        assert said == f"{name} {value}: must be a finite number."


@pytest.mark.parametrize(("value", "works"), [(0.0, 0), (1.0, 0), (-1.0, 0), (0.5, 1), (0.9999, 1)])
def test_moving_average(value, works):
    config = with_value("training.ema_decay", value)
    if works:
        check_options(config)
    else:
        assert "between 0 and 1" in refusal(check_config, config)


def test_top_p_is_a_probability():
    check_options(with_value("rollout.top_p", 1.0))
    assert refusal(check_config, with_value("rollout.top_p", 1.5)).startswith("rollout.top_p 1.5: ")


@pytest.mark.parametrize("name", [n for n, o in OPTIONS.items() if "Literal" in str(o.type)])
def test_names_outside_the_list(name):
    said = refusal(check_config, with_value(name, "something"))
    assert said.startswith(f"{name} something: take ")


SLIPS = {  # words -> a part of the message
    "--reward.grpo.group_size 1": "a group needs at least 2. Start with 8",
    "--reward.grpo.beta -0.1": "reward.grpo.beta -0.1: must be at least 0",
    "--reward.grpo.beta 0.1 --model.lora false": "needs model.lora true",
    "--model.torch_dtype float16 --model.lora false": "float16 cannot train all weights",
    "--training.trackers comet": "comet: no such tracker",
    "--data.image_size 100": "The nearest that works is 96",
    "--data.image_size [128,1,2]": "give one number, or [height, width]",
    "--data.image_size 1000000": "from 32 to 4096. The nearest that works is 4096",
    "--data.image_size [32,-64]": "from 32 to 4096. The nearest that works is 32",
    "--rollout.temperature 1e-9": "rollout.temperature 1e-09: must be at least 0.01",
    "--model.lora_rank 1000000000000": "model.lora_rank 1000000000000: must be at most 4096",
    "--training.learning_rate -1e-3": "training.learning_rate -0.001: must be more than 0",
    "--training.learning_rate .nan": "must be a finite number",
    "--reward.metrics.edit 1": "edit judges edits",
    "--model.component dit --rollout.noise_level 0": "without noise",
    "--model.component both --rollout.num_inference_steps 1": "needs at least 2",
    "--model.component both --rollout.noise_level 1.5": "cps takes at most 1",
    "--reward.dit_metrics {sign:\\ 1}": "there is one reward",
    "--model.component dit --reward.dit_functions a.py:f": "there is one reward",
    "--reward.metrics.clip 1": "its weights are part of no package",
    "--reward.metrics {scene:\\ 0}": "all weights are 0",
    "--reward.metrics.beauty 1": "reward.metrics.beauty: no such metric",
    "--reward.functions redness.py": "write it as file.py:name",
    "--reward.functions [a.py:f,b.py:f]": "there is a reward called f already",
    "--reward.functions a.py:scene": "there is a reward called scene already",
    "--reward.functions a.py:f --reward.remote {f:\\ http://x}": "a function has this name",
    "--reward.models.scene x": "reward.models.scene: no such metric",
    "--reward.use_advanced false --reward.normalise group": "compares the parts",
    "--training.eval_interval 5 --training.eval_samples 0": "no evaluation",
    "--training.shard true": "only a small adapter learns",
    "--training.shard true --model.lora false --training.ema_decay 0.9": "no moving averages",
}


@pytest.mark.parametrize(("line", "part"), SLIPS.items())
def test_slips_are_refused(line, part):
    assert part in refusal(check_config, parse_args(shlex.split(line)))


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
