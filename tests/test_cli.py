"""The command line as a process sees it: mistakes, signals, stopping and going on. What one
notebook can show is tested there."""

import importlib
import os
import re
import shlex
import shutil
import signal
import time
import typing
from pathlib import Path

import pytest
import torch
from helpers import (
    PROMPTS,
    ROOT,
    contents,
    counting_reward,
    evaluate_main,
    files,
    load_weights,
    main,
    pretend_installed,
    read_json,
    read_jsonl,
    resume,
    same_tensors,
    small,
    step_of,
    steps,
    without_images,
    without_seconds,
)
from ranks import start

from glm_grpo.__main__ import PROGRAMS
from glm_grpo.__main__ import main as list_programs
from glm_grpo.data.options import list_options
from glm_grpo.run.command_line import (
    without_other_images,
    OPTIONS,
    SHORT,
    TrainOptions,
    load_options,
    parse_args,
    read_words,
)
from glm_grpo.run.config import Config, check_config, to_yaml
from glm_grpo.run.probe import main as probe_main
from glm_grpo.run.plan import read_machine
from glm_grpo.training.optimizer import make_adamw

pytestmark = pytest.mark.usefixtures("at_root")

# Each mistake: the words of the command line, and what the message must say. FOLDER stands for
# the folder of the test. Mistakes that options alone show are in test_config.py.
MINE = "--data.prompts_file FOLDER/prompts.txt"
MISTAKES = {
    "torn YAML": ("--config FOLDER/torn.yaml", "torn.yaml, line 2"),
    "i2i without sources": (
        "--mode i2i --data.prompts_file FOLDER/free/prompts.txt",
        "source images",
    ),
    "weights that are missing": ("--reward.metrics.clip 1", "reward.models.clip"),
    "a server that is not there": (
        "--reward.metrics.far 1 --reward.remote.far http://127.0.0.1:9",
        "127.0.0.1:9",
    ),
    "no such reward": (f"{MINE} --reward.functions FOLDER/no_reward.py:green", "There are: other"),
    "no such prompts": ("--data.prompts_file FOLDER/none.txt", "none.txt"),
    "an empty line": ("--data.prompts_file FOLDER/gap.txt", "line 2"),
    "a free prompt under the scene check": (
        "--data.prompts_file FOLDER/free/prompts.txt",
        "line 2",
    ),
    "a broken image": (f"{MINE} --data.target_images_dir FOLDER/bad", "1.png"),
    "a folder that is no model": ("--model.name FOLDER", "model_index.json"),
    "no such model": ("--model.name FOLDER/none", "none"),
    "no such device": ("--model.device cuda:77", "cuda:77"),
    "no such layer": ("--model.lora_target_modules [nose]", "nose"),
    "no checkpoint at all": (
        "--resume latest --output_dir FOLDER/old_run",
        "no complete checkpoint",
    ),
    "a checkpoint that is none": ("--resume FOLDER/bad", "/bad: no complete checkpoint"),
    "a folder with a run in it": ("--output_dir FOLDER/old_run", "--resume"),
}


