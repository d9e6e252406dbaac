"""`python -m glm_grpo.tiny`: see `glm_grpo.model.tiny`."""

import sys

from glm_grpo.model.tiny import main
from glm_grpo.run.command_line import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
