"A model of the hub has revisions: what is on this machine is looked up for the one that is wanted."

import pytest
from helpers import ROOT

from glm_grpo.data.prompts import T2IDataset
from glm_grpo.model.memory import local_folder, model_layout
from glm_grpo.run.config import ModelConfig
from glm_grpo.run.plan import longest_prompt

NAME = "zai-org/GLM-Image"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    "A cache of the hub with one model, the tiny one, of revision v2 only."
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    home, commit = tmp_path / "models--zai-org--GLM-Image", "2" * 40
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "v2").write_text(commit)
    (home / "snapshots").mkdir()
    (home / "snapshots" / commit).symlink_to(ROOT / "data/tiny-glm-image")
    return home / "snapshots" / commit


def test_only_the_revision_that_was_downloaded_is_found(cache):
    assert local_folder(NAME, "v2") == cache
    assert local_folder(NAME) is None and local_folder(NAME, "v1") is None
    layouts = [model_layout(NAME, revision)["ar"] for revision in ("v2", None)]
    assert layouts[0] != layouts[1]  # the tiny model's, the published ones


def test_the_plan_counts_tokens_with_the_wanted_revision(cache):
    size, dataset = (128, 128), T2IDataset(ROOT / "data/t2i/train/prompts.txt")
    tokens = longest_prompt(ModelConfig(), (dataset, size))
    guessed = longest_prompt(ModelConfig(NAME), (dataset, size))  # not downloaded
    assert longest_prompt(ModelConfig(NAME, "v2"), (dataset, size)) == tokens != guessed
