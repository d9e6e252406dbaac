"""`python -m glm_grpo.remote`: see `glm_grpo.run.serve`.

Also the place to import `RemoteReward` and `serve` from.
"""

import sys

if __name__ == "__main__":
    from glm_grpo.training.interrupts import leave_at_once

    leave_at_once()  # a signal while torch is imported: one line, no traceback

from glm_grpo.rewards.remote import RemoteReward
from glm_grpo.rewards.reward_server import serve

__all__ = ["RemoteReward", "serve"]

if __name__ == "__main__":
    from glm_grpo.run.command_line import run_command
    from glm_grpo.run.serve import main

    sys.exit(run_command(main))
