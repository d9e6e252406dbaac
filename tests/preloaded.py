"What a run imports late: `ranks.start` forks from a server that has imported this module."

import rapidocr  # noqa: F401
from helpers import ROOT
from torch.utils.tensorboard import SummaryWriter  # noqa: F401

import glm_grpo.run.train  # noqa: F401
from glm_grpo.model.wrapper import GLMImageWrapper

GLMImageWrapper(ROOT / "data/tiny-glm-image", device="cpu", lora={"rank": 2})
