"""Film of one prompt's group over the steps of a run: the same tokens' noise at every checkpoint.

python -m glm_grpo.train --training.save_interval 1 --training.keep_checkpoints 100 --output_dir RUN
python tools/group_film.py RUN results/example_run/group.webp \\
    --prompt "a penguin left of a key on a purple ground"

Without --prompt it lists the held-out prompts that gain most between the first and the last
checkpoint, and takes the first of them.
"""

import argparse
import io
from pathlib import Path

import yaml
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from glm_grpo import GLMImageWrapper, T2IDataset, tensor_to_pil
from glm_grpo.rewards.scenes import SceneCheck

GOOD, OTHER = "#2e9e5b", "#c8c8c8"


class Film:
    "The model of a run, at any of its checkpoints."

    def __init__(self, run: Path, group: int):
        self.config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        self.folder, self.group = run / "checkpoints", group
        self.last = self.config["training"]["max_steps"]
        self.check = SceneCheck("data/drawings")

    def at(self, step: int, prompts: list[str]) -> tuple[Tensor, Tensor]:
        "Images [P * G, 3, H, W], and which pass [P, G]; noise depends on prompt and sample only."
        data, rollout, model = (self.config[name] for name in ("data", "rollout", "model"))
        names = ("rank", "alpha", "target_modules")
        lora = {name: model[f"lora_{name}"] for name in names}
        wrapper = GLMImageWrapper(model["name"], component="ar", lora=lora)
        if step:
            wrapper.load_adapter(self.folder / f"checkpoint_step_{step}")
        rows = [prompt for prompt in prompts for _ in range(self.group)]
        images = wrapper.generate_with_tracking(
            rows,
            height=data["image_size"],
            width=data["image_size"],
            seed="film",
            score=False,
            num_inference_steps=rollout["num_inference_steps"],
            guidance_scale=rollout["guidance_scale"],
            noise_level=0.0,
        ).image_tensors
        return images, self.check(images, rows).view(len(prompts), self.group)

    def best_prompt(self) -> str:
        "The held-out prompt that gains most between the first and the last checkpoint."
        prompts = T2IDataset(self.config["data"]["eval_prompts_file"]).prompts
        before, after = (self.at(step, prompts)[1].mean(1) for step in (0, self.last))
        order = (after - before).argsort(descending=True)
        for i in order[:8]:
            print(f"{before[i]:.2f} -> {after[i]:.2f}  {prompts[i]}")
        return prompts[order[0]]


def draw(prompt: str, images: Tensor, passed: list, step: int, last: int, dpi: int) -> Image.Image:
    "One frame: the group, framed where it passes, and the share that passes so far."
    figure = Figure((5.6, 3.9), facecolor="white")
    figure.text(0.012, 0.945, prompt, fontsize=11, weight="bold")
    number = int(sum(passed[-1]))
    figure.text(0.012, 0.885, f"training step {step} of {last}", fontsize=9, color="#555555")
    right = {"ha": "right", "fontsize": 9, "color": GOOD}
    figure.text(0.988, 0.885, f"{number} of {len(images)} show what the prompt asks for", **right)
    for i, image in enumerate(tensor_to_pil(images)):
        box = [0.012 + (i % 4) * 0.2455, 0.51 - (i // 4) * 0.355, 0.24, 0.345]
        axes = figure.add_axes(box, xticks=[], yticks=[])
        axes.imshow(image, interpolation="lanczos")
        for spine in axes.spines.values():
            spine.set(color=GOOD if passed[-1][i] else OTHER, linewidth=3)
    axes = figure.add_axes([0.055, 0.035, 0.93, 0.095])
    axes.plot([sum(row) for row in passed], color=GOOD, linewidth=1.5)
    axes.plot([step], [number], "o", color=GOOD, markersize=4)
    axes.set(xlim=(0, last), ylim=(-0.4, len(images) + 0.4), xticks=[], yticks=[0, len(images)])
    axes.tick_params(labelsize=7, length=0, colors="#777777")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=dpi)
    return Image.open(data).convert("RGB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run with a checkpoint of each step")
    parser.add_argument("film", type=Path, help="the .webp to write")
    parser.add_argument("--group", type=int, default=8, help="images of the prompt (default: 8)")
    parser.add_argument("--prompt", help="instead of the one that gains most")
    parser.add_argument("--dpi", type=int, default=200)
    args = parser.parse_args()
    film = Film(args.run, args.group)
    prompt = args.prompt or film.best_prompt()
    frames, passed, last = [], [], film.last
    for step in range(last + 1):
        images, good = film.at(step, [prompt])
        passed.append(good[0].tolist())
        frames.append(draw(prompt, images, passed, step, last, args.dpi))
        print(f"step {step}: {sum(passed[-1]):.0f} of {args.group}", flush=True)
    durations = [1200] + [220] * (last - 1) + [3000]
    frames[0].save(
        args.film, save_all=True, append_images=frames[1:], duration=durations, loop=0, quality=82
    )
    print(args.film, f"{args.film.stat().st_size / 1e3:.0f} kB", frames[0].size)


if __name__ == "__main__":
    main()