@pytest.fixture
def wrong_files(folder):
    "Files that the mistakes name."
    texts = {
        "gap.txt": "a cat\n\na dog\n",
        "free/prompts.txt": "a cat in the middle on a red ground\na landscape with trees\n",
        "torn.yaml": "training: [1\n",
        "no_reward.py": "def other(images): return 0\n",
        "old_run/metrics.jsonl": "",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    image = (folder / "target_images/0.png").read_bytes()
    (folder / "bad").mkdir()
    for i in range(3):
        (folder / "bad" / f"{i}.png").write_bytes(image[:60] if i == 1 else image)
    return folder


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_once_and_leave_nothing(wrong_files, capfd, name):
    "One message with the remedy, status 2, no traceback, nothing written."
    command, says = MISTAKES[name]
    words = shlex.split(command.replace("FOLDER", str(wrong_files)))
    if "--output_dir" not in words:
        words += ["--output_dir", str(wrong_files / "new")]
    there, outputs = files(wrong_files), list(Path("outputs").glob("*"))
    status = main(*words)
    text = capfd.readouterr()
    said = [line for line in text.err.splitlines() if line.strip()]
    assert status == 2
    assert len(said) == 1 and said[0].startswith("error: ")
    assert says in said[0]
    assert "Traceback" not in text.err + text.out
    assert files(wrong_files) == there and not (wrong_files / "new").exists()
    assert list(Path("outputs").glob("*")) == outputs


def test_help_shows_the_options_to_start_with(capsys):
    assert main("--help") == 0
    text = capsys.readouterr().out
    named = re.findall(r"^  --(\S+)", text, re.MULTILINE)
    assert 10 <= len(named) <= 12 and {*named} <= {*OPTIONS, *SHORT, "config"}
    assert "--help all" in text and text.count("\n") < 42
    examples = re.findall(r"^  python -m glm_grpo.train (.*)$", text, re.MULTILINE)
    for example in examples:
        typed = read_words(shlex.split(example), TrainOptions)
        typed.pop("resume", None)  # a run that is not there
        check_config(load_options(typed))
    assert len(examples) == 3


def test_help_all_describes_every_option(capsys):
    assert main("--help", "all") == 0
    text = "".join(capsys.readouterr().out.split())
    for name, option in list_options(Config).items():
        assert f"--{name}" in text, name
        assert "".join(option.metadata["help"].split()) in text, name
        for kind in (option.type, *typing.get_args(option.type)):
            choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
            assert all(choice in option.metadata["help"] for choice in choices), name
    assert all(f"--{short}" in text for short in SHORT)


def test_the_package_lists_its_programs_and_each_describes_itself(capsys):
    "One line for each file that runs; `python -m glm_grpo train` is told how it is written."
    guard = 'if __name__ == "__main__"'
    files = [path for path in (ROOT / "glm_grpo").glob("**/*.py") if guard in path.read_text()]
    names = {path.stem if path.stem != "__main__" else path.parent.name for path in files}
    assert {*PROGRAMS} == names - {"glm_grpo"}
    # a thread that computes does not abort them at their end: tests/test_rewards_weighted.py
    assert sum("    leave(main())\n" in path.read_text() for path in files) == len(PROGRAMS)
    assert list_programs([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[: len(names) - 1]] == [
        f"glm_grpo.{n}" for n in PROGRAMS
    ]
    assert list_programs(["train", "--num_steps", "3"]) == 2
    assert "write python -m glm_grpo.train" in capsys.readouterr().err
    for name in PROGRAMS:
        module = "bench.program" if name == "bench" else name
        assert importlib.import_module(f"glm_grpo.{module}").main(["--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: python -m glm_grpo.{name} ") and "(default: " in text
        assert importlib.import_module(f"glm_grpo.{module}").main(["--outputdir", "x"]) == 2
        assert "--outputdir: no such option." in capsys.readouterr().err


def test_print_config_can_be_read_again(capsys, tmp_path):
    assert main("--print_config", "--num_steps", "7") in (0, None)
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    read = parse_args(["--config", str(tmp_path / "c.yaml")])
    assert read == parse_args(["--num_steps", "7"])


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "configs").glob("*.yaml")))
def test_configs_load(name, monkeypatch):
    pretend_installed(monkeypatch, "bitsandbytes", True)  # a configuration needs it, tests do not
    config = parse_args(["--config", f"configs/{name}.yaml"])
    check_config(config)
    if name == "grpo_training":
        comment, text = Path(f"configs/{name}.yaml").read_text().split("\n", 1)
        changed = "the defaults have changed: copy --print_config"
        assert comment.startswith("#") and text == to_yaml(Config()), changed
    if name.startswith("real_"):
        model = config.model
        assert (model.name, model.torch_dtype) == ("zai-org/GLM-Image", "bfloat16")
        small = "24gb" in name
        assert model.lora == ("full" not in name) and model.offload >= small
        assert config.data.image_size == (512 if small else 1024)
        assert config.training.batch_size % read_machine(config.training.machine)[0] == 0


SET_BY_HAND = "--model.torch_dtype bfloat16 --training.learning_rate 1e-5".split()


def test_dry_run_counts_and_leaves_nothing(folder, capsys):
    there = files(folder)
    words = small(folder, "--num_steps", 6, "--output_dir", folder / "run")
    assert main("--dry_run", *words) == 0
    text = capsys.readouterr().out
    for said in ("6 steps", "12 images", "6 optimizer steps", "train: ar 10,240", "memory"):
        assert said in text
    assert "      time  not known before a step was taken" in text and "WARNING" not in text
    assert files(folder) == there and not (folder / "run").exists()
    for wrong, says in (
        (["--model.name", f"{folder}/none"], "none"),
        (["--model.lora_target_modules", "[nose]"], "nose"),
        (["--training.ema_decay", "1"], "ema_decay"),
        (["--model.name", "some/model"], "made for the tiny model"),
        (["--model.name", "some/model", *SET_BY_HAND], "hf download some/model"),
    ):
        assert main("--dry_run", *words, *wrong) == 2
        assert says in capsys.readouterr().err
    assert files(folder) == there


