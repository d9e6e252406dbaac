"""`python -m glm_grpo.remote FILE:FUNCTION`: see `glm_grpo.run.command_line`.

Also the place to import `RemoteReward` and `serve` from.
"""

if __name__ == "__main__":
    from glm_grpo import share_cores
    from glm_grpo.training.interrupts import leave_at_once

    share_cores()
    leave_at_once()  # a signal while torch is imported: one line, no traceback

if __name__ == "__mp_main__":  # a process that a reward has started
    from glm_grpo.training.interrupts import end_with_parent

    end_with_parent()
else:
    from glm_grpo.rewards.remote import RemoteReward, serve
    from glm_grpo.run.command_line import serve_main as main

__all__ = ["RemoteReward", "main", "serve"]

if __name__ == "__main__":
    from glm_grpo.training.interrupts import leave

    leave(main())
