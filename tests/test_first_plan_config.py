"Files of options in the form of the first plan: taken, translated with a note, or explained."

import contextlib
import io

import pytest
import yaml

from glm_grpo.data.basics import refusal
from glm_grpo.data.options import option_value
from glm_grpo.run.command_line import parse_args
from glm_grpo.run.config import check_config

pytestmark = pytest.mark.usefixtures("at_root")

# name -> (text, options that it means, words of the notes)
BLOCKS = {
    "the published model, spread by itself": (
        "model: {name: zai-org/GLM-Image, component: both, torch_dtype: bfloat16, "
        "device_map: auto}",
        {"model.component": "both", "model.torch_dtype": "bfloat16", "model.device": None},
        ["model.device_map auto: taken as model.device"],
    ),
    "a device for all": (
        "model: {device_map: cuda}",
        {"model.device": "cuda"},
        ["model.device_map cuda: taken as model.device"],
    ),
    "one prompt in a step": (
        "training: {batch_size: 1, max_steps: 1000, learning_rate: 5e-6, max_grad_norm: 1.0}",
        {"training.batch_size": 1, "training.learning_rate": 5e-6, "training.max_steps": 1000},
        [],
    ),
    "the distance to a target": (
        "reward: {use_advanced: false, grpo: {num_samples: 4, clip_range: 0.2}}",
        {"reward.use_advanced": False, "reward.grpo.group_size": 4},
        ["reward.grpo.num_samples 4: taken as reward.grpo.group_size 4"],
    ),
    "a sum of metrics": (
        "reward: {use_advanced: true, metrics: {lpips: 0.4, aesthetic: 0.3, text_accuracy: 0.3}}",
        {"reward.metrics": {"lpips": 0.4, "aesthetic": 0.3, "text": 0.3}},
        ["taken as reward.metrics"],
    ),
    "height and width": (
        "data: {image_size: {height: 1024, width: 768}}",
        {"data.image_size": [1024, 768]},
        ["[1024, 768]"],
    ),
    "prompts and targets": (
        "data: {prompts_file: data/t2i/prompts.txt, target_images_dir: data/t2i/target_images}",
        {
            "data.prompts_file": "data/t2i/train/prompts.txt",
            "data.target_images_dir": None,  # next to the prompts
        },
        ["data.prompts_file data/t2i/train/prompts.txt", "data/t2i/target_images: taken as"],
    ),
    "edits": (
        "training: {mode: i2i}\n"
        "data: {prompts_file: data/i2i/prompts.txt, source_images_dir: data/i2i/source_images, "
        "target_images_dir: data/i2i/target_images}",
        {
            "data.prompts_file": "data/i2i/train/prompts.jsonl",
            "data.source_images_dir": None,
            "data.target_images_dir": None,
        },
        ["data.prompts_file data/i2i/train/prompts.jsonl", "source_images", "target_images"],
    ),
    "groups and a pull towards the old policy": (
        "training: {group_size: 6}\nreward: {kl_coef: 0.04}",
        {"reward.grpo.group_size": 6, "reward.grpo.beta": 0.04},
        [
            "training.group_size 6: taken as reward.grpo.group_size",
            "reward.kl_coef 0.04: taken as reward.grpo.beta",
        ],
    ),
    "an older run": (
        "training: {loop_samples: 2}\nreward: {grpo: {pictures_per_sample: 3}}",
        {"reward.grpo.images_per_sample": 3},
        ["loop_samples: there is no such option any more", "pictures_per_sample 3: taken as"],
    ),
}


def read(tmp_path, text, *words):
    "The options of a file, and what is said about it."
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        config = parse_args(["--config", str(file), *words])
    return config, said.getvalue().splitlines()


@pytest.mark.parametrize("name", BLOCKS)
def test_each_block_is_taken(tmp_path, name):
    text, means, notes = BLOCKS[name]
    config, said = read(tmp_path, text)
    assert {option: option_value(config, option) for option in means} == means
    assert len(said) == len(notes)
    for part, note in zip(notes, said):
        assert part in note and "plan.yaml, line " in note


def test_the_whole_file_passes_all_checks_with_notes(tmp_path):
    whole = {}
    for name in (*list(BLOCKS)[:1], *list(BLOCKS)[2:7]):
        for section, options in yaml.safe_load(BLOCKS[name][0]).items():
            whole.setdefault(section, {}).update(options)
    config, said = read(tmp_path, yaml.safe_dump(whole, sort_keys=False))
    assert len(said) == 6 and config.data.image_size == [1024, 768]
    check_config(config)


def test_a_folder_of_ones_own_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/t2i/target_images").mkdir(parents=True)
    (tmp_path / "data/t2i/prompts.txt").write_text("a cat\n")
    config, said = read(tmp_path, BLOCKS["prompts and targets"][0])
    assert config.data.prompts_file == "data/t2i/prompts.txt" and said == []
    assert config.data.target_images_dir == "data/t2i/target_images"


def test_all_problems_of_a_file_are_told_with_their_lines(tmp_path):
    text = """\
model:
  nam: x
training:
  max_steps: ten
  seed: 99999999999999999999
  batch_size: 0
reward:
  grpo:
    kl_weigh: 0.1
    group_size: 4
    num_samples: 8
data:
  image_size: {side: 128}
  prompts_file: ""
"""
    file = tmp_path / "slips.yaml"
    file.write_text(text)
    said = refusal(parse_args, ["--config", str(file)]).splitlines()
    assert said[0] == "8 problems:"
    told = {int(line.split()[3].rstrip(":")): line for line in said[1:]}
    for line, part in {
        2: "Did you mean model.name?",
        4: "training.max_steps ten",
        5: "must be at most 9223372036854775807",
        6: "must be at least 1",
        9: "reward.grpo.kl_weigh: no such option",
        11: "set already",
        13: "[height, width]",
        14: "is empty",
    }.items():
        assert part in told[line], line


def test_old_names_as_words_are_taken():
    for word in ("--group_size", "--num_generations", "--reward.grpo.num_samples"):
        assert parse_args([word, "5"]).reward.grpo.group_size == 5
    assert parse_args(["--kl_coef", "5"]).reward.grpo.beta == 5


OWN = {"model.torch_dtype": "bfloat16", "data.image_size": "1024", "training.learning_rate": "1e-5"}
PUBLISHED = ["--model.name", "zai-org/GLM-Image"]


def test_a_large_model_needs_options_of_its_own(tmp_path):
    said = refusal(check_config, parse_args(PUBLISHED))
    assert all(name in said for name in OWN) and "configs/real_ar_80gb.yaml" in said
    for missing in OWN:
        words = [w for name, v in OWN.items() if name != missing for w in (f"--{name}", v)]
        said = refusal(check_config, parse_args([*PUBLISHED, *words]))
        assert missing in said and not any(name in said for name in OWN if name != missing)
    mine = "".join(
        f"{n.partition('.')[0]}: {{{n.partition('.')[2]}: {v}}}\n" for n, v in OWN.items()
    )
    (tmp_path / "mine.yaml").write_text(mine)
    check_config(parse_args([*PUBLISHED, "--config", str(tmp_path / "mine.yaml")]))


def test_auto_is_a_device_and_no_other_value():
    "Elsewhere it is a word like any other, such as a folder's name."
    assert parse_args(["--model.device", "auto"]).model.device is None
    assert parse_args(["--model.name", "auto"]).model.name == "auto"
