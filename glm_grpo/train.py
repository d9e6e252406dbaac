"""`python -m glm_grpo.train`: see `glm_grpo.run.train`."""

import sys

from glm_grpo.run.train import main, train

__all__ = ["main", "train"]

if __name__ == "__main__":
    sys.exit(main())
