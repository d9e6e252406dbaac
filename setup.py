"""Reads settings.ini, the one place where the package is described (nbdev reads it too)."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
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
    package_data={cfg["lib_name"]: ["py.typed"]},
    install_requires=cfg["requirements"].split(),
    extras_require={
        "rewards": rewards,
        "8bit": cfg["eight_bit_requirements"].split(),
        "dev": cfg["dev_requirements"].split() + rewards,
    },
    zip_safe=False,
)
