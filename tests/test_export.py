"""An export is what was trained, for those who do not have this package."""

import ast
import copy
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, main, make_folder, small, step_of, told
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from glm_grpo import GLMImageWrapper
from glm_grpo.data.basics import refusal
from glm_grpo.data.rollout import RolloutOptions
from glm_grpo.model.card import HALVES
from glm_grpo.model.loading import load_pipeline, weights_digest
from glm_grpo.model.tokens import large_grid_tokens, upsample_tokens
from glm_grpo.run import export, merge, served
from glm_grpo.run.merge import Trained
from glm_grpo.training.options import with_options

TINY = ROOT / "data/tiny-glm-image"
PROMPT = "a cat in the middle on a red ground"
LORA = {"rank": 16, "alpha": 32.0}
# component, adapter (None: all weights)
KINDS = {f"{c}-{'lora' if a else 'full'}": (c, a) for c in HALVES for a in (LORA, None)}
KINDS["both-lora"] = "both", LORA
OPENED = ("both-lora", "ar-full", "dit-full")


def export_main(*words):
    "`python -m glm_grpo.export` in this process -> exit status."
    from glm_grpo.export import main

    return main([str(word) for word in words])


def trained_model(component, lora, seed=0, size=0.01):
    "A wrapper whose weights have changed as if it had been trained."
    model = GLMImageWrapper(TINY, component, "float32", "cpu", copy.copy(lora))
    generator = torch.Generator().manual_seed(seed)
    for p in model.get_trainable_parameters():
        if lora is None or not p.any():  # B of an adapter starts at zero
            p.data += size * torch.randn(p.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "One step of both halves on edits, which have few tokens, with moving averages."
    folder = make_folder(tmp_path_factory.mktemp("run"))
    words = ["--model.component", "both", "--model.device", "cpu", "--num_steps", 2]
    words += ["--training.ema_decay", 0.5, "--training.learning_rate", 0.01, "--rollout.top_p", 0.9]
    words += ["--training.eval_samples", 1, "--training.eval_prompts", 1]
    words += ["--rollout.num_inference_steps", 2]
    assert main(*small(folder, "--model.name", TINY, *words, "--output_dir", folder / "run")) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def exports(run, tmp_path_factory):
    "All kinds of checkpoints, their exports in float32, and what a stranger made of some."
    top = tmp_path_factory.mktemp("exports")
    note = json.loads((run / "checkpoints/checkpoint_final/trainer.json").read_text())
    note["options"] |= {"num_inference_steps": 2, "temperature": 0.9, "top_p": 0.75, "mode": "t2i"}
    note["options"] |= {"height": 128, "width": 128}  # at 64 the model itself ends too early
    ours = {}
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1024, (1, 260), generator=generator)
    options = RolloutOptions(2, 1.5, noise_level=0.0)
    for name, (component, lora) in KINDS.items():
        model, checkpoint = trained_model(component, lora), top / f"checkpoint_{name}"
        model.save_pretrained(checkpoint)
        made_by = note["made_by"] | {"component": component, "mode": "t2i"}
        made_by["lora"] = lora and vars(model.lora)
        text = json.dumps(note | {"made_by": made_by, "base": model.digests})
        (checkpoint / "trainer.json").write_text(text)
        trained = Trained.find(str(checkpoint), str(TINY))
        export.write_export(trained, top / f"GLM-Image-{name}", dtype=torch.float32)
        ours[name] = model
    apart = Trained.find(str(top / "checkpoint_dit-lora"), str(TINY))
    export.write_export(apart, top / "GLM-Image-apart", "false")
    model = ours["both-lora"]
    rollout = model.generate_with_tracking([PROMPT], height=64, width=64, options=options)
    latents = rollout.initial_latents
    large = upsample_tokens(
        large_grid_tokens(tokens, rollout.tokens.grids), *rollout.tokens.grids[-1]
    )
    inputs = {"exports": [f"GLM-Image-{name}" for name in OPENED], "base": str(TINY)}
    inputs |= {"adapters": "GLM-Image-both-lora", "card": "GLM-Image-apart"}
    inputs |= {"prompt": PROMPT, "latents": latents}
    inputs |= {"token_ids": tokens[0, :8].tolist(), "prior_token_ids": large}
    torch.save(inputs, top / "inputs.pt")
    program = ROOT / "tests/programs/open_export.py"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(
        [sys.executable, "-I", program, top], cwd=top, check=True, env=environment, timeout=300
    )
    answers = torch.load(top / "answers.pt", weights_only=True)
    return top, ours, answers, rollout, tokens, large