def test_all_programs_warn_of_defaults_that_fit_the_tiny_model_alone(folder, tmp_path, capsys):
    "Before they load a model; the files in configs/ have other values."
    mine = ["--data.prompts_file", without_images(folder) / "prompts.txt"]
    mine += ["--reward.functions", f"{folder}/green.py:green"]
    part = tmp_path / "large/vision_language_encoder"
    part.mkdir(parents=True)
    (part / "config.json").write_text('{"text_config": {"hidden_size": 4096}}')
    words = ["--model.torch_dtype", "bfloat16", "--data.image_size", 1024]
    words += ["--training.learning_rate", 1e-4, "--output_dir", tmp_path / "out"]
    recipe = ["--config", "configs/real_ar_80gb.yaml"]

    def probe(*words):
        return probe_main([str(word) for word in words])

    for program, number in ((main, 2), (evaluate_main, 1), (probe, 1)):
        for given, expected in ((words, number), (recipe, 0)):
            assert program("--model.name", part.parent, *mine, *given) == 2
            said = capsys.readouterr()
            assert "model_index.json is missing" in said.err
            assert said.out.count("is made for the tiny model") == expected


def test_a_run_and_a_dry_run_warn_of_many_passes(folder, capsys):
    (folder / "green.py").write_text(counting_reward("1 / (3 - len(calls))"))
    words = small(folder, "--num_steps", 3000, "--output_dir", folder / "run")
    for program, status in ((["--dry_run"], 0), ([], 2)):  # the reward ends the run
        assert main(*words, *program) == status
        text = capsys.readouterr().out
        assert text.count("WARNING  1,000 passes over 3 prompts: ") == 1
        assert "(--num_steps 300 makes 100 passes)" in text


def test_other_prompts_come_without_the_images_of_those_before():
    images = {"data.target_images_dir": "a/target_images"}
    images |= {"data.eval_target_images_dir": "b/target_images"}
    run = {"data.prompts_file": "a/a.txt", "data.eval_prompts_file": "b/b.txt"} | images
    for kind in ("", "eval_"):
        name = f"data.{kind}prompts_file"
        before, _ = without_other_images([run, {name: "c/c.txt"}])
        assert run.keys() - before.keys() == {f"data.{kind}target_images_dir"}
    for same in ({"data.prompts_file": "./a/../a/a.txt"}, {}):
        assert without_other_images([{}, run, same]) == [{}, run, same]
    chosen = run | {"data.target_images_dir": "images"}
    assert without_other_images([chosen, {"data.prompts_file": "c/c.txt"}])[0] == chosen


def test_run_and_dry_run_tell_of_apostrophes_that_are_drawn_as_quotes(folder, tmp_path, capsys):
    lines = ["the cat's bed and the dog's ball", "the cat's bed", "a sign that says 'OPEN'"]
    (folder / "prompts.txt").write_text("\n".join(lines))
    words = small(folder, "--num_steps", 1)
    for dry in (["--dry_run"], ["--output_dir", tmp_path / "run"]):
        assert main(*words, *dry) == 0
        (note,) = (line for line in capsys.readouterr().out.splitlines() if "apostroph" in line)
        assert "in 1 of 3 " in note and "'s bed and the dog' in: the cat's bed and" in note
    words = ["--trust_run_code", "--training.eval_samples", 1]
    assert evaluate_main("--checkpoint", tmp_path / "run", *words) == 0
    assert note in capsys.readouterr().out


def test_a_dry_run_plans_for_the_machine_of_a_recipe(folder, capsys):
    words = ["--data.prompts_file", without_images(folder) / "prompts.txt"]  # nothing to resize
    words += ["--dry_run", "--config", "configs/real_ar_8gpu.yaml", "--training.machine"]
    assert main(*words[:-1]) == 0
    assert "on each of 8 x H100" in capsys.readouterr().out
    for machine, says in (
        ("8 x RTX 4090", "does not fit"),
        ("5 x H100", "a multiple of 5"),
        ("8 x H1000", "training.machine 8 x H1000"),
    ):
        assert main(*words, machine) == 2
        assert says in capsys.readouterr().err


