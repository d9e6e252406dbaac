"""Training on two ranks, each with its own device. `all_cases.py` starts two processes with these
cases. Both processes run all cases, in the same order."""

import os
from pathlib import Path

import collectives  # before a process group is made
import device
import helpers
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState, utils
from programs import train_on_ranks

from glm_grpo.training.ranks import Ranks

RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["RANKS_FOLDER"])  # of all ranks
PORTS = iter(os.environ["PORTS"].split())
MODEL = os.environ["SMALL_MODEL"]
HERE = {"model": MODEL, "device": None, "sources": True}


def before_a_process_group():
    "The old one's store may still be there, so each has a port of its own."
    PartialState._reset_state()
    os.environ["MASTER_PORT"] = next(PORTS)


@pytest.fixture
def ranks():
    before_a_process_group()
    ranks = Ranks.start()
    yield ranks
    ranks.stop()


# ------------------------------------------------------------------------------ between the ranks
def test_a_collective_takes_tensors_of_its_own_rank_only(ranks):
    own, other = torch.device("cuda", RANK), torch.device("cuda", 1 - RANK)
    assert torch.device(ranks.device) == own
    x = torch.full((2,), RANK + 1.0, device=own)
    dist.all_reduce(x)
    assert x.device == own and x.tolist() == [3, 3]
    assert ranks.gather({"rank": RANK}) == [{"rank": 0}, {"rank": 1}]
    for foreign in (torch.ones(2), torch.ones(2, device=other)):
        where = rf"{foreign.device} on the rank of {own}, at rank_cases.py"
        with pytest.raises(device.MixedDevices, match=where):
            dist.all_reduce(foreign)


def test_a_planted_mix_up_is_found(ranks, monkeypatch):
    "The loss and the gradients are summed on the CPU: gloo accepts that, NCCL does not."
    reduce = utils.reduce
    monkeypatch.setattr(utils, "reduce", lambda tensor, how: reduce(tensor.cpu(), how))
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    where = r"c10d::allreduce_ of a tensor on cpu .* at glm_grpo/training/ranks.py:\d+"
    with pytest.raises(device.MixedDevices, match=where):
        ranks.sum_gradients([weight], torch.tensor(1.0, device="cuda"))


def test_an_error_of_one_rank_does_not_wait_for_the_others(ranks):
    "They wait for it, in `gather`. Leaving the group waits for all, as with NCCL."
    if RANK == 1:
        with pytest.raises(MemoryError), ranks:
            raise MemoryError
    assert ranks.gather(RANK) == [0, 1]


# ---------------------------------------------------------------------------------------- training
def gradients_of_one_process(work, monkeypatch):
    with monkeypatch.context() as alone:
        alone.setenv("WORLD_SIZE", "1")
        assert train_on_ranks.run(work) == 0
    return torch.load(f"{work.out}/1_0.pt", weights_only=True)


def test_two_ranks_give_the_gradients_of_one_process(monkeypatch):
    "Of adapters. All weights: below, and tests/test_ranks.py."
    out = FOLDER / "gradients"
    out.mkdir(exist_ok=True)
    work = train_on_ranks.Work(helpers.PROMPTS[:2], str(out), **HERE)
    before_a_process_group()
    assert train_on_ranks.run(work) == 0
    if RANK > 0:
        return
    one = gradients_of_one_process(work, monkeypatch)
    two = [torch.load(out / f"2_{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert torch.equal(torch.cat([rank["tokens"] for rank in two]), one["tokens"])
    for rank in two:
        for own, expected in zip(rank["gradients"], one["gradients"], strict=True):
            assert expected.norm() > 0 and (own - expected).norm() < 1e-5 * expected.norm()


ALL_WEIGHTS = ["--model.lora", "false", "--training.shard", "true"]
ALL_WEIGHTS += ["--training.learning_rate", 1e-4]


def written(run):
    "What a run's steps and last evaluation gave, and its last weights."
    final = run / "checkpoints/checkpoint_final"
    return {
        "steps": helpers.without_seconds(run),
        "rewards": helpers.rewards_of(helpers.read_json(run / "eval.json")),
        "weights": [(p, p.read_bytes()) for p in sorted(final.rglob("*.safetensors"))],
    }


def test_the_program_evaluates_saves_and_resumes(monkeypatch, capsys):
    """1 of 2 steps, resume, 1 step == 2 steps, of all weights, which the ranks share. Adapters on
    ranks: tests/test_ranks.py; on this device: cases.py."""
    monkeypatch.chdir(helpers.ROOT)
    run = FOLDER / "run"
    words = ["--mode", "i2i", "--data.prompts_file", FOLDER / "prompts.jsonl"]
    words += ["--model.name", MODEL, "--model.component", "both", "--training.batch_size", 2]
    words += ["--rollout.num_inference_steps", 2, "--training.eval_samples", 1]
    words += ["--training.eval_prompts", 2, "--num_steps", 2]
    words += ["--training.save_interval", 1, *ALL_WEIGHTS]
    collectives.EXCHANGED.clear()
    before_a_process_group()
    assert helpers.main(*helpers.small(FOLDER, *words, "--output_dir", run)) == 0
    assert capsys.readouterr().out.count("on 2 ranks") == (1 if RANK == 0 else 0)
    assert {"c10d::_reduce_scatter_base_", "c10d::_allgather_base_"} <= set(collectives.EXCHANGED)
    if RANK == 0:  # it has written the files
        straight = written(run)
        assert [line["step"] for line in straight["steps"]] == [1, 2]
    before_a_process_group()
    assert helpers.resume(run / "checkpoints/checkpoint_step_1") == 0
    if RANK == 0:
        assert written(run) == straight