def our_answers(model, rollout, tokens, large):
    "Logits of the first tokens, and the image, by this package."
    from dataclasses import replace

    from glm_grpo.model.denoise import sample_latents
    from glm_grpo.model.latents import decode_latents
    from glm_grpo.model.sampler import image_inputs
    from glm_grpo.model.scoring import score_tokens

    given = replace(rollout, token_ids=tokens, tokens=replace(rollout.tokens, kept=None))
    with torch.no_grad():
        inputs = given.tokens.prompt_inputs
        scores = score_tokens(model.ar, inputs, [0], tokens, temperature=1.0)[:, :8]
        latents = sample_latents(model.pipe, image_inputs(given), rollout.initial_latents)
        return scores[0], decode_latents(model.pipe, latents["latents"])


def test_a_stranger_makes_the_same(exports):
    "Log-probs and images of given tokens: merged in float32, and with the adapters apart."
    top, ours, answers, rollout, tokens, large = exports
    names = {f"GLM-Image-{name}": name for name in OPENED} | {"adapters": "both-lora"}
    made = {}
    for theirs, name in names.items():
        scores, image = our_answers(ours[name], rollout, tokens, large)
        found = answers[theirs]
        logprobs = found["logits"][:, :1024].log_softmax(-1).gather(1, tokens[0, :8, None])[:, 0]
        assert (logprobs - scores).abs().max() < (1e-4 if theirs != "adapters" else 3e-5), theirs
        assert (found["image"] - image).abs().max() < 1e-5, theirs
        made[name] = (logprobs, found["image"])
    assert (made["ar-full"][0] - made["dit-full"][0]).abs().max() > 0.05
    assert (made["ar-full"][1] - made["dit-full"][1]).abs().max() > 0.01
    assert answers["dtypes"] == ["torch.float32"] * 4  # the small model, opened without a dtype
    assert answers["size"] == (128, 128)  # the lines of the card


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_parts_are_those_of_the_base(exports, kind):
    folder = exports[0] / f"GLM-Image-{kind}"
    component, lora = KINDS[kind]
    halves = ["ar", "dit"] if component == "both" else [component]
    for part in ("vision_language_encoder", "transformer", "vae", "text_encoder"):
        [file] = (folder / part).glob("*.safetensors")
        with safe_open(file, "pt") as written, safe_open(TINY / part / file.name, "pt") as base:
            assert {*written.keys()} == {*base.keys()}
        trained = part in [HALVES[half][0] for half in halves]
        assert os.path.samefile(file, TINY / part / file.name) != trained
    folders = sorted(path.name for path in folder.glob("lora/*"))
    extra = ["dit-diffusers"] if "dit" in halves else []
    assert folders == (sorted([*halves, *extra]) if lora else [])
    for path in folder.glob("lora/*"):
        assert len([*path.glob("*.safetensors")]) == len([*path.glob("*.bin"), 1])
    for half in halves if lora else ():
        settings = json.loads((folder / "lora" / half / "adapter_config.json").read_text())
        names = getattr(
            exports[1][kind].lora, "target_modules" if half == "ar" else "dit_target_modules"
        )
        assert settings["target_modules"] == list(names)
        assert type(settings["lora_alpha"]) is int
        assert settings["base_model_name_or_path"] == f"tiny-glm-image/{HALVES[half][0]}"
    readme = (folder / "README.md").read_text()
    named = re.findall(r"(?<=[/`])lora/\w[\w/.-]*", readme)
    assert named or not lora
    for name in named:  # also in the commands of other programs
        assert (folder / name).exists(), name
    assert ("--enable-lora" in readme) == bool(lora and "ar" in halves)
    assert "torch_dtype" not in readme and '.to("cuda")' not in readme


