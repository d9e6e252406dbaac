"""`python -m glm_grpo.bench`: see `glm_grpo.bench.program`."""

if __name__ == "__main__":
    from glm_grpo import share_cores

    share_cores()  # before torch is imported

from glm_grpo.bench.program import main
from glm_grpo.training.interrupts import leave

if __name__ == "__main__":
    leave(main())
