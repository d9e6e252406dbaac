"""Draws scenes, and divides them into three disjoint sets: the prompts of data/t2i and data/words.

python tools/scene_sets.py FOLDER    writes t2i/train, t2i/heldout, words/train and words/heldout
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from glm_grpo.rewards.scenes import (
    COUNTS,
    GROUNDS,
    LETTERS,
    PLACES,
    SIDE,
    Drawings,
    Scene,
    draw_sign,
)

SIZES = {"train": 96, "heldout": 48}
CELL = 32  # pixels of one token of the large grid
CORNERS = ((0, 0), (2, 0), (0, 2), (2, 2))


def all_scenes(objects: Sequence[str]) -> list[Scene]:
    "Every possible scene without a word: single objects in each place, counted ones, pairs."
    singles, counted, pairs = [], [], []
    for ground in GROUNDS:
        for name in objects:
            singles += [Scene((name,), ground, place=place) for place in PLACES]
            counted += [Scene((name,), ground, count=count) for count in COUNTS.values()]
            others = [other for other in objects if other != name]
            pairs += [Scene((name, other), ground) for other in others]
    return singles + counted + pairs


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def split_of(scene: Scene) -> str:
    """The set that a scene belongs to, from a hash of its prompt without the word: 'pretrain'
    (60 %), 'train' (20 %) or 'heldout' (20 %)."""
    share = _hash(replace(scene, word=None).prompt()) % 100
    if share < 60:
        return "pretrain"
    return "train" if share < 80 else "heldout"


def all_words() -> list[str]:
    "Every word (two letters) and every number (two digits) that a sign may have."
    words = [first + second for first in LETTERS for second in LETTERS]
    return words + [f"{number:02d}" for number in range(100)]


def words_of(split: str) -> list[str]:
    "The words that signs of a set may have: one in five, by a hash, for the held-out set alone."
    held_out = split == "heldout"
    return [word for word in all_words() if (_hash(word) % 5 == 0) == held_out]


# kind of scene -> words of its prompt, and others that mean the same
OTHER_WORDS = {
    "single": (" in the ", " at the "),
    "counted": (" on a ", " on the "),
    "pair": (" left of ", " to the left of "),
}


def paraphrase(scene: Scene) -> str:
    "The prompt of a scene in other words, which the tiny model has never seen."
    return scene.prompt().replace(*OTHER_WORDS[scene.kind], 1)


def has_room(scene: Scene) -> bool:
    "Whether a sign at the bottom would cover no object."
    return scene.place == "middle" or scene.kind == "pair"


def sample_scenes(
    split: str,
    number: int,
    objects: Sequence[str],
    seed: int = 0,  # of the choice
    signs: bool = False,  # True: every scene has a word
) -> list[Scene]:
    """A balanced sample of a set: single, counted and paired scenes in turn (with signs: single
    and paired). Every third scene with room for a sign has a word."""
    rng = np.random.default_rng(seed)
    pool = [scene for scene in all_scenes(objects) if split_of(scene) == split]
    shuffled = []
    for kind in ("single", "counted", "pair"):
        scenes = [s for s in pool if s.kind == kind and (has_room(s) or not signs)]
        if scenes:
            shuffled.append([scenes[i] for i in rng.permutation(len(scenes))])
    picked = []
    for i in range(number):
        turn, which = divmod(i, len(shuffled))
        picked.append(shuffled[which][turn % len(shuffled[which])])
    room = [scene for scene in picked if has_room(scene)]
    with_word = set(room if signs else room[::3])
    words = words_of(split)
    for i, scene in enumerate(picked):
        if scene in with_word:
            picked[i] = replace(scene, word=words[rng.integers(len(words))])
    return picked


def render(
    scene: Scene,
    drawings: Drawings,
    # chooses the hand and the corners if they are not given
    rng: np.random.Generator | None = None,
    *,
    hand: str | None = None,  # one of drawings.hands
    corners: Sequence[int] | None = None,  # numbers of the corners of counted objects, e.g. (0, 3)
    letters: bool = True,  # False: a blank sign, as in the images that become tokens
) -> Image.Image:  # 128 x 128, RGB
    "Draw an image of the scene."
    if hand is None:
        hand = drawings.hands[rng.integers(len(drawings.hands))]
    if corners is None and scene.count > 1:
        corners = sorted(rng.permutation(4)[: scene.count])
    if scene.kind == "pair":
        cells = [(0, 1), (2, 1)]
    elif scene.kind == "counted":
        cells = [CORNERS[corner] for corner in corners]
    else:
        cells = [PLACES[scene.place]]
    image = Image.new("RGB", (SIDE, SIDE), GROUNDS[scene.ground])
    for name, (column, row) in zip(scene.objects * scene.count, cells):
        sprite = drawings.sprites[name, hand]
        image.paste(sprite, (column * CELL, row * CELL), sprite)
    if scene.word:
        draw_sign(image, scene.word if letters else "")
    return image


def write_scenes(folder: Path, scenes: list[Scene], drawings: Drawings) -> None:
    "Scenes in the format of a user's data: prompts.txt and target_images/0000.png, ..."
    rng = np.random.default_rng(0)
    (folder / "target_images").mkdir(parents=True)
    (folder / "prompts.txt").write_text("".join(scene.prompt() + "\n" for scene in scenes))
    for i, scene in enumerate(scenes):
        image = render(scene, drawings, rng).quantize(64)
        image.save(folder / "target_images" / f"{i:04d}.png", optimize=True)


def write_paraphrases(path: Path, scenes: list[Scene]) -> None:
    "Each prompt with a second wording, for evaluations."
    lines = [{"prompt": scene.prompt(), "paraphrase": paraphrase(scene)} for scene in scenes]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main(folder: str) -> None:
    drawings = Drawings()
    for name in ("t2i", "words"):
        for split, number in SIZES.items():
            scenes = sample_scenes(split, number, drawings.objects, signs=name == "words")
            write_scenes(Path(folder) / name / split, scenes, drawings)
            if (name, split) == ("t2i", "heldout"):
                write_paraphrases(Path(folder, name, split, "paraphrases.jsonl"), scenes)


if __name__ == "__main__":
    main(sys.argv[1])
