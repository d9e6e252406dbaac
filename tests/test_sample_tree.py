"What the tree of one prompt's samples draws and says: each column, frame, map and number."

import matplotlib.colors
import pytest
import torch
from PIL import Image

from glm_grpo.run.sample_tree import SampleTree, plot_sample, plot_tree, sample_tree
from glm_grpo.training.toy import ICONS, ToyStudio, icon_images, nearness
from glm_grpo.training.trainer import MinimalGRPOTrainer

COLOURS = ["red", "lime", "blue"]


def lay_out(values):
    "A preview of one token and a large grid of four."
    return [("preview", values[:1].view(1, 1)), ("large", values[1:].view(2, 2))]


@pytest.fixture
def tree():
    "Three samples with one image each: advantages -1, 0.5 and 2, one clipped token in the last."
    ratios = torch.tensor([[1.0] * 5, [1.1] * 5, [2.0, 1.0, 1.0, 1.0, 1.0]])
    return SampleTree(
        "a cat",
        [[Image.new("RGB", (4, 4), colour)] for colour in COLOURS],
        torch.tensor([[0.25], [0.5], [0.75]]),
        torch.tensor([-1.0, 0.5, 2.0]),
        -torch.arange(15.0).view(3, 5),
        ratios,
        0.3,
        lay_out,
    )


def test_facts_are_those_of_the_sample(tree):
    facts = tree.facts(2)
    expected = {
        "reward": 0.75,
        "advantage": 2,
        "mean_ratio": 1.2,
        "clipped": 0.2,
        "mean_credit": 1.6,
    }
    assert facts == pytest.approx(expected)
    assert tree.facts(1)["clipped"] == 0  # a ratio of 1.1 is within the clip range of 0.3


def texts_at(ax):
    "(x, y) -> (text, colour)."
    found = {}
    for text in ax.texts:
        x, y = text.get_position()
        found[round(x, 2), round(y, 2)] = text.get_text(), text.get_color()
    return found


def test_each_sample_has_its_column(tree):
    figure = plot_tree(tree)
    (ax,) = figure.axes
    texts = texts_at(ax)
    green, red = texts[3, 0.95][1], texts[1, 0.95][1]
    assert [texts[x, 1.3][0] for x in (1, 2, 3)] == ["0.250", "0.500", "0.750"]
    assert [texts[x, 0.95] for x in (1, 2, 3)] == [
        ("-1.00", red),
        ("+0.50", green),
        ("+2.00", green),
    ]
    r, g, _ = matplotlib.colors.to_rgb(green)
    assert g > r and matplotlib.colors.to_rgb(red)[0] > matplotlib.colors.to_rgb(red)[1]


def test_a_column_shows_the_large_grid_and_the_image(tree):
    (ax,) = plot_tree(tree).axes
    middles = {}
    for image in ax.images:
        left, right, bottom, top = image.get_extent()
        middles[round((left + right) / 2), round((bottom + top) / 2)] = image.get_array()
    for sample, colour in enumerate(COLOURS):
        decisions = torch.as_tensor(middles[sample + 1, 3].data)
        assert torch.equal(decisions, tree.old_logprobs[sample, 1:].view(2, 2))
        pixel = middles[sample + 1, 2][0, 0] / 255
        assert tuple(pixel) == matplotlib.colors.to_rgb(colour)


def test_the_chosen_sample_has_a_frame(tree):
    def frames(chosen):
        (ax,) = plot_tree(tree, chosen).axes
        return [line.get_xdata() for line in ax.lines if len(line.get_xdata()) == 5]

    assert frames(None) == []
    (across,) = frames(1)
    assert min(across) < 2 < max(across) and max(across) - min(across) < 1


def test_the_maps_of_a_sample(tree):
    "Its image, then log-ratios and credits with one scale for all samples, labelled by kind."
    figure = plot_sample(tree, 2)
    image, *maps = [ax for ax in figure.axes if ax.get_title()]
    assert tuple(image.images[0].get_array()[0, 0]) == (0, 0, 255)
    assert "sample 3" in image.get_title() and "0.750" in image.get_title()
    assert [ax.get_title().split("\n") for ax in maps] == [
        ["ratio", "preview"],
        ["ratio", "large"],
        ["credit", "preview"],
        ["credit", "large"],
    ]
    shown = [torch.as_tensor(ax.images[0].get_array().data).flatten() for ax in maps]
    assert torch.equal(torch.cat(shown[:2]), tree.ratios[2].log())
    assert torch.equal(torch.cat(shown[2:]), tree.credit[2])
    limits = [ax.images[0].get_clim() for ax in plot_sample(tree, 0).axes if ax.get_title()][1:]
    assert limits == [ax.images[0].get_clim() for ax in maps] and limits[2] == (-2, 2)


def test_a_bar_of_ratios_is_labelled_with_ratios(tree):
    bars = [ax for ax in plot_sample(tree, 2).axes if not ax.get_title()]
    labels = [[label.get_text() for label in bar.get_xticklabels()] for bar in bars]
    low, middle, high = map(float, labels[0])
    assert middle == 1 and low == pytest.approx(1 / high, rel=0.05) and high > 1
    assert labels[3] == ["-2", "0", "2"]


def test_a_group_of_a_step_as_a_tree():
    "Two images per sample: the rewards of its own images, the clip range that is given."
    icons = list(ICONS)[:2]
    studio, batch = ToyStudio(icons), {"prompts": icons, "target_images": icon_images(icons)}
    small = {"group_size": 4, "height": 32, "width": 32, "callbacks": ()}
    trainer = MinimalGRPOTrainer(studio, [batch], nearness, **small)
    trainer.train(num_steps=1)
    experience = trainer.last_experience
    tree = sample_tree(experience, studio.policies, 1, "ar", clip_range=0.05)
    assert tree.clip_range == 0.05 and tree.rewards.shape == (4, 2)
    assert torch.equal(tree.rewards.flatten(), experience.rewards[8:])
    assert not torch.equal(tree.rewards[:, 0], tree.rewards[:, 1])
