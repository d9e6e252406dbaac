"""GRPO for GLM-Image, written as notebooks."""

import importlib
import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# The names most people need, each with its module. They are imported when they are first used:
# `from glm_grpo import compute_advantages` needs torch, but neither transformers nor diffusers.
_HOMES = {
    "compute_advantages": "maths.advantages",
    "compute_grpo_loss": "maths.loss",
    "spo_loss": "maths.loss",
    "matching_logprob": "maths.matching",
    "nft_terms": "maths.matching",
    "pair_terms": "maths.matching",
    "sde_step": "maths.sde",
    "pil_to_tensor": "data.images",
    "tensor_to_pil": "data.images",
    "T2IDataset": "data.prompts",
    "I2IDataset": "data.prompts",
    "make_dataloader": "data.loader",
    "Policy": "data.rollout",
    "Rollout": "data.rollout",
    "Samples": "data.rollout",
    "GLMImageWrapper": "model.wrapper",
    "simple_reward_function": "rewards.calling",
    "WeightedReward": "rewards.weighted",
    "Callback": "training.callbacks",
    "TrainerOptions": "training.options",
    "MinimalGRPOTrainer": "training.trainer",
}

__all__ = list(_HOMES)

if TYPE_CHECKING:  # the same names for editors and type checkers, which run no code
    from .data.images import pil_to_tensor, tensor_to_pil
    from .data.loader import make_dataloader
    from .data.prompts import I2IDataset, T2IDataset
    from .data.rollout import Policy, Rollout, Samples
    from .maths.advantages import compute_advantages
    from .maths.loss import compute_grpo_loss, spo_loss
    from .maths.matching import matching_logprob, nft_terms, pair_terms
    from .maths.sde import sde_step
    from .model.wrapper import GLMImageWrapper
    from .rewards.calling import simple_reward_function
    from .rewards.weighted import WeightedReward
    from .training.callbacks import Callback
    from .training.options import TrainerOptions
    from .training.trainer import MinimalGRPOTrainer


def share_cores() -> None:
    """For programs, before torch is imported: threads that wait for each other spin for milliseconds
    by default, and on a busy machine they take the time of the thread they wait for."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__():
    return [*globals(), *_HOMES]
