"""GRPO for GLM-Image, written as notebooks."""

import importlib
import os
from typing import TYPE_CHECKING

# Threads that wait for each other spin, by default for milliseconds, and on a busy machine they take
# the time of the thread they wait for. It is read when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

__version__ = "0.1.0"

# The names most people need, each with its module. They are imported when they are first used:
# `from glm_grpo import compute_advantages` needs torch, but neither transformers nor diffusers.
_HOMES = {
    "compute_advantages": "maths.advantages",
    "compute_grpo_loss": "maths.loss",
    "matching_logprob": "maths.matching",
    "nft_terms": "maths.matching",
    "sde_step": "maths.sde",
    "pil_to_tensor": "data.images",
    "tensor_to_pil": "data.images",
    "T2IDataset": "data.prompts",
    "I2IDataset": "data.prompts",
    "make_dataloader": "data.loader",
    "GLMImageWrapper": "model.wrapper",
    "simple_reward_function": "rewards.calling",
    "edit_reward": "rewards.scenes",
    "sign_reward": "rewards.scenes",
    "MinimalGRPOTrainer": "training.trainer",
}

__all__ = list(_HOMES)

if TYPE_CHECKING:  # the same names for editors and type checkers, which run no code
    from .data.images import pil_to_tensor, tensor_to_pil
    from .data.loader import make_dataloader
    from .data.prompts import I2IDataset, T2IDataset
    from .maths.advantages import compute_advantages
    from .maths.loss import compute_grpo_loss
    from .maths.matching import matching_logprob, nft_terms
    from .maths.sde import sde_step
    from .model.wrapper import GLMImageWrapper
    from .rewards.calling import simple_reward_function
    from .rewards.scenes import edit_reward, sign_reward
    from .training.trainer import MinimalGRPOTrainer


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__():
    return [*globals(), *_HOMES]