RICH = {
    "--training.warmup_steps": 1,
    "--training.ema_decay": 0.5,
    "--training.mini_batches": 2,
    "--training.updates_per_rollout": 2,
    "--reward.grpo.group_size": 3,
    "--training.learning_rate": 0.01,
    "--reward.grpo.beta": 0.01,
}
BFLOAT = {  # all weights in bfloat16: the steps go to float32 copies
    "--model.torch_dtype": "bfloat16",
    "--model.offload": "true",
    "--reward.grpo.equal": "drop",
}
EIGHT_BIT = {**BFLOAT, "--training.optimizer": "adamw_8bit"}
NEEDS_8BIT = "pip install 'glm_grpo[8bit]'"


@pytest.mark.parametrize(
    "component, lora, options, weight_files",
    [
        pytest.param("ar", True, RICH, 2, id="ar-lora-rich"),
        pytest.param("ar", False, BFLOAT, 2, id="ar-full-bfloat16"),
        pytest.param("dit", False, {}, 1, id="dit-full"),
        pytest.param("dit", False, EIGHT_BIT, 2, id="dit-full-8bit"),
    ],
)
def test_stop_and_go_on_is_the_straight_run_bit_for_bit(
    folder, component, lora, options, weight_files
):
    """2 of 4 steps, in the middle of the second epoch of 3 prompts, resume, 2 steps == 4 steps:
    metrics (with the rate, which falls) and all weights. Both halves: below, in each mode."""
    if options is EIGHT_BIT:
        pytest.importorskip("bitsandbytes", reason=NEEDS_8BIT)
    straight, halves = folder / "straight", folder / "halves"
    words = ["--num_steps", 4, "--training.save_interval", 2, "--model.component", component]
    words += ["--model.lora", str(lora).lower(), "--rollout.num_inference_steps", 2]
    words += [word for pair in options.items() for word in pair]
    assert main(*small(folder, *words, "--output_dir", straight)) == 0
    shutil.copytree(straight, halves)
    for name in ("checkpoint_final", "checkpoint_step_4"):
        shutil.rmtree(halves / "checkpoints" / name)
    assert resume("latest", "--output_dir", halves) == 0
    assert without_seconds(halves) == without_seconds(straight)
    assert steps(halves) == [1, 2, 3, 4]
    wanted = load_weights(straight / "checkpoints/checkpoint_final")
    found = load_weights(halves / "checkpoints/checkpoint_final")
    earlier = load_weights(halves / "checkpoints/checkpoint_step_2")
    assert len(wanted) == weight_files
    for name, tensors in wanted.items():
        assert same_tensors(tensors, found[name])
        assert tensors.keys() == earlier[name].keys()
        changed = [k for k in tensors if not torch.equal(tensors[k], earlier[name][k])]
        assert changed, "nothing was learnt, so nothing was tested"
    assert not [p for p in files(folder) if p.name.startswith(".") or p.suffix == ".part"]


def test_the_newest_the_last_few_and_the_best_checkpoint_stay(folder, capsys):
    run = folder / "run"
    checkpoints = run / "checkpoints"
    words = ["--num_steps", 2, "--training.save_interval", 1, "--training.keep_checkpoints", 1]
    words += ["--training.eval_interval", 1, "--training.eval_samples", 1]
    words += ["--training.eval_prompts", 1]
    words += ["--training.learning_rate", 0.02]

    def names():
        return sorted(path.name for path in checkpoints.iterdir())

    assert main(*small(folder, *words, "--output_dir", run)) == 0
    history = read_jsonl(run / "eval_history.jsonl")[1:]
    best = max(history, key=lambda line: line["reward_mean"])["step"]
    assert names() == ["checkpoint_best", "checkpoint_final", "checkpoint_step_2"]
    assert step_of(checkpoints / "checkpoint_best") == best
    capsys.readouterr()
    assert resume("latest", "--output_dir", run, "--num_steps", 3) == 0
    assert "steps 3 to 3" in capsys.readouterr().out
    assert names()[2:] == ["checkpoint_step_3"]
    assert step_of(checkpoints / "checkpoint_final") == 3


