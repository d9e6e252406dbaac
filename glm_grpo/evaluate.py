"""`python -m glm_grpo.evaluate`: see `glm_grpo.run.evaluation`."""

if __name__ == "__main__":
    from glm_grpo.training.interrupts import leave_at_once

    leave_at_once()  # a signal while torch is imported: one line, no traceback

from glm_grpo.run.evaluation import main

__all__ = ["main"]

if __name__ == "__main__":
    from glm_grpo.training.interrupts import leave

    leave(main())
