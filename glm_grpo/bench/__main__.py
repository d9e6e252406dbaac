"""`python -m glm_grpo.bench`: see `glm_grpo.bench.program`."""

from glm_grpo.bench.program import main
from glm_grpo.training.interrupts import leave

if __name__ == "__main__":
    leave(main())
