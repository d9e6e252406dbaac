"A model may come from somebody else: its code never runs, and only safetensors are read."

import json
import shutil

import pytest
import torch
from helpers import ROOT, main
from safetensors.torch import load_file

from glm_grpo.data.basics import UserError
from glm_grpo.model import loading
from glm_grpo.model.loading import load_pipeline, load_prompt_parts
from glm_grpo.rewards.judges import load_processor

pytestmark = pytest.mark.usefixtures("at_root")


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A copy of the tiny model, and a file that appears if code of the model runs. To the question
    whether to run it the answer is yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    model, trace = tmp_path / "model", tmp_path / "it_ran"
    shutil.copytree(ROOT / "data/tiny-glm-image", model)
    evil = f"from pathlib import Path\nPath({str(trace)!r}).touch()\nclass Evil:\n    pass\n"
    for part in ("vae", "processor", "vision_language_encoder"):
        (model / part / "evil.py").write_text(evil)
    return model, trace


def change(path, **values):
    "Change a JSON file's values."
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def name_code(model):
    "The settings of processor and AR model name classes in evil.py, as a model of the hub may do."
    change(model / "processor/processor_config.json", auto_map={"AutoProcessor": "evil.Evil"})
    change(model / "processor/processor_config.json", processor_class="Evil")
    classes = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}
    change(model / "vision_language_encoder/config.json", auto_map=classes)


def test_the_dry_run_runs_no_code_of_a_model(stranger):
    model, trace = stranger
    name_code(model)
    main("--model.name", model, "--dry_run", "--training.eval_samples", 0)
    assert not trace.exists()


def test_loading_runs_no_code_of_a_model(stranger):
    model, trace = stranger
    name_code(model)
    load_pipeline(model)
    change(model / "model_index.json", vae=["evil", "Evil"])
    with pytest.raises(UserError, match="custom code in evil.py"):
        load_pipeline(model)
    assert not trace.exists()


@pytest.mark.parametrize("part", ["processor/processor_config.json", "processor/tokenizer.json"])
def test_prompts_are_not_laid_out_with_a_broken_processor(stranger, part):
    model, _ = stranger
    (model / part).write_text('{"auto_map": 7, "image_processor": 3}')
    with pytest.raises(UserError, match="model: its files do not load"):
        load_prompt_parts(model)


def test_a_model_without_text_config_is_refused(stranger):
    "The library would build the published size, 18 GB."
    model, _ = stranger
    file = model / "vision_language_encoder/config.json"
    settings = json.loads(file.read_text())
    del settings["text_config"]
    file.write_text(json.dumps(settings))
    for load in (load_pipeline, load_prompt_parts):
        with pytest.raises(UserError, match="config.json: the key 'text_config' is missing"):
            load(model)


def test_a_judge_runs_no_code_of_its_model(stranger):
    model, trace = stranger
    name_code(model)
    with pytest.raises(UserError, match="contains custom code"):
        load_processor(model / "processor")
    assert not trace.exists()


def test_weights_are_read_from_safetensors_only(stranger, monkeypatch):
    "A pickle in their place is refused, in a folder and in a model of the hub."
    model, _ = stranger
    (weights,) = (model / "vae").glob("*.safetensors")
    torch.save(load_file(weights), model / "vae" / "diffusion_pytorch_model.bin")
    weights.unlink()
    with pytest.raises(UserError, match=r"vae/\*.safetensors is missing"):
        load_pipeline(model)
    monkeypatch.setattr(loading, "download_model", lambda name, revision: model)
    with pytest.raises(UserError, match=r"vae/\*.safetensors is missing"):
        load_pipeline("somebody/model")
