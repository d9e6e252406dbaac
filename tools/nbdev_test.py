"""`nbdev_test` with a process per notebook, forked after the imports.

python tools/nbdev_test.py [--jobs N] [NOTEBOOK ...]

One process for all notebooks would let default dtypes and environment variables leak from one into
the next. A new process per notebook spends more than half of its time on imports. So the processes
are forked from one that has imported the libraries (on Linux; elsewhere they start anew).
"""

import argparse
import os
import sys
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).parents[1]


def import_libraries() -> None:
    "What most notebooks import; nothing of the package, whose import some of them prepare."
    import matplotlib_inline.backend_inline  # noqa: F401
    import nbdev.test  # noqa: F401
    import peft  # noqa: F401
    from diffusers import GlmImagePipeline  # noqa: F401
    from matplotlib import pyplot  # noqa: F401
    from transformers import GlmImageForConditionalGeneration  # noqa: F401


def run_notebook(path: Path) -> None:
    "What `nbdev_test --path` does, in this process. SystemExit: a cell failed, see the traceback."
    from nbdev.config import get_config
    from nbdev.test import test_nb

    passed, _ = test_nb(path, skip_flags=get_config().tst_flags.split(), basepath=ROOT)
    sys.exit(0 if passed else 1)


def run_all(notebooks: list[Path], jobs: int) -> list[Path]:
    "Run `jobs` notebooks at a time -> those that failed, or whose process was killed."
    processes = get_context("fork" if sys.platform == "linux" else "spawn")
    waiting, running, failed = list(notebooks), {}, []
    while waiting or running:
        while waiting and len(running) < jobs:
            path = waiting.pop(0)
            process = processes.Process(target=run_notebook, args=[path])
            process.start()
            running[process.sentinel] = process, path
        for sentinel in wait(running):
            process, path = running.pop(sentinel)
            process.join()
            status = process.exitcode  # negative: the signal that killed it
            print(f"- Failed ({status})" if status else "- Completed", path, flush=True)
            if status:
                failed.append(path)
    return failed


def main(words: list[str] | None = None) -> int:
    "-> exit status: 1 where a notebook failed."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="all of nbs/ if none is named")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    options = parser.parse_args(words)
    # The last floors have the longest notebooks: begin with them
    every = sorted(ROOT.glob("nbs/**/[!.]*.ipynb"), reverse=True)
    notebooks = [path.resolve() for path in options.notebooks or every]
    missing = [path for path in notebooks if not path.is_file()]
    if missing:
        parser.error(f"no such notebook: {missing[0]}")
    os.chdir(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the cores
    import_libraries()
    failed = run_all(notebooks, options.jobs)
    for path in failed:
        print(f"failed: {path}", file=sys.stderr)
    print(f"{len(notebooks) - len(failed)} of {len(notebooks)} notebooks ran to their end")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
