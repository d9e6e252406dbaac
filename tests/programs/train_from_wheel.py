"""What a user does after installing a wheel, in an empty folder. Run by tests/test_packaging.py.

python tests/programs/train_from_wheel.py FOLDER_OF_THE_PACKAGE
"""

import sys
from pathlib import Path

import glm_grpo
from glm_grpo.evaluate import main as evaluate
from glm_grpo.rewards.perception import LPIPS
from glm_grpo.run.build import open_data, resolve
from glm_grpo.run.config import Config, TrainingConfig
from glm_grpo.train import main as train

SMALL = "--num_steps 1 --training.batch_size 1 --reward.grpo.group_size 2"
SMALL += " --rollout.num_inference_steps 1 --training.eval_samples 0 --training.sample_interval 0"
SMALL += " --rollout.guidance_scale 1"

if __name__ == "__main__":
    assert Path(glm_grpo.__file__).is_relative_to(sys.argv[1]), glm_grpo.__file__
    assert not list(Path().iterdir()), "the folder is not empty"
    edits = resolve(Config(training=TrainingConfig(mode="i2i")))
    training, held_out = open_data(edits.data, "i2i")
    print("edits", len(training), len(held_out), flush=True)
    assert LPIPS().weights
    assert train(SMALL.split()) == 0
    print("other", train(["--model.name", "data/tiny-glm-image-signs"]), flush=True)
    print("a path", evaluate(["--model", "data/mine"]), flush=True)
