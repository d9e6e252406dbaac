"""Make the prompts and images of data/i2i: pairs of scenes that differ in one thing.

python tools/make_edits.py FOLDER    writes FOLDER/train and FOLDER/heldout
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image
from scene_sets import SIZES, all_scenes, all_words, has_room, render, split_of, words_of

from glm_grpo.rewards.scenes import GROUNDS, PLACES, SIDE, Drawings, Scene

EDITS = ("recolour", "move", "add", "change")


@dataclass(frozen=True)
class Edit:
    "Two scenes that differ in one thing, with the instruction that leads from one to the other."

    source: Scene
    target: Scene
    kind: str  # one of EDITS

    def prompt(self) -> str:
        "The instruction."
        target = self.target
        if self.kind == "recolour":
            return f"make the ground {target.ground}"
        if self.kind == "move":
            return f"move the {target.objects[0]} to the {target.place}"
        word_or_number = "number" if target.word.isdigit() else "word"
        if self.kind == "add":
            return f'add the {word_or_number} "{target.word}"'
        return f'change the {word_or_number} to "{target.word}"'


def sources_of(target: Scene, kind: str) -> list[Scene]:
    "Every scene that an edit of this kind turns into the target."
    if kind == "recolour":
        return [replace(target, ground=ground) for ground in GROUNDS if ground != target.ground]
    if kind == "move":
        return [replace(target, place=place) for place in PLACES if place != target.place]
    if kind == "add":
        return [replace(target, word=None)]
    others = [word for word in all_words() if word != target.word]
    return [replace(target, word=w) for w in others if w.isdigit() == target.word.isdigit()]


def sample_edits(split: str, number: int, objects: list[str]) -> list[Edit]:
    "Different edits whose targets are in a set, the four kinds in turn."
    rng, words, found = np.random.default_rng(0), words_of(split), []
    pool = [scene for scene in all_scenes(objects) if split_of(scene) == split]
    room = [scene for scene in pool if has_room(scene)]
    kinds = ("single", "counted", "pair")
    targets = {
        "recolour": [[scene for scene in pool if scene.kind == kind] for kind in kinds],
        "move": [[scene for scene in pool if scene.place]],
        "add": [room],
        "change": [room],
    }

    def pick(items):
        return items[rng.integers(len(items))]

    while len(found) < number:
        turn, which = divmod(len(found), len(EDITS))
        kind = EDITS[which]
        target = pick(targets[kind][turn % len(targets[kind])])
        # one recoloured scene in three has a word, if there is room
        worded = kind == "recolour" and has_room(target) and rng.random() < 1 / 3
        if worded or kind in ("add", "change"):
            target = replace(target, word=pick(words))
        edit = Edit(pick(sources_of(target, kind)), target, kind)
        if edit not in found:
            found.append(edit)
    return found


def write_edits(folder: Path, edits: list[Edit], drawings: Drawings) -> None:
    "Edits in the format of a user's data: prompts.jsonl, source_images/ and target_images/."
    rng, lines = np.random.default_rng(0), []
    for name in ("source_images", "target_images"):
        (folder / name).mkdir(parents=True)
    for i, edit in enumerate(edits):
        hand = drawings.hands[rng.integers(len(drawings.hands))]
        corners = sorted(rng.permutation(4)[: edit.target.count].tolist())
        both = Image.new("RGB", (2 * SIDE, SIDE))
        for left, scene in ((0, edit.source), (SIDE, edit.target)):
            both.paste(render(scene, drawings, hand=hand, corners=corners), (left, 0))
        both = both.quantize(96)  # one palette: the two agree where nothing changes
        names = [f"source_images/{i:04d}.png", f"target_images/{i:04d}.png"]
        for left, name in zip((0, SIDE), names):
            both.crop((left, 0, left + SIDE, SIDE)).save(folder / name, optimize=True)
        metadata = {"kind": edit.kind, "scene": edit.target.prompt()}
        line = {"prompt": edit.prompt(), "source": names[0], "target": names[1]}
        lines.append(json.dumps(line | {"metadata": metadata}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines))


def main(folder: str) -> None:
    drawings = Drawings()
    for split, number in SIZES.items():
        edits = sample_edits(split, number, drawings.objects)
        write_edits(Path(folder) / split, edits, drawings)


if __name__ == "__main__":
    main(sys.argv[1])
