"""The order of the pages: the main road first, then every other notebook as an appendix."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NBS = ROOT / "nbs"

# What a first reader should read, in this order. At most ten.
ROAD = (
    "00_grpo_in_an_hour",
    "1_maths/02_advantages",
    "1_maths/03_loss",
    "1_maths/04_sde",
    "3_model/01_tokens",
    "3_model/07_scoring",
    "3_model/11_denoise",
    "5_training/16_trainer",
    "6_run/19_train",
    "6_run/20_results",
)
FLOORS = {
    "1_maths": "Maths",
    "2_data": "Data",
    "3_model": "Model",
    "4_rewards": "Rewards",
    "5_training": "Training",
    "6_run": "Run",
    "7_bench": "Benchmarks",
}


def notebooks() -> list[str]:
    "All notebooks as floor/name, in order; nbs/index.ipynb is the front page, made from README.md."
    paths = [path for path in NBS.rglob("*.ipynb") if "/." not in path.as_posix()]
    names = sorted(path.relative_to(NBS).with_suffix("").as_posix() for path in paths)
    return [name for name in names if name != "index"]


def appendices(names: list[str]) -> dict[str, list[str]]:  # title of a floor -> notebooks
    "What is not on the main road, floor by floor."
    rest = [name for name in names if name not in ROAD]
    floors = {title: [n for n in rest if n.startswith(f"{f}/")] for f, title in FLOORS.items()}
    other = [name for name in rest if name.split("/")[0] not in FLOORS]
    return {title: found for title, found in {**floors, "More": other}.items() if found}
