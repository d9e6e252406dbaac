"""Reads settings.ini, the one place where the package is described (nbdev reads it too)."""

import shutil
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
# What the default runs need. What was measured is in results/.
PACKED = ("tiny-glm-image", "t2i", "i2i", "words", "drawings", "weights")


class BuildWithData(build_py):
    "Copies data/ to glm_grpo/_data of a wheel. An editable install uses the checkout's own."

    def run(self):
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / cfg["lib_name"] / "_data"
        shutil.rmtree(target, ignore_errors=True)
        for name in PACKED:
            shutil.copytree(here / "data" / name, target / name)


config = ConfigParser(delimiters=["="])
config.read(here / "settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]
readme = here / "README.md"
rewards = cfg["rewards_requirements"].split()

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license=cfg["license"],
    keywords=cfg["keywords"].split(),
    python_requires=">=" + cfg["min_python"],
    # named, or tests and tools would be packed as well
    packages=find_packages(include=[cfg["lib_name"], cfg["lib_name"] + ".*"]),
    package_data={
        cfg["lib_name"]: [
            "py.typed",
            "model/published.json",
            "model/card.md",
            "run/page.html",
            "run/microscope.html",
        ]
    },
    install_requires=cfg["requirements"].split(),
    cmdclass={"build_py": BuildWithData},
    extras_require={
        "rewards": rewards,
        "datasets": cfg["datasets_requirements"].split(),
        "8bit": cfg["eight_bit_requirements"].split(),
        "docs": cfg["docs_requirements"].split(),
        "dev": cfg["dev_requirements"].split() + rewards,
    },
    zip_safe=False,
)
