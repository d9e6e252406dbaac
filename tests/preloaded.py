"What a run imports late: `ranks.start` forks from a server that has imported this module."

from helpers import ROOT

import glm_grpo.run.train  # noqa: F401
from glm_grpo.model.wrapper import GLMImageWrapper

GLMImageWrapper(ROOT / "data/tiny-glm-image", device="cpu", lora={"rank": 2})
