"""Train the DiT with each objective, and collect what the runs measured:

    python tools/matching_runs.py FOLDER [--methods] [--only NAME RATE SEED]

Each run is one command, which is printed. It goes to FOLDER/NAME_RATE_SEED; a finished run is not
repeated. At the end the finished runs of FOLDER are written to results/matching_runs, next to those
of other folders: evaluations.jsonl has a line per evaluation, grad_norms.json the gradient norm of
each step. The steps of each kind are as many as take about equal CPU time; the runs of guidance 1
are shorter, and seed 0 of `matching` ran 64 steps. 1_maths/05_matching has the rates and seeds.

With --methods the runs are those of `METHODS`, with four prompts in a step, and their results go to
results/method_runs: several updates on a rollout with the clip and with Flow-DPPO, pairs, and
DiffusionNFT. 6_run/14_results has their figure. Seeds are the outer loop, so that it can be ended
after any run.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
COMMON = (
    "--config configs/halves_dit.yaml --rollout.num_inference_steps 4 "
    "--training.lr_scheduler constant --training.sample_interval 0 --training.eval_interval 10"
)
MATCHING = (
    "--rollout.dit_objective matching --rollout.matching_times 2 --rollout.matching_guidance 3 "
    "--rollout.matching_weight uniform"
)
SLOW_COPY = "--training.slow_copy_decay 0.9 --training.slow_copy_growth 0.05"
NFT = (
    "--rollout.dit_objective nft --rollout.matching_times 2 --rollout.matching_guidance 3 "
    f"--reward.grpo.advantage_clip 5 {SLOW_COPY}"
)
KINDS = {  # name -> steps, options
    "steps": (50, ""),
    "matching": (62, MATCHING),
    "slow": (54, f"{MATCHING} --reward.grpo.dit_pull_slow 1 {SLOW_COPY}"),
    "reference": (54, f"{MATCHING} --reward.grpo.beta 1 --reward.grpo.dit_kl velocity"),
    "nft": (54, NFT),
    "own": (50, "--rollout.shared_noise false"),  # each image has an initial noise of its own
    "group": (50, "--reward.grpo.group_size 16 --training.batch_size 4"),
    "noisy": (50, "--rollout.noise_level 0.7"),
    "steps1": (60, "--rollout.guidance_scale 1"),
    "matching1": (66, f"{MATCHING} --rollout.guidance_scale 1".replace("guidance 3", "guidance 1")),
}
RATES, SEEDS = ("2e-3", "3e-3", "5e-3"), range(3)

FEWER = "--training.batch_size 4 --training.eval_samples 1"
TWO, FOUR = (f"{FEWER} --training.updates_per_rollout {number}" for number in (2, 4))
DPPO = "--reward.grpo.loss_type dppo"
PAIRS = "--rollout.dit_objective pairs --reward.grpo.scale none"
METHODS = {  # name -> steps, options; an evaluation after half of the steps and at the end
    "clip1": (24, FEWER),  # with one update dppo is the same, bit for bit
    "clip2": (16, TWO),
    "clip4": (10, FOUR),
    "dppo2": (16, f"{TWO} {DPPO}"),
    "dppo4": (10, f"{FOUR} {DPPO}"),
    "pairs": (20, f"{FEWER} {PAIRS}"),  # all pairs of groups of eight
    "pairs2": (20, f"{FEWER} {PAIRS} --reward.grpo.group_size 2 --training.batch_size 16"),
    "nft": (24, f"{NFT} {FEWER}"),
    "wide4": (10, f"{FOUR} --reward.grpo.dit_clip_range 1"),  # hardly a clip
}


def words_of(folder: Path, name: str, rate: str, seed: str) -> str:
    "The arguments of Python for a run."
    steps, options = (KINDS | METHODS)[name]
    if name in METHODS:
        options += f" --training.eval_interval {steps // 2}"
    words = f"-m glm_grpo.train {COMMON} {options} --num_steps {steps} --seed {seed}"
    return f"{words} --training.learning_rate {rate} --output_dir {folder}"


def run(folder: Path, name: str, rate: str, seed: str) -> None:
    "One training; its CPU seconds go to seconds.json."
    words = words_of(folder, name, rate, seed)
    print("python", words, flush=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    threads = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, env=threads, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    (folder / "seconds.json").write_text(json.dumps(seconds))


def collect(folder: Path) -> list[dict]:
    "A line per evaluation of all finished runs: the checks of each image."
    lines = []
    for path in sorted(folder.glob("*/seconds.json")):
        name, rate, seed = path.parent.name.split("_")
        history = (path.parent / "eval_history.jsonl").read_text().splitlines()
        history = [json.loads(line) for line in history]
        of_run = {"name": name, "rate": float(rate), "seed": int(seed)}
        seconds = json.loads(path.read_text()) / history[-1]["step"]
        for found in history:
            line = of_run | {"step": found["step"], "seconds": round(seconds * found["step"])}
            for check in ["detail", "scene"] if name in METHODS else ["detail"]:
                values = found["values"][check]
                line[check] = [[round(x, 3) for x in images] for images in values]
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", action="store_true")
    parser.add_argument("--only", nargs=3, metavar=("NAME", "RATE", "SEED"))
    options = parser.parse_args()
    asked = [(name, rate, str(seed)) for name in KINDS for rate in RATES for seed in SEEDS]
    data = RESULTS / "matching_runs"
    if options.methods:
        asked = [(name, RATES[0], str(seed)) for seed in SEEDS for name in METHODS]
        data = RESULTS / "method_runs"
    for name, rate, seed in [options.only] if options.only else asked:
        folder = options.folder / f"{name}_{rate}_{seed}"
        if not (folder / "seconds.json").exists():
            run(folder, name, rate, seed)
    lines, norms = {}, {}
    if (data / "grad_norms.json").exists():
        norms = json.loads((data / "grad_norms.json").read_text())
        known = (data / "evaluations.jsonl").read_text().splitlines()
        for line in map(json.loads, known):
            lines[line["name"], line["rate"], line["seed"], line["step"]] = line
    for line in collect(options.folder):
        lines[line["name"], line["rate"], line["seed"], line["step"]] = line
    for path in sorted(options.folder.glob("*/seconds.json")):
        steps = (path.parent / "metrics.jsonl").read_text().splitlines()
        norms[path.parent.name] = [round(json.loads(step)["grad_norm"], 4) for step in steps]
    data.mkdir(exist_ok=True)
    if options.methods:
        words = [words_of(Path("/tmp/runs", run), *run.split("_")) for run in sorted(norms)]
        (data / "commands.txt").write_text("".join(f"python {line}\n" for line in words))
    (data / "grad_norms.json").write_text(json.dumps(norms))
    text = "".join(json.dumps(lines[key]) + "\n" for key in sorted(lines))
    (data / "evaluations.jsonl").write_text(text)


if __name__ == "__main__":
    main()
