"""Judges: a small CLIP with random weights, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    PreTrainedTokenizerFast,
)

from glm_grpo.data.basics import refusal
from glm_grpo.rewards.judges import make_judge

LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
PROMPTS = ["a cat", "a cat a cat a"]


@pytest.fixture(scope="module")
def processor():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "cat": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<unk>")
    resize = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)
    return CLIPProcessor(image_processor=resize, tokenizer=tokenizer)


@pytest.fixture
def clip(processor, tmp_path):
    "The folder of a small CLIP."
    config = CLIPConfig(
        text_config={**LAYERS, "vocab_size": 9, "max_position_embeddings": 8, "eos_token_id": 2},
        vision_config={**LAYERS, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        CLIPModel(config).save_pretrained(tmp_path / "clip")
    processor.save_pretrained(tmp_path / "clip")
    return tmp_path / "clip"


@pytest.fixture
def images():
    return torch.rand(2, 3, 40, 48, generator=torch.Generator().manual_seed(0))


def test_pickscore_is_clipscore_on_another_scale(clip, images):
    pick = make_judge("pickscore", clip, device="cpu")
    values, scale = pick(images, PROMPTS), pick.model.logit_scale.exp()
    clipscore = make_judge("clip", str(clip), device="cpu")(images, PROMPTS)
    assert torch.allclose(clipscore, 2.5 * (values / scale).clamp(min=0), atol=1e-5)
    assert values.std() > 0 and not values.is_inference()


def test_a_text_does_not_depend_on_its_neighbours(clip, images):
    judge = make_judge("pickscore", clip, device="cpu", batch_size=2)
    alone = judge(images[:1], PROMPTS[:1])
    assert torch.allclose(judge(images, PROMPTS)[:1], alone, atol=1e-5)


def test_missing_processor(clip):
    for file in clip.glob("*.json"):
        if file.name != "config.json":
            file.unlink()
    assert "processor cannot be read" in refusal(make_judge, "clip", clip, device="cpu")
    assert "laion/CLIP-ViT-H-14" in refusal(make_judge, "pickscore", clip, device="cpu")


def test_missing_weights(clip):
    weights = clip / "model.safetensors"
    state = load_file(weights)
    del state["visual_projection.weight"]
    save_file(state, weights, metadata={"format": "pt"})
    assert "visual_projection.weight" in refusal(make_judge, "clip", clip, device="cpu")
    weights.rename(clip / "pytorch_model.bin")
    assert "*.safetensors" in refusal(make_judge, "clip", clip)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"layers.0.weight": torch.zeros(1, 7), "layers.0.bias": torch.zeros(1)},
        {"layers.0.weight": torch.zeros(2, 16), "layers.0.bias": torch.zeros(2)},
        {"layers.0.weight": torch.zeros(1, 16)},
        {"visual_projection.weight": torch.zeros(1)},
    ],
)
def test_not_an_aesthetic_head(clip, tmp_path, tensors):
    head = tmp_path / "head.safetensors"
    save_file(tensors, head)
    message = refusal(make_judge, "aesthetic", clip, head=head, device="cpu")
    assert "is not LAION's aesthetic head" in message


def test_the_head_in_the_folder(clip, images):
    assert "l14-linearMSE.pth: no such file" in refusal(make_judge, "aesthetic", clip, device="cpu")
    published = {"layers.0.weight": torch.ones(1, 16), "layers.0.bias": torch.zeros(1)}
    torch.save(published, clip / "sac+logos+ava1-l14-linearMSE.pth")
    judge = make_judge("aesthetic", clip, device="cpu")
    with torch.no_grad():
        expected = judge.image_vectors(images).sum(-1)
    assert torch.allclose(judge(images), expected, atol=1e-5)
    # the file with our name is preferred
    save_file({**published, "layers.0.bias": torch.ones(1)}, clip / "aesthetic.safetensors")
    assert torch.allclose(make_judge("aesthetic", clip, device="cpu")(images), expected + 1)
