"""`python -m glm_grpo.tiny`: see `glm_grpo.model.tiny`."""

import sys

if __name__ == "__main__":
    from glm_grpo.training.interrupts import leave_at_once

    leave_at_once()  # a signal while torch is imported: one line, no traceback

    from glm_grpo.model.tiny import main
    from glm_grpo.run.command_line import run_command

    sys.exit(run_command(main))
