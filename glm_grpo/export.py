"""`python -m glm_grpo.export`: see `glm_grpo.run.export`."""

if __name__ == "__main__":
    from glm_grpo import share_cores
    from glm_grpo.training.interrupts import leave_at_once

    share_cores()
    leave_at_once()  # a signal while torch is imported: one line, no traceback

if __name__ == "__mp_main__":  # a process that a reward has started
    from glm_grpo.training.interrupts import end_with_parent

    end_with_parent()
else:
    from glm_grpo.run.export import main

__all__ = ["main"]

if __name__ == "__main__":
    from glm_grpo.training.interrupts import leave

    leave(main())
