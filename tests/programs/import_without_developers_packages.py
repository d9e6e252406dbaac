"""Import modules where no developer's package can be imported. Run by tests/test_repository.py.

python tests/programs/import_without_developers_packages.py glm_grpo glm_grpo.train ...
"""

import importlib
import sys

DEVELOPERS = ("nbdev", "fastcore", "execnb", "nbconvert", "nbformat", "nbclient", "pytest")

if __name__ == "__main__":
    for name in DEVELOPERS:
        sys.modules[name] = None
    for name in sys.argv[1:]:
        importlib.import_module(name)
