"""One rank of a short training whose weights move in the same way however many ranks there are. It
writes what it sampled and its gradients to OUT/WORLD_RANK.pt."""

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from glm_grpo.data.basics import UserError
from glm_grpo.data.loader import make_dataloader
from glm_grpo.model.loading import shard_like
from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.training.callbacks import Callback
from glm_grpo.training.ranks import Ranks, full_tensor
from glm_grpo.training.trainer import MinimalGRPOTrainer


@dataclass
class Work:
    "What a rank is asked to do."

    prompts: list[str]
    out: str  # folder
    component: str = "ar"
    scale: str = "group"
    mini_batches: int = 1
    full: bool = False  # all weights, spread over the ranks, instead of LoRA
    matching: bool = False  # the DiT learns from finished images, and no step adds noise
    fails: int | None = None  # the rank whose reward fails
    steps: int = 2
    sources: bool = False  # each prompt edits an image; this takes fewer tokens
    model: str = "data/tiny-glm-image"
    device: str | None = "cpu"  # None: each rank's own

    @property
    def micro_batch_size(self):
        if not self.full:
            return 2
        return 1 if self.component == "ar" else 4

    def green(self, rank):
        "The reward of a rank."

        def green(images):
            if self.fails == rank:
                raise RuntimeError("the paint is dry")
            return images[:, 1].mean((1, 2)) - images[:, [0, 2]].mean((1, 2, 3))

        return green


class StopOnLastRank(Callback):
    "After some steps, one rank alone is asked to stop."

    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, trainer, metrics, experience):
        last = trainer.ranks.rank == trainer.ranks.world - 1
        trainer.stop = trainer.step == self.steps and last


class Recorder:
    "Keeps what a trainer samples and its gradients; moves its weights by chance instead."

    def __init__(self, trainer, size):
        self.trainer, self.size = trainer, size
        self.gradients, self.experiences = [], []
        self.collect_as_usual = trainer.collect
        trainer.collect = self.collect
        trainer.optimizer.step = self.step

    def collect(self, batch, at_once=False):
        self.experiences.append(self.collect_as_usual(batch, at_once))
        return self.experiences[-1]

    @torch.no_grad()
    def step(self):
        """The same for all worlds. After a step along the gradient, a rounding error could turn one
        token of thousands, and then a whole image."""
        trained = self.trainer.optimizer.trained
        self.gradients.append(torch.cat([full_tensor(p.grad).flatten() for p in trained]))
        g = torch.Generator().manual_seed(len(self.gradients))
        for p in trained:
            p += shard_like((self.size * torch.randn(p.shape, generator=g)).to(p.device), p)


def make_model(work, ranks):
    model = GLMImageWrapper(
        work.model,
        work.component,
        lora=None if work.full else {"rank": 2},
        device=ranks.device or work.device,
        torch_dtype="float32",
    )
    if work.full:
        ranks.shard(model)
    return model


def make_trainer(work, ranks):
    samples = []
    for i, prompt in enumerate(work.prompts):
        samples.append({"prompt": prompt, "target": None, "index": i, "metadata": {}})
        if work.sources:
            colour = (40 * work.prompts.index(prompt), 90, 60)  # a repeated prompt edits the same
            samples[-1]["source"] = [Image.new("RGB", (64, 64), colour)]
    loader = make_dataloader(samples, len(samples), rank=ranks.rank, world=ranks.world)
    noise = {"sde_type": "cps"} if work.component == "dit" else {}
    if work.matching:
        noise = {"dit_objective": "matching", "matching_times": 1}
    return MinimalGRPOTrainer(
        make_model(work, ranks),
        loader,
        work.green(ranks.rank),
        group_size=2,
        height=64,
        width=64,
        num_inference_steps=4 if work.matching else 2,
        guidance_scale=1,
        temperature=3,
        top_p=1,
        scale=work.scale,
        micro_batch_size=work.micro_batch_size,
        mini_batches=work.mini_batches,
        ranks=ranks,
        callbacks=[StopOnLastRank(work.steps)],
        mode="i2i" if work.sources else "t2i",
        **noise,
    )


def run(work):
    with Ranks.start(work.device) as ranks:
        trainer = make_trainer(work, ranks)
        recorder = Recorder(trainer, size=0.005 if work.full else 0.02)
        try:
            lines = trainer.train(5)
        except UserError as e:
            print(f"rank {ranks.rank} told: {e}", flush=True)
            return 2
        rollout = recorder.experiences[0].rollout
        on_this_machine = []
        ranks.once_per_machine(lambda: on_this_machine.append(ranks.rank))
        found = {
            "tokens": rollout.token_ids,
            "prompts": rollout.prompts,
            "gradients": recorder.gradients,
            "lines": lines,
            "once_per_machine": on_this_machine,  # [rank], or [] where another rank did it
        }
        torch.save(found, Path(work.out, f"{ranks.world}_{ranks.rank}.pt"))
        return 0
