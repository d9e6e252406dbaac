"""`python -m glm_grpo.evaluate`: see `glm_grpo.run.evaluate`."""

import sys

from glm_grpo.run.evaluate import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
