"""Resuming: the optimizer's file is mapped, and let go of once it has been taken."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from glm_grpo.training.checkpoints import read_state
from glm_grpo.training.optimizer import PolicyOptimizer
from glm_grpo.training.options import OptimizerOptions


def make_optimizer():
    weights = [torch.nn.Parameter(torch.ones(300, 300)), torch.nn.Parameter(torch.ones(7))]
    return PolicyOptimizer({"ar": weights}, OptimizerOptions())


def step(optimizer):
    for p in optimizer.trained:
        p.grad = torch.ones_like(p)
    optimizer.step()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is mapped")
def test_the_optimizers_file_is_mapped_until_its_numbers_are_taken(tmp_path):
    saved, resumed = make_optimizer(), make_optimizer()
    step(saved)
    torch.save(saved.adamw.state_dict(), tmp_path / "optimizer.pt")

    def mapped():
        return str(tmp_path / "optimizer.pt") in Path("/proc/self/maps").read_text()

    adamw, masters, _ = read_state(tmp_path, resumed)
    assert mapped()  # else each rank has a whole copy
    resumed.load_state_dict(adamw, masters)
    del adamw
    gc.collect()
    assert not mapped()  # a checkpoint that is deleted takes nothing with it
    for p, old in zip(resumed.trained, saved.trained):
        for name, value in saved.adamw.state[old].items():
            assert torch.equal(resumed.adamw.state[p][name], value)
