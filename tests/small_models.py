"Folders of small judges with random weights, in the layout of the published ones."

from tokenizers import Tokenizer, models
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor, LlavaConfig
from transformers import LlavaForConditionalGeneration, LlavaProcessor, Mask2FormerConfig
from transformers import Mask2FormerForUniversalSegmentation, PreTrainedTokenizerFast, SwinConfig

from transformers.models.mask2former.image_processing_pil_mask2former import (
    Mask2FormerImageProcessorPil,
)

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
TEXT = {**SIZES, "num_hidden_layers": 1, "vocab_size": 9, "eos_token_id": 2}
VISION = {**SIZES, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
CHAT = "<image> {% for c in messages[0]['content'] %}{{ c.get('text', '') }}{% endfor %}"
WORDS = {"<unk>": 0, "a": 1, "cat": 2, "<image>": 3, "Yes": 4, "No": 5}


def tokenizer_and_resize():
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    extra = {"extra_special_tokens": {"image_token": "<image>"}}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<unk>", **extra)
    return tokenizer, CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)


def save_clip(folder):
    text = {**TEXT, "max_position_embeddings": 8}
    config = CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)
    CLIPModel(config).save_pretrained(folder)
    tokenizer, resize = tokenizer_and_resize()
    CLIPProcessor(image_processor=resize, tokenizer=tokenizer).save_pretrained(folder)


def save_llava(folder):
    config = LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **VISION},
        image_token_index=WORDS["<image>"],
        vision_feature_layer=-1,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    options = {"patch_size": 8, "num_additional_image_tokens": 1}
    options["vision_feature_select_strategy"] = "default"
    tokenizer, resize = tokenizer_and_resize()
    LlavaProcessor(resize, tokenizer, chat_template=CHAT, **options).save_pretrained(folder)


def save_detector(folder):
    stages = [f"stage{i}" for i in range(1, 5)]
    swin = SwinConfig(embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, out_features=stages)
    sizes = dict.fromkeys(("hidden_size", "feature_size", "mask_feature_size"), 32)
    sizes |= {"encoder_layers": 1, "decoder_layers": 2, "num_queries": 4, "num_labels": 80}
    config = Mask2FormerConfig(backbone_config=swin, num_attention_heads=2, **sizes)
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(folder)
