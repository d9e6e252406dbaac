"""Train the DiT with each objective, and collect what the runs measured:

    python tools/matching_runs.py FOLDER [--only NAME RATE SEED]

Each run is one command, which is printed. It goes to FOLDER/NAME_RATE_SEED; a finished run is not
repeated. At the end the finished runs of FOLDER are written to results/matching_runs, next to those
of other folders: evaluations.jsonl has a line per evaluation, grad_norms.json the gradient norm of
each step. The steps of each kind are as many as take about equal CPU time; the runs of guidance 1
are shorter, and seed 0 of `matching` ran 64 steps. 1_maths/05_matching has the rates and seeds.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "results/matching_runs"
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


def run(folder: Path, name: str, rate: str, seed: int) -> None:
    "One training; its CPU seconds go to seconds.json."
    steps, options = KINDS[name]
    words = f"-m glm_grpo.train {COMMON} {options} --num_steps {steps} --seed {seed}"
    words += f" --training.learning_rate {rate} --output_dir {folder}"
    print("python", words, flush=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    threads = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words.split()], cwd=ROOT, env=threads, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    (folder / "seconds.json").write_text(json.dumps(seconds))


def collect(folder: Path) -> list[dict]:
    "A line per evaluation of all finished runs: the detail check of each image."
    lines = []
    for path in sorted(folder.glob("*/seconds.json")):
        name, rate, seed = path.parent.name.split("_")
        history = (path.parent / "eval_history.jsonl").read_text().splitlines()
        history = [json.loads(line) for line in history]
        of_run = {"name": name, "rate": float(rate), "seed": int(seed)}
        seconds = json.loads(path.read_text()) / history[-1]["step"]
        for found in history:
            detail = [[round(x, 3) for x in images] for images in found["values"]["detail"]]
            at = {"step": found["step"], "seconds": round(seconds * found["step"])}
            lines.append(of_run | at | {"detail": detail})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs=3, metavar=("NAME", "RATE", "SEED"))
    options = parser.parse_args()
    asked = [(name, rate, str(seed)) for name in KINDS for rate in RATES for seed in SEEDS]
    for name, rate, seed in [options.only] if options.only else asked:
        folder = options.folder / f"{name}_{rate}_{seed}"
        if not (folder / "seconds.json").exists():
            run(folder, name, rate, int(seed))
    norms = json.loads((DATA / "grad_norms.json").read_text())
    lines = {}
    known = map(json.loads, (DATA / "evaluations.jsonl").read_text().splitlines())
    for line in [*known, *collect(options.folder)]:
        lines[line["name"], line["rate"], line["seed"], line["step"]] = line
    for path in sorted(options.folder.glob("*/seconds.json")):
        steps = (path.parent / "metrics.jsonl").read_text().splitlines()
        norms[path.parent.name] = [round(json.loads(step)["grad_norm"], 4) for step in steps]
    (DATA / "grad_norms.json").write_text(json.dumps(norms))
    text = "".join(json.dumps(lines[key]) + "\n" for key in sorted(lines))
    (DATA / "evaluations.jsonl").write_text(text)


if __name__ == "__main__":
    main()
