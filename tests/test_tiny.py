"""The whole way to a tiny GLM-Image, at one step each: what is written is a model that the pipeline loads and draws with."""
import json
import torch
from glm_grpo.glm import GLMImageWrapper
from glm_grpo.tiny import all_pictures, main


def test_one_step_of_everything_gives_a_model_that_loads_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("glm_grpo.tiny.all_pictures", lambda drawings: all_pictures(drawings)[::200])
    out = tmp_path / "tiny"
    assert main([f"--out={out}", "--ar_steps=1", "--spoilt_steps=1", "--sloppy_steps=1", "--vae_steps=1", "--dit_steps=1", "--decoder_steps=1", "--ar_edit_steps=2", "--dit_edit_steps=1"]) == 0
    assert "made in" in capsys.readouterr().out
    assert set(json.loads((out / "training.json").read_text())) == {"token writer", "token writer, history spoilt", "token writer, sloppy captions", "token writer, edits too",
                                                                       "autoencoder", "picture decoder", "picture decoder, edits too", "autoencoder, decoder only"}
    assert sum(f.stat().st_size for f in out.rglob("*") if f.is_file()) < 20e6
    rollout = GLMImageWrapper(str(out)).generate_with_tracking(["a cat in the middle on a red ground"], height=128, width=128, num_inference_steps=1, guidance_scale=1.0, seed=0)
    assert rollout["image_tensors"].shape == (1, 3, 128, 128) and torch.isfinite(rollout["token_logprobs"]).all()
