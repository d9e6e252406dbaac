"""tools/make_tiny_model.py, at two steps a stage: what it makes loads and samples."""

import json
import sys

import pytest
import torch
from helpers import ROOT

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

    def fit_twice(parameters, next_loss, steps, *rest, **options):
        return fit(parameters, next_loss, 2, *rest, **options)

    monkeypatch.setattr(program, "fit", fit_twice)
    for small in ("BATCH", "CAPTIONS"):
        monkeypatch.setattr(program, small, 4)
    monkeypatch.setattr(program, "all_pictures", lambda: all_pictures()[::201])
    monkeypatch.setattr(sys, "argv", ["make_tiny_model.py", f"--out={tmp_path}/model", *options])
    program.main()
    log = json.loads((tmp_path / "model/training.json").read_text())
    assert stages <= set(log) and all(log[name][-1]["step"] == 2 for name in stages)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 20e6
    model = GLMImageWrapper(f"{tmp_path}/model", device="cpu")
    rollout = model.generate_with_tracking("a cat on a red ground", num_inference_steps=1)
    assert rollout["image_tensors"].shape == (1, 3, 128, 128)
    assert torch.isfinite(rollout["token_logprobs"]).all()
