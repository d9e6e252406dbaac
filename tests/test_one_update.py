"One optimizer step per rollout: the old log-probs come from the update, and nothing else changes."

from pathlib import Path

import pytest
import torch

from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.training.toy import ICONS, ToyPainter, icon_images, nearness
from glm_grpo.training.trainer import MinimalGRPOTrainer

TINY = Path(__file__).parents[1] / "data/tiny-glm-image"
PROMPTS = list(ICONS)
BATCH = {"prompts": ["two red cats", "a dog on a blue ground"]}
HOT = {"height": 64, "width": 64, "num_inference_steps": 2, "temperature": 1.5, "top_p": 1.0}


def redness(images):
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


def flat_for_cats(images, prompts):
    "All rewards of the first prompt are equal, so its group is not scored in the update."
    return redness(images) * torch.tensor(["dog" in prompt for prompt in prompts])


def tiny_run(component, reward, scores_always, monkeypatch):
    "Weights and metrics of two steps, and how often tokens were scored without gradient."
    model = GLMImageWrapper(TINY, component, device="cpu", lora={"rank": 4})
    options = HOT | {"micro_batch_size": 4, "callbacks": (), "dit_learning_rate": 1e-3}
    trainer = MinimalGRPOTrainer(
        model, [BATCH], reward, group_size=4, learning_rate=1e-2, **options
    )
    if scores_always:
        monkeypatch.setattr("glm_grpo.training.collector.needs_old_logprobs", lambda *known: True)
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


@pytest.mark.parametrize("component, reward", [("ar", flat_for_cats), ("both", redness)])
def test_weights_and_metrics_are_those_of_a_run_that_scores_twice(component, reward, monkeypatch):
    weights, lines, passes = tiny_run(component, reward, False, monkeypatch)
    twice, lines_twice, passes_twice = tiny_run(component, reward, True, monkeypatch)
    assert (passes, passes_twice) == (1, 2)  # the first step of a run always scores
    assert all(map(torch.equal, weights, twice)) and any(w.any() for w in weights)
    assert lines == lines_twice
    prefix = "ar/" if component == "both" else ""
    assert lines[1][f"{prefix}grad_norm"] > 0 and lines[1][f"{prefix}ratio_std"] == 0


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


@pytest.mark.parametrize("changes", [{"mini_batches": 2}, {"updates_per_rollout": 2}])
def test_several_updates_need_the_log_probs_of_sampling(changes):
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
    trainer.score = lambda policy, chunk, beta: (1.02 * policy.score(chunk), {})
    with pytest.warns(UserWarning, match="new and old differ"):
        lines = trainer.train(3)
    assert asked == [True] * 3 and all(line["old_new_gap"] > 1e-3 for line in lines)
