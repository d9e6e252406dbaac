"""`python -m glm_grpo.train`: see `glm_grpo.run.train`."""

if __name__ == "__main__":
    from glm_grpo.training.interrupts import leave_at_once

    leave_at_once()  # a signal while torch is imported: one line, no traceback

from glm_grpo.run.train import main, train

__all__ = ["main", "train"]

if __name__ == "__main__":
    from glm_grpo.training.interrupts import leave

    leave(main())
