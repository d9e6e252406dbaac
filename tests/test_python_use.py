"What a notebook's own code may pass to the trainer and the wrapper, and what is told if it cannot."

from dataclasses import dataclass

import pytest
import torch
from helpers import small_model

from glm_grpo import GLMImageWrapper, MinimalGRPOTrainer
from glm_grpo.data.basics import UserError
from glm_grpo.rewards.weighted import WeightedReward
from glm_grpo.toy import ICONS, ToyPainter, icon_images, nearness

PROMPTS = list(ICONS)[:2]
BATCH = {"prompts": PROMPTS, "target_images": icon_images(PROMPTS)}
SMALL = {"height": 64, "width": 64, "num_inference_steps": 1, "guidance_scale": 1.0}


def toy_trainer(reward=nearness, batches=(BATCH,), **options):
    options = {"group_size": 4, "learning_rate": 0.1, "callbacks": ()} | options
    return MinimalGRPOTrainer(ToyPainter(PROMPTS), batches, reward, **options)


@dataclass
class OfADataclass:
    "Has no hash."

    def __call__(self, images):
        return images.mean((1, 2, 3))


class OfAModule(torch.nn.Module):
    def forward(self, images):
        return images.mean((1, 2, 3))


@pytest.mark.parametrize("reward", [OfADataclass(), OfAModule()])
def test_a_reward_may_be_any_object_that_is_called(reward):
    assert toy_trainer(reward).train(1)[0]["grad_norm"] > 0


def test_parts_that_cancel_move_no_weight():
    "Each part differs within the group, their sum does not: what is left of it is rounding."
    parts = {"red": lambda images: images[:, 0].mean((1, 2))}
    parts["rest"] = lambda images: 1 - images[:, 0].mean((1, 2))
    reward = WeightedReward(parts, {"red": 1.0, "rest": 1.0})
    trainer = toy_trainer(reward, normalise="group")
    before = trainer.optimizer.trained[0].detach().clone()
    (line,) = trainer.train(1)
    assert line["equal_groups"] == 1 and line["grad_norm"] == 0
    assert torch.equal(trainer.optimizer.trained[0], before)


@pytest.mark.parametrize(
    "batch, message",
    [
        ({"metadata": [{}, {}, {}]}, "as many metadata as prompts"),
        ({"metadata": [{}]}, "as many metadata as prompts"),
        ({"metadata": {"count": [1]}}, "as many metadata as prompts"),
        ({"metadata": {"count": 1}}, "as many metadata as prompts"),
        ({"source_images": ["a.png", "b.png"]}, "give PIL images"),
    ],
)
def test_a_batch_that_does_not_fit(batch, message):
    with pytest.raises(UserError, match=message):
        toy_trainer().train_step(BATCH | batch)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"group_size": 2.5}, "group_size 2.5: must be a whole number"),
        ({"group_size": "4"}, "group_size 4: must be a whole number"),
        ({"height": "64"}, "height 64: must be a whole number"),
        ({"learning_rate": "1e-5"}, "learning_rate 1e-5: must be a number"),
        ({"learning_rate": True}, "learning_rate True: must be a number"),
        ({"shared_noise": "no"}, "shared_noise no: must be true or false"),
    ],
)
def test_an_option_of_another_type(options, message):
    with pytest.raises(UserError, match=message):
        toy_trainer(**options)


def test_batches_that_come_once_are_not_called_none():
    batches = (batch for batch in [BATCH, BATCH])
    with pytest.raises(UserError, match="gives its batches once"):
        toy_trainer(batches=batches).train(3)


def test_what_the_wrapper_refuses():
    wrapper = GLMImageWrapper(small_model(), "both", device="cpu", lora={"rank": 4})
    for arguments, message in (
        ({"prompts": []}, "no prompts"),
        ({"prompts": PROMPTS, "seed": [1]}, "1 seeds for 2 prompts"),
        ({"prompts": PROMPTS, "seed": [1, 2, 3]}, "3 seeds for 2 prompts"),
        ({"prompts": PROMPTS, "height": 0}, "multiple of 32"),
        ({"prompts": PROMPTS, "height": -64}, "multiple of 32"),
    ):
        with pytest.raises(UserError, match=message):
            wrapper.generate_with_tracking(**SMALL | arguments)
    for lora, message in (({"rang": 4}, "no option rang"), ({"rank": "4"}, "rank"), (3, "lora 3")):
        with pytest.raises(UserError, match=message):
            GLMImageWrapper(small_model(), lora=lora, device="cpu")
    with pytest.raises(UserError, match="no denoising decisions"):
        wrapper.compute_denoising_logprobs({})
    options = SMALL | {"group_size": 2, "images_per_sample": 2}
    trainer = MinimalGRPOTrainer(wrapper, [], OfAModule(), **options)
    images, logprobs, token_ids = trainer.generate_samples(PROMPTS[:1])
    assert len(images) == len(token_ids) == 4 and len(logprobs) == 2
