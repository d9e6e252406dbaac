"""Judges: a small CLIP with random weights, and what is refused."""

import shutil

import pytest
import torch
from small_models import save_clip, save_llava, tokenizer_and_resize

from glm_grpo.data.basics import refusal
from glm_grpo.rewards.judges import AestheticScore, ClipScore, PickScore, VLMJudge

PROMPTS = ["a cat", "a cat a cat a"]
HEAD = {"layers.0.weight": torch.ones(1, 16), "layers.0.bias": torch.zeros(1)}


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    "The folder of a small CLIP."
    folder = tmp_path_factory.mktemp("clip")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_clip(folder)
    return folder


@pytest.fixture
def images():
    return torch.rand(2, 3, 40, 48, generator=torch.Generator().manual_seed(0))


def test_a_text_does_not_depend_on_its_neighbours(clip, images):
    judge = ClipScore(clip, device="cpu", batch_size=2)
    alone = judge(images[:1], PROMPTS[:1])
    assert torch.allclose(judge(images, PROMPTS)[:1], alone, atol=1e-5)


def test_a_head_that_contains_code_is_not_run(clip, tmp_path):
    torch.save({**HEAD, "code": print}, tmp_path / "head.pth")
    message = refusal(AestheticScore, clip, tmp_path / "head.pth", device="cpu")
    assert "head.pth: cannot be read as the weights of the head (UnpicklingError)" in message


def test_a_damaged_model_is_told_as_such(clip, tmp_path):
    folder = shutil.copytree(clip, tmp_path / "clip")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"{folder}: cannot be loaded" in refusal(ClipScore, folder, device="cpu")


def test_the_head_in_the_folder(clip, images):
    head = clip / AestheticScore.published_head
    assert str(head) in refusal(AestheticScore, clip, device="cpu")
    torch.save(HEAD, head)
    judge = AestheticScore(clip, device="cpu")
    with torch.no_grad():
        expected = judge.image_vectors(images).sum(-1)
    assert torch.allclose(judge(images), expected, atol=1e-5)


def test_a_folder_of_another_kind_of_model(tmp_path):
    "The message names the folder and what belongs there."
    save_llava(tmp_path / "llava")
    for judge in (ClipScore, PickScore):
        assert "llava: a LlavaModel" in refusal(judge, tmp_path / "llava", device="cpu")
    tokenizer_and_resize()[0].save_pretrained(tmp_path / "words")
    (tmp_path / "words/config.json").write_text('{"model_type": "llama"}')
    assert "reads no images" in refusal(VLMJudge, tmp_path / "words", device="cpu")
