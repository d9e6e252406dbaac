"""Prints the lowest versions that settings.ini allows, as pip wants them.

pip install $(python tools/lowest_versions.py) pytest pytest-xdist
"""

import re
from configparser import ConfigParser
from pathlib import Path


def lowest_versions(requirements: str) -> list[str]:
    "'torch>=2.8 transformers>=5.17,<5.24' -> ['torch==2.8', 'transformers==5.17']."
    return [re.sub(r">=([^,]+).*", r"==\1", one) for one in requirements.split()]


if __name__ == "__main__":
    settings = ConfigParser(delimiters=["="])
    settings.read(Path(__file__).parents[1] / "settings.ini", encoding="utf-8")
    print(*lowest_versions(settings["DEFAULT"]["requirements"]))