def three_steps(kind):
    "Of AdamW, on 8192 numbers -> (the numbers, bytes of its memory)."
    weight, g = torch.nn.Parameter(torch.ones(8192)), torch.Generator().manual_seed(0)
    groups = [{"params": [weight], "lr": 1e-2, "name": "ar"}]
    optimizer = make_adamw(kind, groups, weight_decay=0.1)
    for _ in range(3):
        weight.grad = torch.randn(8192, generator=g)
        optimizer.step()
    memory = [x for x in optimizer.state[weight].values() if isinstance(x, torch.Tensor)]
    return weight.detach(), sum(x.numel() * x.element_size() for x in memory)


def test_adamw_in_8_bits_is_nearly_adamw():
    pytest.importorskip("bitsandbytes", reason=NEEDS_8BIT)
    exact, large = three_steps("adamw")
    rounded, little = three_steps("adamw_8bit")
    assert 0 < (rounded - exact).abs().mean() < 1e-3 < (exact - 1).abs().mean()
    assert little < large / 3.5


def test_resume_refuses_another_model_and_says_what_differs(folder, capsys):
    run = folder / "run"
    assert main(*small(folder, "--num_steps", 1, "--output_dir", run)) == 0
    capsys.readouterr()
    before = contents(run)
    for words, says in (
        ("--model.name other/GLM-Image", "model small-glm-image"),
        ("--num_steps 1", "larger --num_steps"),
        ("--num_steps 2 --model.lora_rank 3", "lora_rank 16"),
        ("--num_steps 2 --model.lora false", "lora True"),
        ("--num_steps 2 --training.batch_size 2", "batch_size 1"),
    ):
        assert resume(run, *words.split()) == 2
        assert says in capsys.readouterr().err
    assert contents(run) == before


def test_ctrl_c_saves_and_resume_goes_on(folder):
    run, log = folder / "run", folder / "log"
    process = start(log, {}, main, small(folder, "--num_steps", 5000, "--output_dir", run))
    limit = time.monotonic() + 300
    try:
        while not (run / "metrics.jsonl").exists() or len(steps(run)) < 2:
            assert process.is_alive() and time.monotonic() < limit, log.read_text()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
    finally:
        process.kill()
    saved, text = run / "checkpoints" / "checkpoint_interrupt", log.read_text()
    assert process.exitcode == 130
    assert "Traceback" not in text and f"--resume {saved}" in text
    done = step_of(saved)
    assert steps(run) == list(range(1, done + 1))
    assert not (run / "checkpoints" / "checkpoint_final").exists()
    assert resume(saved, "--num_steps", done + 1) == 0
    assert steps(run) == list(range(1, done + 2))


def test_sigterm_saves_too(folder):
    "Here the signal comes from inside, in the second step's reward."
    run = folder / "run"
    stop = "len(calls) == 4 and os.kill(os.getpid(), signal.SIGTERM)"
    (folder / "green.py").write_text(counting_reward(stop, "import os, signal"))
    before = signal.getsignal(signal.SIGTERM)
    assert main(*small(folder, "--num_steps", 50, "--output_dir", run)) == 143
    assert step_of(run / "checkpoints/checkpoint_interrupt") == 2 == steps(run)[-1]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_reward_that_breaks_later_loses_nothing(folder, capsys):
    run = folder / "run"
    broken = counting_reward("1 / (4 - len(calls))")
    (folder / "green.py").write_text(broken)
    assert main(*small(folder, "--num_steps", 50, "--output_dir", run)) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    for said in (
        "reward green",
        "ZeroDivisionError",
        "green.py, line 6",
        "checkpoint_interrupt",
    ):
        assert said in message
    assert steps(run) == [1] and (run / "checkpoints/checkpoint_interrupt").is_dir()


def test_a_reward_that_hangs_is_named(folder, capsys):
    sleep = "len(calls) > 2 and time.sleep(300)"
    (folder / "green.py").write_text(counting_reward(sleep, "import time"))
    words = ["--num_steps", 2, "--reward.time_limit", 1, "--output_dir", folder / "run"]
    begun = time.monotonic()
    assert main(*small(folder, *words)) == 2
    assert "reward green has not answered within 1 s" in capsys.readouterr().err
    assert time.monotonic() - begun < 200


DARK = """\
def dark(images, prompts):
    "Nothing to score where there are two of a thing."
    darkness = [1 - image.mean().item() for image in images]
    return [float("nan") if "two" in p else d for d, p in zip(darkness, prompts)]
"""


