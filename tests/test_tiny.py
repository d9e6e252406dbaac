"""The whole way to a tiny GLM-Image, at one step each: it loads and samples."""

import json

import torch

from glm_grpo.model.tiny import main
from glm_grpo.model.tiny_data import all_images
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
ONE_STEP = [
    "--ar_steps=1",
    "--spoilt_steps=1",
    "--sloppy_steps=1",
    "--vae_steps=1",
    "--dit_steps=1",
    "--decoder_steps=1",
    "--ar_edit_steps=2",
    "--dit_edit_steps=1",
]


def test_one_step_of_everything_gives_a_model_that_loads_and_samples(tmp_path, capsys, monkeypatch):
    few = "glm_grpo.model.tiny.all_images"
    monkeypatch.setattr(few, lambda drawings: all_images(drawings)[::200])
    out = tmp_path / "tiny"
    main([f"--out={out}", *ONE_STEP])
    assert "made in" in capsys.readouterr().out
    assert set(json.loads((out / "training.json").read_text())) == STAGES
    assert sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) < 20e6
    rollout = GLMImageWrapper(str(out)).generate_with_tracking(
        ["a cat in the middle on a red ground"],
        height=128,
        width=128,
        num_inference_steps=1,
        guidance_scale=1.0,
        seed=0,
    )
    assert rollout["image_tensors"].shape == (1, 3, 128, 128)
    assert torch.isfinite(rollout["token_logprobs"]).all()
