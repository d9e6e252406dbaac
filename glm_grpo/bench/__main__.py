"""`python -m glm_grpo.bench`: see `glm_grpo.bench.program`."""

import sys

from glm_grpo.bench.program import main
from glm_grpo.run.command_line import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