def run_with_two_rewards(folder):
    "Two rewards of the user's, one of which has nothing to score in some images."
    (folder / "kit").mkdir()
    (folder / "kit/dark_things.py").write_text(DARK)
    words = ["--num_steps", 2, "--training.save_interval", 1, "--training.eval_interval", 1]
    words += ["--training.eval_samples", 1, "--training.batch_size", 3]
    words += ["--training.learning_rate", 0.01, "--reward.normalise", "group"]
    words += ["--training.ema_decay", 0.5]
    words += ["--reward.functions", f"[{folder}/green.py:green,kit.dark_things:dark]"]
    words += ["--reward.metrics", "{dark: 0.5, jpeg_compressibility: 0}"]
    assert main(*small(folder, *words, "--output_dir", folder / "run")) == 0
    return folder / "run"


def test_parts_are_logged_and_evaluations_during_training_can_be_repeated(
    folder, capsys, monkeypatch
):
    "Each step's line, the history, and averages of a checkpoint compared with those of another."
    monkeypatch.syspath_prepend(folder)
    run = run_with_two_rewards(folder)
    capsys.readouterr()
    for line in without_seconds(run):
        assert {"reward/green", "reward/dark"} < set(line) and line[
            "reward/jpeg_compressibility"
        ] < 0
        assert 0 < line["image/brightness"] < 1 and line["image/diversity"] > 0
        assert line["grad_norm"] > 0
    history = read_jsonl(run / "eval_history.jsonl")
    result = read_json(run / "eval.json")
    assert [line["step"] for line in history] == [0, 1, 2]
    assert history[0]["rewards"] == result["before"]["rewards"]
    assert history[2]["rewards"] == result["after"]["rewards"]
    assert {"dark", "green", "mse", "jpeg_incompressibility"} <= set(history[0]["metrics"])
    missing = [row[0] is None for row in history[0]["values"]["dark"]]
    assert missing == ["two" in prompt for prompt in PROMPTS]
    step_1 = run / "checkpoints/checkpoint_step_1"
    weights = load_weights(run / "checkpoints/checkpoint_final")
    own, mean = weights["adapter_model.safetensors"], weights["ema/adapter_model.safetensors"]
    assert not same_tensors(own, mean)
    assert evaluate_main("--trust_run_code", "--checkpoint", run, "--baseline", step_1) == 0
    again = read_json(run / "eval_checkpoint_final" / "eval.json")
    assert again["before"]["rewards"] == history[1]["rewards"]
    assert again["after"]["rewards"] == history[2]["rewards"]
    assert again["before"]["values"] == history[1]["values"]
    page = (run / "eval_checkpoint_final" / "page.html").read_text()
    assert "data:image/" in page and "jpeg_incompressibility" in page and "://" not in page
    text = capsys.readouterr().out
    assert "brightness" in text
    assert "not measured: scene:" not in text and "not measured: edit_check:" in text


@pytest.mark.parametrize("mode", ["t2i", "i2i"])
def test_both_halves_in_each_mode_train_and_go_on_bit_for_bit(folder, mode, request):
    "1 of 2 steps, resume, 1 step == 2 steps; before the update every ratio is 1."
    if mode == "i2i":
        request.getfixturevalue("two_threads")
    straight, halves = folder / "straight", folder / "halves"
    words = ["--num_steps", 2, "--training.save_interval", 1, "--rollout.num_inference_steps", 2]
    words += ["--model.component", "both", "--training.learning_rate", 1e-3]
    words += ["--model.lora_target_modules", "null"]  # queries and keys alone change no image here
    assert main(*small(folder, *words, "--output_dir", straight, mode=mode)) == 0
    lines = without_seconds(straight)
    for line in lines:
        for half in ("ar", "dit"):
            assert abs(line[f"{half}/ratio_mean"] - 1) < 1e-6
            assert line[f"{half}/ratio_std"] < 1e-6
            assert line[f"{half}/grad_norm"] > 0
    shutil.copytree(straight, halves)
    shutil.rmtree(halves / "checkpoints/checkpoint_final")
    assert resume(halves / "checkpoints/checkpoint_step_1") == 0
    assert without_seconds(halves) == lines
    wanted = load_weights(straight / "checkpoints/checkpoint_final")
    found = load_weights(halves / "checkpoints/checkpoint_final")
    assert len(wanted) == 2
    for name, tensors in wanted.items():
        assert same_tensors(tensors, found[name])
        assert any(tensor.any() for key, tensor in tensors.items() if "lora_B" in key)
