"""GRPO for GLM-Image, written as notebooks."""

import importlib

__version__ = "0.1.0"

# The names most people need, each with its module. They are imported when they are first used:
# `from glm_grpo import compute_advantages` needs torch, but neither transformers nor diffusers.
_HOMES = {
    "compute_advantages": "maths.advantages",
    "compute_grpo_loss": "maths.loss",
    "sde_step": "maths.sde",
    "pil_to_tensor": "data.images",
    "tensor_to_pil": "data.images",
    "T2IDataset": "data.prompts",
    "I2IDataset": "data.prompts",
    "make_dataloader": "data.loader",
    "GLMImageWrapper": "model.wrapper",
    "simple_reward_function": "rewards.calling",
    "edit_reward": "rewards.edits",
    "sign_reward": "rewards.signs",
    "MinimalGRPOTrainer": "training.trainer",
}

__all__ = list(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__():
    return [*globals(), *_HOMES]
