"""The first table of 4_rewards/20_registry, "From what you have to what you write": every line of
it makes a reward and scores images, with small models of random weights in the place of real ones.
"""

import json
import re
import shlex

import pytest
import torch
from helpers import ROOT, main, small
from tokenizers import Tokenizer, models
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    PreTrainedTokenizerFast,
    SwinConfig,
)
from transformers.models.mask2former.image_processing_pil_mask2former import (
    Mask2FormerImageProcessorPil,
)

from glm_grpo.rewards.registry import load_function
from glm_grpo.rewards.remote import serve

NOTEBOOK = json.loads((ROOT / "nbs/4_rewards/20_registry.ipynb").read_text())
TEXTS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"]]
(PAGE,) = [text for text in TEXTS if text.startswith("## From what you have")]
LINES = re.findall(r"\| `(--reward[^`]*)` \|", PAGE)
(MY_REWARD,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
GENEVAL = """\
{"tag": "counting", "include": [{"class": "bus", "count": 3}], \
"exclude": [{"class": "bus", "count": 4}], "prompt": "a photo of three buses"}
{"tag": "position", "include": [{"class": "couch", "count": 1}, \
{"class": "bird", "count": 1, "position": ["left of", 0]}], "prompt": "a bird left of a couch"}
"""
SERVED = "http://127.0.0.1:8000"

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
TEXT = {**SIZES, "num_hidden_layers": 1, "vocab_size": 9, "eos_token_id": 2}
VISION = {**SIZES, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
CHAT = "<image> {% for c in messages[0]['content'] %}{{ c.get('text', '') }}{% endfor %}"


def save_clip(folder, resize, tokenizer):
    text = {**TEXT, "max_position_embeddings": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=VISION)).save_pretrained(folder)
    CLIPProcessor(image_processor=resize, tokenizer=tokenizer).save_pretrained(folder)


def save_llava(folder, resize, tokenizer):
    config = LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_token_index=3,
        vision_feature_layer=-1,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    options = {"patch_size": 8, "num_additional_image_tokens": 1}
    options["vision_feature_select_strategy"] = "default"
    LlavaProcessor(resize, tokenizer, chat_template=CHAT, **options).save_pretrained(folder)


def save_detector(folder):
    stages = [f"stage{i}" for i in range(1, 5)]
    swin = SwinConfig(embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, out_features=stages)
    sizes = dict.fromkeys(("hidden_size", "feature_size", "mask_feature_size"), 32)
    sizes |= {"encoder_layers": 1, "decoder_layers": 2, "num_queries": 4, "num_labels": 80}
    config = Mask2FormerConfig(backbone_config=swin, num_attention_heads=2, **sizes)
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(folder)


@pytest.fixture
def home(folder, monkeypatch):
    "A folder in which the commands of the page run."
    ids = {"<unk>": 0, "Yes": 1, "No": 2, "<image>": 3}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    extra = {"extra_special_tokens": {"image_token": "<image>"}}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<unk>", **extra)
    resize = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)
    with torch.random.fork_rng(devices=[]):
        save_clip(folder / "models/clip", resize, tokenizer)
        save_llava(folder / "models/vlm", resize, tokenizer)
        save_clip(folder / "models/geneval/clip", resize, tokenizer)
        save_detector(folder / "models/geneval")
    (folder / "geneval").mkdir()
    (folder / "geneval/evaluation_metadata.jsonl").write_text(GENEVAL)
    (folder / "my_reward.py").write_text(MY_REWARD)
    (folder / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(folder)
    return folder


def options_without_reward(folder):
    words = small(folder)
    at = words.index("--reward.functions")
    return words[:at] + words[at + 2 :]


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_table_makes_a_reward(home, capsys, line):
    words = shlex.split(line)
    if SERVED not in line:
        assert main("--dry_run", *options_without_reward(home), *words) == 0, capsys.readouterr()
        return
    with serve(load_function("my_reward.py:redness")) as server:
        words = [word.replace(SERVED, server.url) for word in words]
        assert main("--dry_run", *options_without_reward(home), *words) == 0, capsys.readouterr()


def test_the_table_has_a_line_for_each_kind_of_reward():
    kinds = ("functions", "metrics", "models", "remote")
    assert all(any(f"--reward.{kind}" in line for line in LINES) for kind in kinds)
    assert len(LINES) == PAGE.count("\n| ") - 1  # all rows but the head


def test_the_file_of_the_page_scores_images(home):
    images = torch.eye(3).view(3, 3, 1, 1).expand(-1, -1, 8, 8)
    redness = load_function("my_reward.py:redness")
    assert redness(images).tolist() == [1, -0.5, -0.5]
    for name in ("Contrast", "Photo"):
        reward = load_function(f"my_reward.py:{name}")
        assert reward(images, ["a", "b", "c"]).shape == (3,)
