"""`python -m glm_grpo.remote FILE:FUNCTION` serves a reward over HTTP until Ctrl+C.

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

__all__ = ["RemoteReward", "serve"]

EXAMPLE = """example, my_reward.py:
  def redness(images):       # [N, 3, H, W] in [0, 1]; other parameters: prompts, targets,
                             # sources, metadata
      return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))

  python -m glm_grpo.remote my_reward.py:redness --port 8000   # Ctrl+C stops it
  curl http://127.0.0.1:8000/health                            # is it running?
  python -m glm_grpo.train --reward.remote.far http://127.0.0.1:8000 --reward.metrics.far 1

Load a model once, at the top of the file, not in the function. One batch is scored at a time.
Only this machine can connect; for others use --host 0.0.0.0 and set the same GLM_GRPO_TOKEN in
the environment of both sides. The notebook 4_rewards/16_remote describes the protocol, and a
server that does not need this package."""


def main(argv: list[str] | None = None) -> int:
    "Serve a reward until Ctrl+C. UserError: there is no such function, or the port is in use."
    import argparse
    import threading

    from glm_grpo.rewards.registry import load_function

    parser = argparse.ArgumentParser(
        prog="python -m glm_grpo.remote",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Serve a reward over HTTP, from its own environment or its own machine.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "function",
        metavar="FILE:FUNCTION",
        help="a function or callable object in a Python file, for example my_reward.py:redness",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, this machine only)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port to listen on (default: %(default)s; 0: any free one)",
    )
    words = parser.parse_args(argv)

    def log(text):
        print(text, flush=True)

    with serve(load_function(words.function), words.host, words.port, log) as server:
        wants = ", ".join(server.wants)
        log(f"{server.name} is served at {server.url} and wants {wants}. Ctrl+C stops it.")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            log("\nended.")
    return 0


if __name__ == "__main__":
    from glm_grpo.run.command_line import run_command
    from glm_grpo.training.interrupts import leave

    leave(run_command(main))
