"""The plain way and the trainer compute the same numbers, each by its own code."""

import copy

import pytest
import torch
from helpers import small_model

from glm_grpo import plain
from glm_grpo.model.sampling import unpack_kept
from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.training.trainer import MinimalGRPOTrainer

BATCH = {"prompts": ["two red cats", 'a dog on a blue ground with the word "AT"']}
RECIPE = plain.Recipe(
    height=64,
    width=64,
    group_size=2,
    temperature=1.5,
    top_p=0.9,
    num_inference_steps=3,
    clip_range=0.01,
    dit_clip_range=0.02,
)
LEARNING_RATE, UPDATES = 1e-4, 2  # in the second update the ratio is no longer 1


def redness(images):
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


@pytest.fixture(params=["ar", "dit"])
def both(request):
    "A pipeline for the plain way with its weights, and a trainer with a rollout of its own."
    model = GLMImageWrapper(small_model(), request.param, device="cpu")
    pipe = copy.deepcopy(model.pipe)
    names = ("height", "width", "temperature", "top_p", "num_inference_steps", "noise_level")
    names += ("guidance_scale", "group_size", "clip_range", "dit_clip_range", "max_grad_norm")
    options = {name: getattr(RECIPE, name) for name in names}
    options |= {
        "learning_rate": LEARNING_RATE,
        "updates_per_rollout": UPDATES,
        "callbacks": (),
    }
    trainer = MinimalGRPOTrainer(model, [], redness, **options)
    return pipe, trainer, trainer.collect(BATCH)


def trained(module):
    return {name: w for name, w in module.named_parameters() if w.requires_grad}


def make_again(pipe, half, rollout):
    "The plain way's samples and images, of the trainer's tokens and noise."
    prompts = [p for p in BATCH["prompts"] for _ in range(RECIPE.group_size)]
    samples, images = [], []
    for row, prompt in enumerate(prompts):
        ids, first = rollout.token_ids[row], rollout.initial_latents[row : row + 1]
        if half == "ar":
            kept = unpack_kept(rollout.tokens.kept[row], 1024)
            inputs = plain.read_prompt(pipe, prompt, RECIPE)
            samples.append(plain.TokenSample(*inputs, ids, kept, rollout.token_logprobs[row]))
            images.append(plain.make_image(pipe, prompt, ids, first, RECIPE))
            continue
        denoising = rollout.denoising
        mean, after = denoising.latents_means[row], denoising.latents_after[row]
        noise = (after - mean) / torch.tensor(denoising.objective.stds(denoising))[
            :, None, None, None
        ]
        given = pipe, prompt, ids, torch.cat([first, noise]), RECIPE
        image, sample = plain.sample_denoising(*given)
        samples.append(sample)
        images.append(image)
    return samples, torch.stack(images)


def learn(pipe, half, samples, advantages):
    "The losses of the plain way's updates, and the gradient of the first."
    ar, dit = pipe.vision_language_encoder, pipe.transformer
    module = ar if half == "ar" else dit
    optimizer = torch.optim.AdamW(trained(module).values(), lr=LEARNING_RATE, weight_decay=0.0)
    old = torch.stack([torch.as_tensor(sample.logprobs) for sample in samples])
    clip_range = RECIPE.clip_range if half == "ar" else RECIPE.dit_clip_range
    losses, gradients = [], None
    for _ in range(UPDATES):
        score, scorer = plain.score_denoising, pipe
        if half == "ar":
            score, scorer = plain.score_tokens, ar
        new = torch.stack([score(scorer, sample, RECIPE) for sample in samples])
        limits = clip_range, RECIPE.max_grad_norm
        losses.append(plain.update(optimizer, new, old, advantages, *limits)["loss"])
        gradients = gradients or {name: w.grad.clone() for name, w in trained(module).items()}
    return losses, gradients


def test_one_step_gives_the_trainers_numbers(both, monkeypatch):
    pipe, trainer, experience = both
    (half,) = trainer.policies
    module = {"ar": pipe.vision_language_encoder, "dit": pipe.transformer}[half]
    theirs = {"ar": trainer.model.ar, "dit": trainer.model.dit}[half]
    before = {name: w.detach().clone() for name, w in trained(module).items()}

    samples, images = make_again(pipe, half, experience.rollout)
    assert (images - experience.rollout.image_tensors).abs().max() < 1e-4
    rewards = redness(images)
    assert torch.allclose(rewards, experience.rewards, atol=1e-5)
    advantages = plain.compute_advantages(rewards, RECIPE.group_size)
    own = experience.samples[half]
    assert torch.allclose(advantages, own.advantages, atol=1e-3)
    logprobs = torch.stack([torch.as_tensor(sample.logprobs) for sample in samples])
    assert torch.allclose(logprobs, own.old_logprobs, atol=1e-3)

    lines, gradients = [], []
    update, step = trainer.learner.update, trainer.optimizer.step

    def noted_update(minibatch):
        lines.append(update(minibatch)[half])
        return {half: lines[-1]}

    def noted_step():
        gradients.append({name: w.grad.clone() for name, w in trained(theirs).items()})
        step()

    monkeypatch.setattr(trainer.learner, "update", noted_update)
    monkeypatch.setattr(trainer.optimizer, "step", noted_step)
    trainer.learn(experience)

    losses, plain_gradients = learn(pipe, half, samples, own.advantages)
    assert losses == pytest.approx([line["loss"] for line in lines], abs=1e-5)
    assert 0 < lines[1]["clip_fraction"] < 1
    assert plain_gradients.keys() == gradients[0].keys()
    for name, gradient in gradients[0].items():
        assert torch.allclose(plain_gradients[name], gradient, atol=1e-5), name
    # AdamW nearly takes the gradient's sign, so weights without a real gradient differ by rounding
    for name, weight in trained(module).items():
        real = gradients[0][name].abs() > 1e-4
        apart, moved = weight - trained(theirs)[name], weight - before[name]
        assert apart[real].norm() <= 0.02 * moved[real].norm(), name
