"""Several processes on a CPU (gloo): the same gradients as one, one line of metrics, one writer,
and an error of one rank ends all."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import GREEN, PROMPTS, ROOT, small, step_of, steps, without_seconds

PROGRAM = ROOT / "tests/programs/train_on_ranks.py"
FOUR_PROMPTS = [*PROMPTS, "a red ball on a white ground"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(**more):
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own, **{name: str(value) for name, value in more.items()}}


def start(command, **environment_variables):
    "A process in the repository's folder, the first of a session; its output is one text."
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**environment_variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_all(processes, timeout=300, grace=30):
    """What they printed. After the first that fails, the others have `grace` seconds left: a rank
    may wait for it for hours."""
    with ThreadPoolExecutor(len(processes)) as pool:
        printed = [pool.submit(process.communicate) for process in processes]
        end = time.monotonic() + timeout
        try:
            while time.monotonic() < end and any(p.poll() is None for p in processes):
                if any(p.poll() for p in processes):
                    end = min(end, time.monotonic() + grace)
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return [of_one.result()[0] for of_one in printed]


def start_ranks(world, command, timeout=300, **environment_variables):
    "A command on `world` processes, as a launcher starts it -> their (status, what they said)."
    own = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    own |= {"MASTER_PORT": free_port(), **environment_variables}
    processes = [start(command, RANK=rank, LOCAL_RANK=rank, **own) for rank in range(world)]
    said = wait_for_all(processes, timeout)
    return [(p.returncode, text) for p, text in zip(processes, said)]


def launch(world, work, timeout=300):
    "PROGRAM on `world` processes."
    return start_ranks(world, [sys.executable, str(PROGRAM), json.dumps(work)], timeout)


def train_on(world, work):
    "What all ranks sampled, and the gradients on which they agree."
    results = launch(world, work)
    assert [status for status, _ in results] == [0] * world, results
    found = []
    for rank in range(world):
        found.append(torch.load(f"{work['out']}/{world}_{rank}.pt", weights_only=True))
    first = found[0]
    for other in found[1:]:
        for a, b in zip(other["gradients"], first["gradients"]):
            assert torch.equal(a, b), "ranks drift apart"
    tokens = torch.cat([rank["tokens"] for rank in found])
    prompts = [prompt for rank in found for prompt in rank["prompts"]]
    return first | {"tokens": tokens, "prompts": prompts}


def different_samples(run, prompt):
    "How many different rows of tokens were sampled for a prompt."
    rows = zip(run["tokens"].tolist(), run["prompts"])
    return len({tuple(row) for row, own in rows if own == prompt})


SAME_METRICS = (
    "loss",
    "reward_mean",
    "reward_std",
    "advantage_mean",
    "equal_groups",
    "grad_norm",
    "ratio_mean",
    "entropy",
)


def check_same_metrics(a, b):
    for name in SAME_METRICS:
        assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name
    assert max(a["old_new_gap"], b["old_new_gap"]) < 1e-4
    assert a["tokens_outside"] == b["tokens_outside"] == 0


@pytest.mark.parametrize(
    "component, scale, mini_batches, twice, full, worlds",
    [
        ("ar", "batch", 3, True, False, [2, 4]),
        ("dit", "group", 1, True, False, [2]),
        ("ar", "batch", 3, True, True, [2]),
        ("dit", "group", 1, False, True, [2]),
    ],
)
def test_ranks_give_the_gradients_of_one_process(
    tmp_path, component, scale, mini_batches, twice, full, worlds
):
    """Also where a mini-batch has no sample of some rank (3 of 8 samples on 4 ranks), and where a
    prompt comes twice in a step. `full`: all weights, spread over the ranks (FSDP2); quoted words
    make the DiT's calls more on one rank than on the other."""
    last = PROMPTS[0] if twice else 'a sign "yes" on a red ground'
    work = {
        "prompts": [*PROMPTS, last],
        "out": str(tmp_path),
        "component": component,
        "scale": scale,
        "mini_batches": mini_batches,
        "full": full,
    }
    one = train_on(1, work)
    if twice:
        wanted = 4 if component == "ar" else 2
        assert different_samples(one, PROMPTS[0]) == wanted, "the same noise twice"
    for world in worlds:
        many = train_on(world, work)
        assert many["prompts"] == one["prompts"]
        assert torch.equal(many["tokens"], one["tokens"])
        assert len(one["gradients"]) == len(many["gradients"]) == 2 * mini_batches
        for a, b in zip(one["gradients"], many["gradients"]):
            assert a.norm() > 0 and (a - b).norm() < 1e-5 * a.norm()
        for a, b in zip(one["lines"], many["lines"]):
            check_same_metrics(a, b)


