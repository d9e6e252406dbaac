"""kill -9 at random moments: the newest checkpoint always loads, `--resume auto` always goes on,
and at the end nothing is different.

python -m pytest -q -s tests/test_kill.py --kills 50
"""

import random
import time

import torch
from helpers import load_weights, main, read_jsonl, resume, same_tensors, small, step_of
from helpers import without_seconds
from ranks import in_a_process, start
from safetensors.torch import load_file

from glm_grpo.training.checkpoints import find_checkpoint, newest_first

OPTIONS = {
    "--training.save_interval": 1,
    "--training.lr_scheduler": "constant",
    "--training.ema_decay": 0.9,
    "--training.trackers": "null",
    "--model.lora_rank": 2,
    "--model.device": "cpu",
}
SUMMARY = (
    "\n{kills} kills in {seen} steps, {torn} of them while a checkpoint was being written; each "
    "time the newest checkpoint loaded and --resume auto went on; afterwards adapter, averages "
    "and metrics were those of a run that was never killed, bit for bit"
)


def newest_step(run):
    "Of the newest checkpoint; 0 without one. A checkpoint may go while we look."
    try:
        there = newest_first(run / "checkpoints")
        return max((step_of(checkpoint) for checkpoint in there), default=0)
    except FileNotFoundError:
        return newest_step(run)


def kill_in_the_next_step(process, run, seen, log, share):
    "Wait until one more step is saved; kill somewhere in the next one, or while that is saved."
    try:
        limit = time.monotonic() + 300
        while newest_step(run) <= seen:
            assert process.is_alive() and time.monotonic() < limit, log.read_text()[-2000:]
            time.sleep(0.01)
        seconds = read_jsonl(run / "metrics.jsonl")[-1]["seconds"]
        time.sleep(share * 1.3 * seconds)
    finally:
        process.kill()
        process.join()


def check_newest_loads(run):
    "Adapter, averages, and the optimizer's memory of both."
    newest = find_checkpoint("latest", run)
    files = [*newest.rglob("*.safetensors"), *newest.rglob("*.pt")]
    assert len(files) == 4, files
    for f in files:
        loaded = load_file(f) if f.suffix == ".safetensors" else torch.load(f, weights_only=True)
        assert loaded


def kill_again_and_again(run, words, kills, log):
    "-> steps that were saved at the end, kills while a checkpoint was being written."
    g, seen, torn = random.Random(0), 0, 0
    for _ in range(kills):
        words_of_run = [*words, "--resume", "auto", "--num_steps", 100000, "--output_dir", run]
        process = start(log, {}, main, words_of_run)
        kill_in_the_next_step(process, run, seen, log, g.random())
        torn += any((run / "checkpoints").glob(".*"))
        check_newest_loads(run)
        assert newest_step(run) > seen
        seen = newest_step(run)
        print(".", end="", flush=True)
    return seen, torn


def test_killed_at_random_moments(folder, at_root, pytestconfig):
    kills, run, straight = pytestconfig.getoption("kills"), folder / "run", folder / "straight"
    words = small(folder, *[word for pair in OPTIONS.items() for word in pair])
    seen, torn = kill_again_and_again(run, words, kills, folder / "log")

    last = ["--num_steps", seen + 1]
    assert resume("latest", "--output_dir", run, *last) == 0
    assert not list(run.rglob(".*")), "something is left over"
    assert len(list((run / "checkpoints").glob("checkpoint_step_*"))) == min(3, seen + 1)
    assert main(*words, *last, "--output_dir", straight) == 0
    killed = load_weights(run / "checkpoints/checkpoint_final")
    wanted = load_weights(straight / "checkpoints/checkpoint_final")
    for name in ("adapter_model.safetensors", "ema/adapter_model.safetensors"):
        assert same_tensors(killed[name], wanted[name])
    assert without_seconds(run) == without_seconds(straight)
    assert len(without_seconds(run)) == seen + 1
    print(SUMMARY.format(kills=kills, seen=seen, torn=torn))


def test_two_runs_that_start_at_the_same_moment(folder, at_root):
    "The second one is refused, also with --resume, until the first has ended or was killed."
    run, logs = folder / "run", [folder / "log_1", folder / "log_2"]

    def begin(log, *words):
        return start(log, {}, main, small(folder, "--training.save_interval", 1, *words))

    both = [begin(log, "--num_steps", 6, "--output_dir", run) for log in logs]
    for process in both:
        process.join()
    assert sorted(process.exitcode for process in both) == [0, 2]
    told = logs[both[0].exitcode == 0].read_text()
    assert f"--output_dir {run}: " in told and ("works in it" in told or "holds a run" in told)
    assert len(without_seconds(run)) == 6 and not list(run.glob(".*"))

    again = ["--resume", run, "--trust_run_code", "--num_steps"]
    process = start(logs[0], {}, main, [*again, 100000])
    try:
        while newest_step(run) == 6:
            assert process.is_alive(), logs[0].read_text()[-2000:]
            time.sleep(0.01)
        status, told = in_a_process(folder, main, *again, 200000)
        assert status == 2 and f"another run works in it (process {process.pid} on " in told
    finally:
        process.kill()
        process.join()
    assert resume(run, "--num_steps", newest_step(run) + 1) == 0
    assert not list(run.glob(".*"))
