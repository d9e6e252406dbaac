"""tools/make_tiny_model.py, at one step a stage, and the model that it made."""

import contextlib
import json
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT

from glm_grpo.data.images import pil_to_tensor
from glm_grpo.rewards.scenes import SIDE, Drawings
from glm_grpo.model.tokens import prepare_prompts
from glm_grpo.model.wrapper import GLMImageWrapper

STAGES = {
    "token writer",
    "token writer, history spoilt",
    "token writer, sloppy captions",
    "token writer, edits too",
    "autoencoder",
    "picture decoder",
    "picture decoder, edits too",
    "autoencoder, decoder only",
}
LATER = {"picture decoder, words", "token writer, signs left out"}


@pytest.mark.usefixtures("at_root")
@pytest.mark.parametrize("options, stages", [([], STAGES), (["--signs"], LATER)])
def test_what_the_program_makes_loads_and_samples(tmp_path, monkeypatch, options, stages):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import make_tiny_model as program

    fit, all_pictures = program.fit, program.all_pictures

    def fit_once(parameters, next_loss, steps, *rest, **options):
        return fit(parameters, next_loss, 1, *rest, **options)

    monkeypatch.setattr(program, "fit", fit_once)
    monkeypatch.setattr(program, "bfloat16", contextlib.nullcontext)  # some CPUs are slow in it
    monkeypatch.setattr(program, "WORDS", program.WORDS[::16])
    for small in ("BATCH", "CAPTIONS"):
        monkeypatch.setattr(program, small, 4)
    monkeypatch.setattr(program, "all_pictures", lambda: all_pictures()[::201])
    monkeypatch.setattr(sys, "argv", ["make_tiny_model.py", f"--out={tmp_path}/model", *options])
    program.main()
    log = json.loads((tmp_path / "model/training.json").read_text())
    assert stages <= set(log) and all(log[name][-1]["step"] == 1 for name in stages)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 20e6
    model = GLMImageWrapper(f"{tmp_path}/model", device="cpu")
    rollout = model.generate_with_tracking("a cat on a red ground", num_inference_steps=1)
    assert rollout["image_tensors"].shape == (1, 3, 128, 128)
    assert torch.isfinite(rollout["token_logprobs"]).all()


def test_the_committed_model_is_what_its_readme_says(monkeypatch):
    "The codebook has not collapsed, patches rebuild the images, and each stage learned."
    monkeypatch.syspath_prepend(ROOT / "tools")
    from scene_sets import all_scenes, render, split_of

    folder, drawings = ROOT / "data/tiny-glm-image", Drawings(ROOT / "data/drawings")
    scenes = [scene for scene in all_scenes(drawings.objects) if split_of(scene) == "pretrain"]
    rng = np.random.default_rng(0)
    drawn = [render(scene, drawings, rng) for scene in scenes[::10]]
    model = GLMImageWrapper(folder, device="cpu")
    ar, sources = model.pipe.vision_language_encoder, [[image] for image in drawn]
    inputs = prepare_prompts(model.processor, ar, ["move it"] * len(drawn), SIDE, SIDE, sources)
    ids = torch.stack([ids for [(ids, _)] in inputs.sources])
    assert ids.shape == (109, 16) and ids.unique().numel() > 400
    images = pil_to_tensor(drawn)
    tiles = images.view(-1, 3, 4, 32, 4, 32).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
    patch_of_id = torch.zeros(ar.config.vq_config.num_embeddings, 3, 32, 32)
    patch_of_id[ids.flatten()] = tiles
    assert (patch_of_id[ids.flatten()] - tiles).pow(2).mean() < 0.01
    log = json.loads((folder / "training.json").read_text())
    assert all(log[name][-1]["large"] < log[name][0]["large"] for name in STAGES if "token" in name)
    assert log["picture decoder"][-1]["mse"] < 0.2 * log["picture decoder"][0]["mse"]
