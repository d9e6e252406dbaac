"""What a stranger does with an export: diffusers, transformers and peft, and nothing of ours.

python -I open_export.py FOLDER: FOLDER/inputs.pt has the numbers that are given, FOLDER/answers.pt
gets what came out.
"""

import re
import sys
from pathlib import Path

import torch
from diffusers import GlmImagePipeline
from transformers import LogitsProcessor, LogitsProcessorList

top = Path(sys.argv[1])
given = torch.load(top / "inputs.pt", weights_only=True)
torch.set_num_threads(1)


def load(folder):
    pipe = GlmImagePipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class OnlyThese(LogitsProcessor):
    def __init__(self):
        self.logits = []

    def __call__(self, input_ids, scores):
        self.logits.append(scores[0])
        only = torch.full_like(scores, -torch.inf)
        only[:, given["token_ids"][len(self.logits) - 1]] = 0
        return only


def logits(pipe):
    "At the first tokens of the prompt, which are given."
    message = [{"role": "user", "content": [{"type": "text", "text": given["prompt"]}]}]
    inputs = pipe.processor.apply_chat_template(
        [message],
        target_h=64,
        target_w=64,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    kept, number = OnlyThese(), len(given["token_ids"])
    pipe.vision_language_encoder.generate(
        **inputs,
        max_new_tokens=number,
        do_sample=True,
        logits_processor=LogitsProcessorList([kept]),
    )
    return torch.stack(kept.logits)


def image(pipe):
    "Of given tokens and noise."
    return pipe(
        prompt=given["prompt"],
        height=64,
        width=64,
        num_inference_steps=2,
        guidance_scale=1.5,
        prior_token_ids=given["prior_token_ids"],
        latents=given["latents"],
        output_type="pt",
    ).images


answers = {}
for name in given["exports"]:
    pipe = load(top / name)
    answers[name] = {"logits": logits(pipe), "image": image(pipe)}

base = load(given["base"])
lora = top / given["adapters"] / "lora"
base.vision_language_encoder.load_adapter(lora / "ar")
base.transformer.load_lora_adapter(lora / "dit-diffusers", use_safetensors=True)
answers["adapters"] = {"logits": logits(base), "image": image(base)}

plain = GlmImagePipeline.from_pretrained(given["base"])  # without a dtype
parts = (plain.vision_language_encoder, plain.text_encoder, plain.transformer, plain.vae)
answers["dtypes"] = [str(part.dtype) for part in parts]

text = (top / given["card"] / "README.md").read_text()
[code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
namespace = {}
exec(code, namespace)
answers["size"] = namespace["image"].size
torch.save(answers, top / "answers.pt")
assert not [name for name in sys.modules if name.startswith("glm_grpo")]
