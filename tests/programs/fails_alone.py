"""`python -m glm_grpo.train` (or evaluate) where rank 1 fails alone, in work that the other ranks
wait for, and where leaving the process group waits for them, as with NCCL.

python tests/programs/fails_alone.py WORDS...

Run by tests/test_ranks.py.
"""

import os
import sys
import time

import torch

from glm_grpo.run import train
from glm_grpo.training.trainer import MinimalGRPOTrainer


def wait_for_the_others(group=None):
    time.sleep(3600)


def out_of_memory(self, experience):
    raise torch.OutOfMemoryError("planted")


if __name__ == "__main__":
    torch.distributed.destroy_process_group = wait_for_the_others
    if os.environ["RANK"] == "1":
        MinimalGRPOTrainer.learn = out_of_memory
    sys.exit(train.main())
