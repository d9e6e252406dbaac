"""Make data/tiny-glm-image-signs: the tiny model with a DiT that spells better, and an AR that
leaves out most signs. Training on text accuracy begins there.

    python tools/make_signs_model.py

The DiT of data/tiny-glm-image learned two words for each image, where letters are one part in
thirty; here every image has a sign, with any of the training words, and the sign's error counts
eight times. Its glyph encoder hardly knew which letter comes first ("05" became "50"): three
attention heads are pointed at the neighbours before training.

Then the AR reads captions with a word whose images, three in five, have no sign, as captions of the
web quote what is not to be seen. That leaves something to learn from a reward: put the sign up.

Held-out words are never shown. Under an hour on an idle core. (The DiT that ships was made in
pieces: 1,500 steps before the heads were turned, 500 after.)
"""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from glm_grpo.data.files import atomic_dir
from glm_grpo.data.images import pil_to_tensor
from glm_grpo.data.scenes import SIGN, Drawings, words_of
from glm_grpo.model.loading import load_pipeline
from glm_grpo.model.tiny_ar import train_ar
from glm_grpo.model.tiny_data import TinyImage, all_images
from glm_grpo.model.tiny_decoder import latents_of, velocity_error
from glm_grpo.model.tiny_model import large_view, preview_view, token_ids_of
from glm_grpo.model.tiny_training import TinyTokens, fit

