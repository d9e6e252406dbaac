"One optimizer step per rollout: the old log-probs come from the update, and nothing else changes."

import pytest
import torch
from PIL import Image
from helpers import small_model

from glm_grpo.data.rollout import Terms
from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.toy import ICONS, ToyPainter, icon_images, nearness
from glm_grpo.training.trainer import MinimalGRPOTrainer

PROMPTS = list(ICONS)
SOURCES = [[Image.new("RGB", (64, 64), colour)] for colour in ("olive", "navy")]
# an edit has no preview, so its tokens are sampled in 4 steps and not in 260
BATCH = {"prompts": ["two red cats", "a dog on a blue ground"], "source_images": SOURCES}
HOT = {"height": 64, "width": 64, "num_inference_steps": 2, "temperature": 1.5, "top_p": 1.0}


def flat_for_cats(images, prompts):
    "All rewards of the first prompt are equal, so its group is not scored in the update."
    redness = images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
    return redness * torch.tensor(["dog" in prompt for prompt in prompts])


def tiny_run(scores_always, monkeypatch):
    "Weights and metrics of two steps, and how often tokens were scored without gradient."
    model = GLMImageWrapper(small_model(), "both", device="cpu", lora={"rank": 4})
    options = HOT | {"micro_batch_size": 4, "callbacks": (), "dit_learning_rate": 1e-3}
    options["mode"] = "i2i"
    trainer = MinimalGRPOTrainer(
        model, [BATCH], flat_for_cats, group_size=2, learning_rate=1e-2, **options
    )
    if scores_always:
        collect = trainer.collector.collect
        trainer.collector.collect = lambda batch, step, agreement: collect(batch, step)
    passes, score = [], model.compute_token_logprobs

    def counted(*args):
        passes.append(torch.is_grad_enabled())
        return score(*args)

    monkeypatch.setattr(model, "compute_token_logprobs", counted)
    lines = trainer.train(2)
    weights = [w.detach().clone() for w in model.get_trainable_parameters()]
    for line in lines:
        for name in [n for n in line if n.startswith(("seconds", "memory"))]:
            del line[name]
    return weights, lines, passes.count(False)


def test_weights_and_metrics_are_those_of_a_run_that_scores_twice(monkeypatch):
    weights, lines, passes = tiny_run(False, monkeypatch)
    twice, lines_twice, passes_twice = tiny_run(True, monkeypatch)
    assert (passes, passes_twice) == (1, 2)  # the first step of a run always scores
    assert all(map(torch.equal, weights, twice)) and any(w.any() for w in weights)
    assert lines == lines_twice
    assert lines[1]["ar/grad_norm"] > 0 and lines[1]["ar/ratio_std"] == 0


def toy_steps(**changes):
    "Whether each of three steps asked the model for old log-probs."
    model, asked = ToyPainter(PROMPTS), []
    sample = model.generate_with_tracking

    def noted(*args, score, **options):
        asked.append(score)
        return sample(*args, **options)

    model.generate_with_tracking = noted
    batch = {"prompts": PROMPTS, "target_images": icon_images(PROMPTS)}
    options = {"group_size": 4, "learning_rate": 0.1, "callbacks": ()} | changes
    trainer = MinimalGRPOTrainer(model, [batch], nearness, **options)
    return trainer, asked


def test_several_updates_need_the_log_probs_of_sampling():
    for changes in ({"mini_batches": 2}, {"updates_per_rollout": 2}):
        trainer, asked = toy_steps(**changes)
        trainer.train(3)
        assert asked == [True] * 3


def test_one_update_needs_them_in_the_first_step_of_a_run():
    trainer, asked = toy_steps()
    trainer.train(2)
    trainer.train_step(trainer.train_dataloader[0])
    assert asked == [True, False, False]
    trainer.collect(trainer.train_dataloader[0])  # for a closer look
    trainer.generate_samples(PROMPTS[:1])
    assert asked[3:] == [True, True]


def test_a_gap_that_was_let_pass_is_measured_in_each_step():
    trainer, asked = toy_steps(allow_ratio_gap=True)
    policy = trainer.policies["ar"]
    policy.terms = lambda samples, *rest: Terms(1.02 * policy.score(samples))
    with pytest.warns(UserWarning, match="new and old differ") as warned:
        lines = trainer.train(3)
    assert (
        len(warned) == 1
        and asked == [True] * 3
        and all(line["old_new_gap"] > 1e-3 for line in lines)
    )