def test_nothing_of_this_machine_is_handed_on(exports, run):
    top = exports[0]
    checkpoint = run / "checkpoints/checkpoint_final"
    for folder in (*(top / f"GLM-Image-{kind}" for kind in KINDS), checkpoint):
        for file in (path for path in folder.rglob("*") if path.is_file()):
            assert file.stat().st_mode & 0o044 == 0o044, file
            if folder != checkpoint:
                assert file.name not in ("optimizer.pt", "trainer.json")
            if file.suffix in (".json", ".md") and folder != checkpoint:
                text = file.read_text()
                assert str(ROOT) not in text and str(top.parent) not in text, file
    readme = (top / "GLM-Image-dit-lora/README.md").read_text()
    assert "[More Information Needed]" not in readme + (checkpoint / "README.md").read_text()
    assert [path.name for path in checkpoint.rglob("*.pt")] != []
    assert not [*checkpoint.glob("*.pt")] and not (checkpoint / "ar/README.md").exists()
    config = json.loads((checkpoint / "ar/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == f"{TINY}/vision_language_encoder"
    assert (type(config["target_modules"]), type(config["lora_alpha"])) == (list, int)


def test_averages_sampling_and_the_check(run, tmp_path, capsys):
    "A run with averages exports them, and its sampling; another sampling is no longer its."
    to = tmp_path / "GLM-Image-run"
    assert export_main(run, "--to", to, "--dtype", "float32", "--check") == 0
    said = capsys.readouterr().out
    assert "checkpoint_final/ema, 2 steps" in said and "is what was trained" in said
    assert "vision_language_encoder: the training changed its weights by" in said
    final = run / "checkpoints/checkpoint_final"
    name, file = "adapter_model.safetensors", to / "lora/ar/adapter_model.safetensors"
    raw, mean, written = (
        load_file(p) for p in (final / "ar" / name, final / "ema/ar" / name, file)
    )
    same = [all(torch.equal(written[k], x) for k, x in given.items()) for given in (raw, mean)]
    assert same == [False, True]
    settings = to / "vision_language_encoder/generation_config.json"
    sampling = json.loads(settings.read_text())
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (3.0, 0.9, 1032)
    readme = (to / "README.md").read_text()
    assert "temperature 3.0, top_p 0.9" in readme and "change them there" in readme
    assert (
        "| on training prompts, 64 x 64 pixels | before | after |\n|---|---|---|\n| reward |"
        in readme
    )
    assert "before_after.png" in readme and (to / "before_after.png").is_file()
    assert "--training.ema_decay 0.5" in readme and str(run.parent) not in readme
    settings.write_text(json.dumps(sampling | {"temperature": 1.0}))
    assert export_main(run, "--to", to, "--check") == 2
    assert "temperature is 1.0, and 3.0 was trained" in told(capsys)
    settings.unlink()
    assert export_main(run, "--to", to, "--check") == 2
    assert "top_p is None, and 0.9 was trained" in told(capsys)


def test_a_run_in_bfloat16_is_what_was_trained(tmp_path, capsys):
    "Both sides of the check decode in the same precision, also on a CPU."
    folder = make_folder(tmp_path)
    words = ["--model.component", "both", "--model.torch_dtype", "bfloat16", "--num_steps", 1]
    words += ["--rollout.num_inference_steps", 2]
    assert main(*small(folder, *words, "--output_dir", folder / "run")) == 0
    assert export_main(folder / "run", "--to", folder / "GLM-Image-run", "--check") == 0
    assert "is what was trained" in capsys.readouterr().out


def test_the_card_says_which_prompts_were_measured(run, tmp_path):
    "Of the two prompts of this run none is held out; where some are, the card says that."
    again = shutil.copytree(run, tmp_path / "run")
    for name in ("green.py", "prompts.txt"):
        shutil.copy(run.parent / name, tmp_path)
    file, heads = again / "eval_history.jsonl", []
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for held_out in (False, True):
        changed = [json.dumps(line | {"prompts_are_held_out": held_out}) for line in lines]
        file.write_text("\n".join(changed) + "\n")
        heads.append(export.measured_rewards(Trained.find(str(again)))[0][0])
    kinds = [f"on {kind} prompts, 64 x 64 pixels" for kind in ("training", "held-out")]
    assert [head[0] for head in heads] == kinds


def test_the_card_has_a_command_and_code_that_work(run, tmp_path):
    "Of edits, and of a prompt with what Python's strings escape."
    trained = Trained.find(str(run))
    assert "--training.mode i2i" in export.training_command(trained.config)
    prompt = 'a sign "C:\\new\\x" of\ttwo words'
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    changes = {"data.eval_prompts_file": str(tmp_path / "prompts.jsonl"), "training.mode": "t2i"}
    trained.config = with_options(trained.config, changes)
    export.write_export(trained, tmp_path / "GLM-Image-mine")
    card = (tmp_path / "GLM-Image-mine/README.md").read_text(encoding="utf-8")
    blocks = [block for block in card.split("```python\n")[1:] if "pipe(" in block]
    for block in blocks:
        code = ast.parse(block.partition("```")[0])
        assert prompt in [getattr(node, "value", None) for node in ast.walk(code)]
    assert blocks


def no_logits(pipe, prompt, sources, token_ids, size):
    "In place of 272 steps of the AR."
    logits = torch.zeros(len(token_ids) + 1, 1032)
    logits[:, 0] = 50
    return logits


def test_the_check_finds_other_weights(exports, monkeypatch, tmp_path):
    "The base in place of the trained DiT."
    top = exports[0]
    trained = Trained.find(str(top / "checkpoint_dit-lora"), str(TINY))
    folder = shutil.copytree(top / "GLM-Image-dit-lora", tmp_path / "GLM-Image-wrong")
    file = "transformer/diffusion_pytorch_model.safetensors"
    shutil.copyfile(TINY / file, folder / file)
    monkeypatch.setattr(served, "token_logits", no_logits)
    lines = []
    message = refusal(served.check_export, trained, folder, lines.append, number=1)
    assert "the images of given tokens are" in message
    _, logprobs, images, *_ = lines
    assert logprobs.endswith("nats from the checkpoint's (vision_language_encoder did not train)")
    assert "which the training moved by" in images


def test_the_check_names_another_checkpoint(exports, tmp_path):
    "Of as many steps, with other weights. What an older export does not say is not asked."
    top = exports[0]
    other = shutil.copytree(top / "checkpoint_ar-lora", tmp_path / "checkpoint_other")
    file = other / "adapter_model.safetensors"
    save_file({name: 2 * x for name, x in load_file(file).items()}, file)
    folder = shutil.copytree(top / "GLM-Image-ar-lora", tmp_path / "GLM-Image-mine")
    trained = Trained.find(str(other), str(TINY))
    assert "made from another checkpoint, of 2 steps" in refusal(
        served.check_export, trained, folder
    )
    record = json.loads((folder / "export.json").read_text())
    own = Trained.find(str(top / "checkpoint_ar-lora"), str(TINY))
    assert record.pop("trained") == own.digests() != trained.digests()
    served.check_origin(own, folder)
    (folder / "export.json").write_text(json.dumps(record))
    served.check_origin(trained, folder)


def test_a_loss_is_refused(tmp_path, exports):
    "An adapter that bfloat16 swallows: with the number and two ways out."
    top = exports[0]
    small_one = shutil.copytree(top / "checkpoint_ar-lora", tmp_path / "checkpoint_small")
    file = small_one / "adapter_model.safetensors"
    weights = load_file(file)
    scaled = {name: x * (0.01 if "lora_B" in name else 1) for name, x in weights.items()}
    save_file(scaled, file)
    trained = Trained.find(str(small_one), str(TINY))
    to = tmp_path / "GLM-Image-small"
    message = refusal(export.write_export, trained, to)
    assert "% of what was trained" in message and "--dtype float32" in message
    assert "--merge false" in message and not to.exists()
    lost = export.write_export(trained, to, "true")["ar"]
    assert lost.share > 0.7
    assert export.write_export(trained, tmp_path / "wide", dtype=torch.float32)["ar"].share < 1e-3
    export.write_export(trained, tmp_path / "apart", "false")
    part = "vision_language_encoder/model.safetensors"
    assert os.path.samefile(tmp_path / "apart" / part, TINY / part)
    large = Trained.find(str(top / "checkpoint_ar-lora"), str(TINY))
    assert export.write_export(large, tmp_path / "large")["ar"].share < 0.3
    assert "trained all weights" in refusal(
        export.write_export,
        Trained.find(str(top / "checkpoint_ar-full"), str(TINY)),
        tmp_path / "x",
        "false",
    )


def test_alpha_becomes_a_whole_number(tmp_path):
    "The difference goes into B."
    checkpoint = tmp_path / "checkpoint"
    trained_model("dit", {"rank": 4, "alpha": 6.5}).save_pretrained(checkpoint)
    update = merge.Update("dit", checkpoint, lora=True)
    update.check(merge.weight_slices(TINY / "transformer"), TINY)
    merge.write_adapters([update], tmp_path / "lora", "GLM-Image", None)
    again = merge.Update("dit", tmp_path / "lora/dit", lora=True)
    config = json.loads((tmp_path / "lora/dit/adapter_config.json").read_text())
    assert (config["lora_alpha"], update.options["alpha"]) == (4, 6.5)
    for name, (_, weight) in merge.weight_slices(TINY / "transformer").items():
        old = weight[:]
        was, now = update.new(name, old), again.new(name, old)
        assert (was is None and now is None) or torch.allclose(was, now, atol=1e-6)


def older(checkpoint):
    "As version 0.6 wrote it: everything in one folder, layers as a regular expression."
    for file in (checkpoint / "state").iterdir():
        file.rename(checkpoint / file.name)
    (checkpoint / "state").rmdir()
    prefix = {
        "ar": r"(?:.*\.)?language_model\.layers\.\d+\.",
        "dit": r"(?:transformer_blocks\.\d+\.)?",
    }
    for file in checkpoint.rglob("adapter_config.json"):
        config = json.loads(file.read_text())
        names = "|".join(name.replace(".", r"\.") for name in config["target_modules"])
        pattern = rf"{prefix[file.parent.name]}(?:.*\.)?({names})"
        config |= {"target_modules": pattern, "lora_alpha": 32.0}
        file.write_text(json.dumps(config | {"base_model_name_or_path": str(TINY)}))
    note = json.loads((checkpoint / "trainer.json").read_text())
    del note["base"]
    (checkpoint / "trainer.json").write_text(json.dumps(note))
    return checkpoint


def test_an_older_checkpoint_resumes_and_is_exported(run, tmp_path):
    again = shutil.copytree(run, tmp_path / "run")
    for name in ("green.py", "prompts.txt"):
        shutil.copy(run.parent / name, tmp_path)
    old = older(again / "checkpoints/checkpoint_final")
    trained = Trained.find(str(again))
    export.write_export(trained, tmp_path / "GLM-Image-old", dtype=torch.float32)
    for half in ("ar", "dit"):
        config = tmp_path / "GLM-Image-old/lora" / half / "adapter_config.json"
        assert isinstance(json.loads(config.read_text())["target_modules"], list)
    words = ["--num_steps", 3, "--trust_run_code", "--training.eval_samples", 0]
    assert main("--resume", old, *words) == 0
    final = again / "checkpoints/checkpoint_final"
    assert step_of(final) == 3 and (final / "state/optimizer.pt").is_file()


def test_bad_input(run, exports, tmp_path, monkeypatch, capsys):
    top, to = exports[0], tmp_path / "GLM-Image-bad"

    def refused(*words):
        assert export_main(*words) == 2
        assert not to.exists() and not [*tmp_path.glob(".GLM*")]
        return told(capsys)

    message = refused(run, "--to", to, "--merge", "false", "--dtype", "bfloat16")
    assert "the weights stay as in the base" in message
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "notes.txt").touch()
    for place in (elsewhere, elsewhere / "notes.txt"):
        message = refused(place, "--to", to)
        assert f"{place}: no complete checkpoint. In {tmp_path}: none." in message
    for name in ("nope", ""):
        assert f"In {run.parent}: run. " in refused(run.parent / name, "--to", to)
    assert "an export already" in refused(top / "GLM-Image-ar-lora", "--to", to)
    assert "Give a run or a checkpoint" in refused(run)
    signs = ROOT / "data/tiny-glm-image-signs"
    assert "not the model that" in refused(run, "--to", to, "--base", signs)
    copied = shutil.copytree(signs, tmp_path / "other/tiny-glm-image")  # the same name
    assert "not the model that" in refused(run, "--to", to, "--base", copied)
    assert "no such folder" in refused(run, "--to", to, "--base", tmp_path / "nowhere")
    half = shutil.copytree(top / "checkpoint_ar-lora", tmp_path / "checkpoint_half")
    file = half / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    assert "the adapter does not load" in refused(half, "--to", to, "--base", TINY)
    whole = shutil.copytree(top / "checkpoint_dit-full", tmp_path / "checkpoint_cut")
    [file] = whole.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-9])
    assert "cannot be read" in refused(whole, "--to", to, "--base", TINY)
    for place, way in (
        (TINY, "folder."),
        (top / "GLM-Image-apart", "folder, or --check to check it."),
    ):
        message = told_of(export_main, capsys, run, "--to", place)
        assert f"something is there already. Give another {way}" in message
    full = shutil._ntuple_diskusage(1, 1, 0)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: full)
        assert "are free. Make room" in refused(run, "--to", to)

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(merge, "write_json", no_space)
        assert "No space left on device" in refused(run, "--to", to, "--dtype", "float32")


def told_of(program, capsys, *words):
    assert program(*words) == 2
    return told(capsys)


def test_the_base_may_have_moved(run, tmp_path):
    "A copy under another name has the same digest."
    moved = shutil.copytree(TINY, tmp_path / "renamed")
    trained = Trained.find(str(run), str(moved))
    assert trained.base == moved
    digest = weights_digest(load_pipeline(moved).transformer.state_dict().items())
    assert trained.note["base"]["dit"] == digest