def test_a_rank_that_fails_ends_all_with_its_reason(tmp_path):
    work = {"prompts": FOUR_PROMPTS, "out": str(tmp_path), "fails": 1}
    (status, said), (failed_status, failed_said) = launch(2, work, timeout=120)
    assert "rank 0 told: rank 1 failed" in said and "the paint is dry" in said and status == 2
    assert failed_status != 0 and "the paint is dry" in failed_said


def launched(*words, program=("-m", "glm_grpo.train")):
    "torchrun, for `accelerate launch` starts several processes on GPUs only (on CPUs through MPI)."
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2]
    command += ["--master_port", free_port(), *program, *words]
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def succeeds(*words):
    "What a run on two ranks says."
    done = launched(*words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def on_two_ranks(folder, *words):
    "Options of a small run."
    (folder / "prompts.txt").write_text("\n".join(FOUR_PROMPTS) + "\n")
    if not (folder / "green.py").exists():
        (folder / "green.py").write_text(GREEN)
    options = ["--training.batch_size", 2, "--rollout.num_inference_steps", 2]
    options += ["--model.device", "cpu", "--training.save_interval", 1, "--num_steps", 2]
    return small(folder, *options, "--output_dir", folder / "run", *words)


def weights(checkpoint):
    paths = checkpoint.rglob("*.safetensors")
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in paths}


ADAPTERS = ["--training.ema_decay", 0.5]
ALL_WEIGHTS = ["--model.lora", "false", "--model.torch_dtype", "bfloat16"]
ALL_WEIGHTS += ["--training.shard", "true", "--training.learning_rate", 1e-4]


def check_files(final, checkpoints, full):
    "What a last checkpoint consists of."
    if full:
        configs = "".join(p.read_text() for p in checkpoints.rglob("config.json"))
        assert len(final) == 3 and "masters.safetensors" in final and "FSDP" not in configs
        return
    assert len(final) == 4
    for half in ("ar", "dit"):
        name = f"{half}/adapter_model.safetensors"
        assert final[f"ema/{name}"] != final[name]


@pytest.mark.parametrize("full", [False, True])
def test_a_run_on_two_ranks_writes_once_and_goes_on_bit_for_bit(tmp_path, full):
    """1 of 2 steps, resume, 1 step == 2 steps: both halves, two mini-batches and two passes;
    adapters with averages, or all weights in bfloat16, spread over the ranks with their float32
    copies."""
    run = tmp_path / "run"
    words = ["--model.component", "both", "--training.eval_samples", 1]
    words += ["--training.eval_prompts", 1, "--training.mini_batches", 2]
    words += ["--training.updates_per_rollout", 2, *(ALL_WEIGHTS if full else ADAPTERS)]
    said = succeeds(*on_two_ranks(tmp_path, *words))
    assert said.count("loading") == 1 and "on 2 ranks" in said
    straight, checkpoints = without_seconds(run), run / "checkpoints"
    assert steps(run) == [1, 2]
    final = weights(checkpoints / "checkpoint_final")
    check_files(final, checkpoints, full)
    for name in ("checkpoint_final", "checkpoint_step_2"):
        shutil.rmtree(checkpoints / name)
    succeeds("--resume", "latest", "--output_dir", run, "--trust_run_code")
    assert without_seconds(run) == straight
    assert weights(checkpoints / "checkpoint_final") == final


def test_a_rank_that_fails_alone_says_so_and_ends_all(tmp_path):
    """Out of memory in the update, on one rank, where leaving the process group waits for the
    peers: they wait for gradients."""
    begun = time.monotonic()
    done = launched(*on_two_ranks(tmp_path), program=["tests/programs/fails_alone.py"])
    assert done.returncode != 0 and time.monotonic() - begun < 200
    assert "error: Out of memory. Lower training.micro_batch_size" in done.stderr
    assert re.search(r"rank *: 1 .*\n.*exitcode *: 2", done.stderr), done.stderr[-3000:]


KILLED = """\
import os, signal
calls = []
def green(images):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return images[:, 1].mean((1, 2))
"""


def test_a_rank_that_is_killed_ends_the_others(tmp_path):
    """kill -9, in the second step: the launcher ends the rest, and the checkpoint of the first step
    is whole."""
    (tmp_path / "green.py").write_text(KILLED)
    begun = time.monotonic()
    done = launched(*on_two_ranks(tmp_path, "--num_steps", 100))
    assert done.returncode != 0 and time.monotonic() - begun < 200
    assert "Signal 9 (SIGKILL)" in done.stderr, done.stderr[-3000:]
    there = (tmp_path / "run/checkpoints").iterdir()
    kept = [path for path in there if path.name.startswith("checkpoint_")]
    assert kept
    for checkpoint in kept:
        assert step_of(checkpoint) == 1 and weights(checkpoint)
