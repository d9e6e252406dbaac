"""Builds guard.cpp. Importing this does not import torch."""

import importlib.util
import subprocess
from pathlib import Path

TORCH = Path(importlib.util.find_spec("torch").origin).parent


def build_library(folder: str | Path) -> Path:
    "guard.cpp as a library, in this folder. It takes g++ some seconds."
    source, library = Path(__file__).with_suffix(".cpp"), Path(folder) / "guard.so"
    options = ["-O0", "-shared", "-fPIC", "-std=c++20", f"-I{TORCH}/include"]
    links = [f"-L{TORCH}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH}/lib"]
    subprocess.run(["g++", *options, str(source), *links, "-o", str(library)], check=True)
    return library