LEFT, TOP, RIGHT, BOTTOM = (v // 8 for v in SIGN)
SIGN_AREA = (slice(None), slice(TOP, BOTTOM), slice(LEFT, RIGHT))  # of latents [C, 16, 16]
BATCH = 48
WEIGHTS = "transformer", "text_encoder", "vision_language_encoder"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "(default: %(default)s)"
    parser.add_argument(
        "--model", default="data/tiny-glm-image", help=f"folder to start from {default}"
    )
    parser.add_argument(
        "--out",
        default="data/tiny-glm-image-signs",
        help=f"folder to write; it must not be there {default}",
    )
    parser.add_argument(
        "--steps", type=int, default=2000, help=f"steps of 48 images with their words {default}"
    )
    parser.add_argument(
        "--left_out_steps",
        type=int,
        default=200,
        help=f"steps of 32 captions for the AR, three of five signs left out {default}",
    )
    return parser.parse_args()


class SpellingLosses:
    "The loss of the next batch of signs, on which letters count most."

    def __init__(self, pipe, images: list[TinyImage], drawings: Drawings):
        self.pipe, self.images, self.words = pipe, images, words_of("pretrain")
        blank = [image.render(drawings) for image in images]
        self.token_ids = large_token_ids(pipe, blank)
        self.latents = latents_of(pipe.vae, blank)
        self.signs = self.render_signs(drawings)
        self.by_kind = {}  # kind of scene -> numbers of its images
        for i, image in enumerate(images):
            self.by_kind.setdefault(image.scene.kind, []).append(i)
        self.weight = torch.ones(1, 1, 16, 16)
        self.weight[:, *SIGN_AREA] = 8
        self.weight /= self.weight.mean()
        self.rng = np.random.default_rng(11)
        self.generator = torch.Generator().manual_seed(11)

    def render_signs(self, drawings: Drawings) -> dict[str, list[Tensor]]:
        """Ground -> the latents of each word's sign: they do not depend on what stands
        elsewhere."""
        signs = {}
        for ground, image in {image.scene.ground: image for image in self.images}.items():
            latents = latents_of(
                self.pipe.vae, [image.render(drawings, word) for word in self.words]
            )
            signs[ground] = [x[SIGN_AREA] for x in latents]
        return signs

    def next(self) -> tuple[Tensor, dict[str, float]]:
        "Images of all kinds alike, each with a random word."
        rows = []
        for kind in self.rng.choice(list(self.by_kind), BATCH):
            of_kind = self.by_kind[kind]
            rows.append(of_kind[self.rng.integers(len(of_kind))])
        spelled = self.rng.integers(len(self.words), size=BATCH)
        latents = self.latents[rows].clone()
        for x, i, k in zip(latents, rows, spelled):
            x[SIGN_AREA] = self.signs[self.images[i].scene.ground][k]
        words = [self.words[k] for k in spelled]
        error = velocity_error(
            self.pipe, latents, self.token_ids[rows], words, self.generator, in_bfloat16=False
        )
        shown = {"mse": error.mean().item(), "sign": error[:, *SIGN_AREA].mean().item()}
        return (error * self.weight).mean(), shown


def large_token_ids(pipe, images: list) -> Tensor:  # [N, 16] int64
    "The tokens of the large grid."
    token_ids = []
    for start in range(0, len(images), 64):
        view = large_view(pil_to_tensor(images[start : start + 64]))
        token_ids.append(token_ids_of(pipe.vision_language_encoder, view))
    return torch.cat(token_ids)


@torch.no_grad()
def point_at_neighbours(glyph_encoder) -> None:
    "Three heads of the first layer look at the next letter, the one before, and the one after it."
    attention = glyph_encoder.encoder.block[0].layer[0].SelfAttention
    weight = attention.relative_attention_bias.weight
    for head, distance in enumerate((1, -1, 2)):
        bucket = attention._relative_position_bucket(
            torch.tensor([distance]),
            bidirectional=True,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        weight[:, head] = 0
        weight[bucket, head] = 8


def train_spelling(pipe, images: list[TinyImage], drawings: Drawings, steps: int) -> list[dict]:
    losses = SpellingLosses(pipe, images, drawings)
    point_at_neighbours(pipe.text_encoder)
    trained = [*pipe.transformer.parameters(), *pipe.text_encoder.parameters()]
    return fit(trained, losses.next, steps, lr=1e-3, weight_decay=0.01, average=0.99, name="words")


def all_token_ids(pipe, images: list[TinyImage], drawings: Drawings) -> Tensor:  # [N, 272]
    "Preview and large tokens of images, signs blank."
    token_ids = []
    for start in range(0, len(images), 64):
        x = pil_to_tensor([image.render(drawings) for image in images[start : start + 64]])
        views = preview_view(x), large_view(x)
        grids = [token_ids_of(pipe.vision_language_encoder, view) for view in views]
        token_ids.append(torch.cat(grids, 1))
    return torch.cat(token_ids)


def train_to_leave_signs_out(pipe, images: list[TinyImage], drawings: Drawings, steps: int):
    "Of five images with the same caption, two have the sign."
    signed = [image for image in images if image.sign]
    unsigned = [replace(image, sign=False) for image in signed]
    # these have no room for a sign
    counted = [image for image in images if image.scene.kind == "counted"][::4]
    with_sign = all_token_ids(pipe, signed, drawings)
    without = all_token_ids(pipe, unsigned, drawings)
    others = all_token_ids(pipe, counted, drawings)
    data = TinyTokens(
        signed * 5 + counted, torch.cat([with_sign, with_sign, without, without, without, others])
    )
    parts = {
        "vision_language_encoder": pipe.vision_language_encoder.eval(),
        "processor": pipe.processor,
    }
    return train_ar(parts, data, steps, lr=1e-3, seed=51, sloppy=0.77)


def save(pipe, model: str, out: str, logs: dict) -> None:
    "The folder of `model` with the parts that were trained."
    logs = json.loads(Path(model, "training.json").read_text()) | logs
    with atomic_dir(out) as folder:
        shutil.copytree(model, folder, dirs_exist_ok=True)
        for name in WEIGHTS:
            getattr(pipe, name).to(torch.bfloat16).save_pretrained(folder / name)
        (folder / "training.json").write_text(json.dumps(logs))


def main() -> None:
    options, drawings = parse_args(), Drawings("data/drawings")
    pipe = load_pipeline(options.model).to(torch.float32)
    images = all_images(drawings)
    signed = [image for image in images if image.sign]
    spelling = train_spelling(pipe, signed, drawings, options.steps)
    signs = train_to_leave_signs_out(pipe, images, drawings, options.left_out_steps)
    logs = {"picture decoder, words": spelling, "token writer, signs left out": signs}
    save(pipe, options.model, options.out, logs)


if __name__ == "__main__":
    main()
