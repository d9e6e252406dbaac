"""Seconds per training step on an idle machine, and next to a program that keeps one core busy.

    python tools/busy_machine.py [--before FOLDER] [--steps N] [--runs N]

FOLDER is another checkout, which is measured in turns with this one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
OPTIONS = ["--training.sample_interval", "0", "--training.eval_prompts", "2"]


def seconds_per_step(checkout: Path, steps: int, busy: bool) -> tuple[list, list]:
    "(seconds of all steps but the first, gradient norms) of a run with the default options."
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    other = [sys.executable, "-c", "while True: pass"]
    neighbour = subprocess.Popen(other) if busy else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = [sys.executable, "-m", "glm_grpo.train", "--num_steps", str(steps), *OPTIONS]
            run += ["--output_dir", f"{folder}/run"]
            quiet = {"stdout": subprocess.DEVNULL, "cwd": checkout, "env": environment}
            subprocess.run(run, check=True, **quiet)
            text = Path(folder, "run/metrics.jsonl").read_text(encoding="utf-8")
    finally:
        if neighbour:
            neighbour.kill()
    lines = [json.loads(line) for line in text.splitlines()]
    return [line["seconds"] for line in lines[1:]], [line["grad_norm"] for line in lines]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--steps", type=int, default=4, help="per run; the first is not counted")
    parser.add_argument("--runs", type=int, default=1, help="of each kind")
    args = parser.parse_args()
    checkouts = {"before": args.before.resolve()} if args.before else {}
    checkouts["after" if args.before else "now"] = HERE
    print(f"{os.cpu_count()} cores; seconds per step, and as a share of the first idle run")
    first, norms, found = None, [], {}
    for busy in (False, True):
        for name, checkout in list(checkouts.items()) * args.runs:
            seconds, norm = seconds_per_step(checkout, args.steps, busy)
            norms.append(norm)
            found.setdefault((name, busy), []).extend(seconds)
            middle = statistics.median(seconds)
            first = first or middle
            where = "busy" if busy else "idle"
            print(f"{name:7}{where:5}{middle:7.2f}{middle / first:6.2f}", flush=True)
    median = {key: statistics.median(seconds) for key, seconds in found.items()}
    for name in checkouts:
        print(f"{name}: busy over idle {median[name, True] / median[name, False]:.2f}")
    if args.before:
        print(f"idle, after over before: {median['after', False] / median['before', False]:.2f}")
    print("the same numbers in all runs:", all(norm == norms[0] for norm in norms))


if __name__ == "__main__":
    main()
