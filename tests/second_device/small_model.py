"""A model for tests on the second device."""

import os
import shutil
from pathlib import Path

from glm_grpo.model.loading import load_pipeline

TINY = Path(__file__).resolve().parents[2] / "data/tiny-glm-image"


def make_small_model(folder: Path) -> Path:
    "The tiny model with one layer instead of four and one block instead of five: faster."
    shutil.copytree(TINY, folder)
    pipe = load_pipeline(folder)
    ar, dit = pipe.vision_language_encoder, pipe.transformer
    language_model = ar.model.language_model
    language_model.layers = language_model.layers[:1]
    ar.config.text_config.num_hidden_layers = 1
    dit.transformer_blocks = dit.transformer_blocks[:1]
    dit.register_to_config(num_layers=1)
    ar.save_pretrained(folder / "vision_language_encoder")
    dit.save_pretrained(folder / "transformer")
    return folder


def small_model(tmp_path_factory) -> Path:
    "The model in the folder that SMALL_MODEL names, or one that is made now."
    if made := os.environ.get("SMALL_MODEL"):
        return Path(made)
    return make_small_model(tmp_path_factory.mktemp("model") / "glm-image")
