"The six-task check on wrong, empty and degraded images."

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from glm_grpo.data.images import pil_to_tensor
from glm_grpo.data.scenes import GROUNDS, Drawings
from glm_grpo.rewards.six_tasks import (
    PAINTS,
    TASKS,
    SixScene,
    SixTaskCheck,
    render_six,
    sample_six_tasks,
)

DRAWINGS = Drawings(Path(__file__).parent.parent / "data/drawings")
CHECK = SixTaskCheck(DRAWINGS)
SCENES = sample_six_tasks(36, DRAWINGS.objects, seed=1, split="train")
MIXES = (0, 0.25, 0.5, 0.75, 1)


OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


def wrong_scenes(scene, rng):
    "dict: what is wrong -> a scene with this one thing wrong"

    def pick(pool, without):
        pool = [item for item in pool if item not in without]
        return pool[rng.integers(len(pool))]

    change, first = dataclasses.replace, scene.colours[0]
    stranger = pick(DRAWINGS.objects, scene.names)
    ground = pick(GROUNDS, (scene.ground, *scene.colours))
    wrong = {
        "another object": change(scene, names=(stranger, *scene.names[1:])),
        "another ground": change(scene, ground=ground),
    }
    if len(scene.names) == 1 and not first:
        if scene.count < 4:
            wrong["one more"] = change(scene, count=scene.count + 1)
        if scene.count > 1:
            wrong["one fewer"] = change(scene, count=scene.count - 1)
    if len(scene.names) == 2:
        wrong["one missing"] = SixScene(scene.names[:1], scene.ground, colours=(first, None))
    if first:
        paint = pick(PAINTS, (scene.ground, *scene.colours))
        wrong["another colour"] = change(scene, colours=(paint, scene.colours[1]))
    if scene.colours[1]:
        wrong["colours swapped"] = change(scene, colours=scene.colours[::-1])
    if scene.relation:
        wrong["places swapped"] = change(scene, names=scene.names[::-1])
        wrong["another relation"] = change(scene, relation=OPPOSITE[scene.relation])
    return wrong


def test_wrong_scenes_are_refused():
    "An image with one thing wrong fails, in each task and for each kind of mistake."
    rng = np.random.default_rng(0)
    scenes = sample_six_tasks(90, DRAWINGS.objects, seed=1, split="train")
    tasks, kinds, prompts, images = [], [], [], []
    for scene in scenes:
        for kind, wrong in wrong_scenes(scene, rng).items():
            tasks.append(scene.task)
            kinds.append(kind)
            prompts.append(scene.prompt())
            images.append(render_six(wrong, DRAWINGS, rng))
    refused = 1 - CHECK(pil_to_tensor(images), prompts)
    assert set(tasks) == set(TASKS) and len(set(kinds)) == 9
    for names in (tasks, kinds):
        for name in set(names):
            rows = [other == name for other in names]
            assert refused[rows].mean() >= 0.97, name


def test_empty_images_and_noise():
    "A blank ground (the right one), white, black, noise, noise on the right ground: all zero."
    generator = torch.Generator().manual_seed(0)
    prompts = [scene.prompt() for scene in SCENES]
    grounds = ground_images()
    noise = torch.randn(grounds.shape, generator=generator)
    blank, white, black = grounds, torch.ones_like(grounds), torch.zeros_like(grounds)
    uniform = torch.rand(grounds.shape, generator=generator)
    for images in (blank, white, black, uniform, (grounds + 0.3 * noise).clamp(0, 1)):
        assert CHECK(images, prompts).sum() == 0


def ground_images():
    "The ground of each of SCENES, and nothing on it."
    colours = torch.tensor([GROUNDS[scene.ground] for scene in SCENES]) / 255
    return colours.view(-1, 3, 1, 1).expand(-1, 3, 128, 128)


def render_all(scenes):
    "Rendered with one seed per row: same places, same hands."
    images = []
    for seed, scene in enumerate(scenes):
        images.append(render_six(scene, DRAWINGS, np.random.default_rng(seed)))
    return pil_to_tensor(images)


def blur(images):
    for size in (1, 4, 8, 16, 32):
        yield F.interpolate(F.avg_pool2d(images, size), 128, mode="bilinear")


def add_noise(images):
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    for amount in (0, 0.1, 0.25, 0.5, 1):
        yield (images + amount * noise).clamp(0, 1)


def fade(images):
    for share in (0, 0.1, 0.2, 0.3, 1):
        yield torch.lerp(images, ground_images(), share)


def other_objects(images):
    rng = np.random.default_rng(7)
    others = []
    for scene in SCENES:
        strangers = [name for name in DRAWINGS.objects if name not in scene.names]
        names = tuple(rng.permutation(strangers)[: len(scene.names)])
        others.append(dataclasses.replace(scene, names=names))
    wrong = render_all(others)
    for share in MIXES:
        yield torch.lerp(images, wrong, share)


def other_colours(images):
    rng = np.random.default_rng(7)
    others = []
    for scene in SCENES:
        paints = [paint for paint in PAINTS if paint not in (scene.ground, *scene.colours)]
        colours = tuple(rng.permutation(paints)[:2])
        others.append(dataclasses.replace(scene, colours=colours) if scene.colours[0] else scene)
    wrong = render_all(others)
    for share in MIXES:
        yield torch.lerp(images, wrong, share)


@pytest.mark.parametrize("degrade", [blur, add_noise, fade, other_objects, other_colours])
def test_the_score_falls(degrade):
    "Clean images pass, the worst fail, and hardly any image passes again when it gets worse."
    rows = list(range(len(SCENES)))
    if degrade is other_colours:
        rows = [row for row in rows if SCENES[row].colours[0]]
    prompts = [SCENES[row].prompt() for row in rows]
    steps = degrade(render_all(SCENES))
    scores = torch.stack([CHECK(images[rows], prompts) for images in steps])
    assert (scores[1:] <= scores[:-1]).float().mean() >= 0.95
    assert scores[0].mean() >= 0.97 and scores[-1].mean() <= 0.03
