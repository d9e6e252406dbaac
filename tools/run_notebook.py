"""Run notebooks and store their outputs, with figures at 200 dpi:

python tools/run_notebook.py nbs/5_training/11_figures.ipynb ...

Afterwards the notebook is clean, and its figures have 256 colours. The one place that decides how
sharp stored figures are; those of the package (`ShownFigure`) say it themselves.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SETTINGS = """
c = get_config()
c.InlineBackend.figure_formats = {"retina"}  # twice figure.dpi, shown at half the size
c.InlineBackend.rc = {"figure.dpi": 100}
"""


def run(path: str) -> None:
    "CalledProcessError: a cell failed."
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "profile_default")
        profile.mkdir()
        (profile / "ipython_kernel_config.py").write_text(SETTINGS)
        words = ["--to", "notebook", "--execute", "--inplace"]
        words += ["--ExecutePreprocessor.timeout=900"]
        jupyter = [sys.executable, "-m", "nbconvert", *words, path]
        subprocess.run(jupyter, check=True, env=os.environ | {"IPYTHONDIR": folder})
    programs = Path(sys.executable).parent
    subprocess.run([programs / "nbdev_clean", "--fname", path], check=True)
    shrink = Path(__file__).with_name("shrink_pictures.py")
    subprocess.run([sys.executable, shrink, path], check=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(name)
