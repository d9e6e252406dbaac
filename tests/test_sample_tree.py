"What the tree of one prompt's samples draws and says: each column, frame, map and number."

import pytest
import torch
from PIL import Image

from glm_grpo.run.explore import SampleTree, plot_sample, plot_tree, sample_tree
from glm_grpo.training.toy import ICONS, ToyStudio, icon_images, nearness
from glm_grpo.training.trainer import MinimalGRPOTrainer

COLOURS = ["red", "lime", "blue"]


def lay_out(values):
    "A preview of one token and a large grid of four."
    return [("preview", values[:1].view(1, 1)), ("large", values[1:].view(2, 2))]


@pytest.fixture
def tree():
    "Three samples with one image each: advantages -1, 0.5 and 2."
    return SampleTree(
        prompt="a cat",
        images=[[Image.new("RGB", (4, 4), colour)] for colour in COLOURS],
        rewards=torch.tensor([0.25, 0.5, 0.75]),
        advantages=torch.tensor([-1.0, 0.5, 2.0]),
        old_logprobs=-torch.arange(15.0).view(3, 5),
        ratios=torch.tensor([[1.0] * 5, [1.1] * 5, [2.0, 1.0, 1.0, 1.0, 1.0]]),
        credit=torch.tensor([[-1.0] * 5, [0.5] * 5, [0.0, 2.0, 2.0, 2.0, 2.0]]),
        lay_out=lay_out,
    )


def test_each_sample_has_its_column(tree):
    axes = plot_tree(tree).axes
    tops, images = axes[:3], axes[3:]
    words = ["reward 0.25\nadvantage -1.00", "reward 0.5\nadvantage +0.50"]
    assert [ax.get_xlabel() for ax in images] == [*words, "reward 0.75\nadvantage +2.00"]
    red, green, also_green = (ax.xaxis.label.get_color() for ax in images)
    assert red != green == also_green
    for i, colour in enumerate([(255, 0, 0), (0, 255, 0), (0, 0, 255)]):
        shown = torch.as_tensor(tops[i].images[0].get_array().data)
        assert torch.equal(shown, tree.old_logprobs[i, 1:].view(2, 2))  # the large grid
        assert tuple(images[i].images[0].get_array()[0, 0]) == colour


def test_the_chosen_sample_has_a_frame(tree):
    def framed(chosen):
        edges = [ax.spines["left"].get_linewidth() for ax in plot_tree(tree, chosen).axes]
        return [i for i, width in enumerate(edges) if width > 1]

    assert framed(None) == [] and framed(1) == [1, 4]  # of both rows


def test_the_maps_of_a_sample(tree):
    "Its image, then log-ratios and credits with one scale for all samples, labelled by kind."
    image, *maps = [ax for ax in plot_sample(tree, 2).axes if ax.get_title()]
    assert tuple(image.images[0].get_array()[0, 0]) == (0, 0, 255)
    assert "sample 3" in image.get_title() and "0.75" in image.get_title()
    titles = [(kind, name) for kind in ("ratio", "credit") for name in ("preview", "large")]
    assert [tuple(ax.get_title().split("\n")) for ax in maps] == titles
    limits = [ax.images[0].get_clim() for ax in plot_sample(tree, 0).axes if ax.get_title()][1:]
    assert limits == [ax.images[0].get_clim() for ax in maps] and limits[2] == (-2, 2)


def test_a_bar_of_ratios_is_labelled_with_ratios(tree):
    bars = [ax for ax in plot_sample(tree, 2).axes if not ax.get_title()]
    labels = [[label.get_text() for label in bar.get_xticklabels()] for bar in bars]
    low, middle, high = map(float, labels[0])
    assert middle == 1 and low == pytest.approx(1 / high, rel=0.05) and high > 1
    assert labels[3] == ["-2", "0", "2"]


@pytest.mark.parametrize("policy", ["ar", "dit"])
def test_a_group_of_a_step_has_the_credit_of_the_trainers_clip_range(policy):
    "Of tokens the credit is that of the logit, ratio x advantage x (1 - p)."
    icons = list(ICONS)[:2]
    studio, batch = ToyStudio(icons), {"prompts": icons, "target_images": icon_images(icons)}
    trainer = MinimalGRPOTrainer(studio, [batch], nearness, callbacks=(), learning_rate=0.5)
    trainer.train(num_steps=1)
    credit = {}
    for clip_range in (0.01, 1e9):
        option = "dit_clip_range" if policy == "dit" else "clip_range"
        trainer.options = trainer.options.with_changes(**{option: clip_range})
        tree = sample_tree(trainer, 1, policy)
        credit[clip_range] = tree.credit
    assert (credit[0.01] == 0).sum() > (credit[1e9] == 0).sum()
    free = tree.ratios * tree.advantages[:, None]
    if policy == "ar":
        free = free * (1 - tree.ratios * tree.old_logprobs.exp())
    assert torch.allclose(credit[1e9], free, atol=1e-6) and free.any()
