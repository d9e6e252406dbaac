"""The wheel: it has what the default run needs, and nothing of the rest."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "tests/programs/train_from_wheel.py"
SOURCES = ["setup.py", "settings.ini", "README.md", "LICENSE", "MANIFEST.in"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "Built from a copy, so that no build folder is left in the checkout."
    copy = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    for name in ("glm_grpo", "data"):
        skipped = shutil.ignore_patterns("__pycache__", "*_runs", "*_run")
        shutil.copytree(ROOT / name, copy / name, ignore=skipped)
    (copy / "tests").mkdir()
    (copy / "tests" / "__init__.py").touch()
    out = tmp_path_factory.mktemp("wheel")
    words = ["wheel", copy, "--no-deps", "--no-build-isolation", "--no-index", "-w", out]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = out.glob("*.whl")
    return found


def test_wheel_holds_the_package_and_the_data_of_the_default_runs(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"glm_grpo", next(top for top in tops if top.endswith(".dist-info"))}
    packed = {name.split("/")[2] for name in names if name.startswith("glm_grpo/_data/")}
    expected = {"tiny-glm-image", "t2i", "i2i", "words", "drawings", "weights"}
    assert packed == expected
    assert {
        "glm_grpo/model/published.json",
        "glm_grpo/model/card.md",
        "glm_grpo/run/page.html",
        "glm_grpo/run/microscope.html",
    } <= set(names)
    assert "glm_grpo/py.typed" in names
    assert "glm_grpo/_data/drawings/LICENSES.md" in names
    assert wheel.stat().st_size < 20e6


def test_wheel_trains_in_an_empty_folder(wheel, tmp_path):
    package, work = tmp_path / "package", tmp_path / "work"
    zipfile.ZipFile(wheel).extractall(package)
    work.mkdir()
    env = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, PROGRAM, package]
    done = subprocess.run(words, cwd=work, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "edits 96 48" in done.stdout
    said = "96 training prompts (data/t2i/train/prompts.txt of the package), 48 held out"
    assert said in done.stdout
    assert "other 2" in done.stdout and "a path 2" in done.stdout
    assert "data/tiny-glm-image-signs: no such folder" in done.stderr
    assert "only with the repository" in done.stderr
    assert "data/mine: no such folder" in done.stderr
    assert [path.name for path in work.iterdir()] == ["outputs"]
    config = yaml.safe_load((work / "outputs/run_001/config.yaml").read_text())
    assert config["model"]["name"] == "data/tiny-glm-image"  # as it was named, on any machine
    assert config["data"]["prompts_file"] == "data/t2i/train/prompts.txt"
    assert config["data"]["eval_prompts_file"] == "data/t2i/heldout/prompts.txt"


def test_checkout_uses_its_own_data(tmp_path, monkeypatch):
    "An editable install as well: nothing is copied into the package."
    from glm_grpo.data.basics import bundled

    monkeypatch.chdir(tmp_path)
    assert not (ROOT / "glm_grpo" / "_data").exists()
    assert bundled("data/drawings") == ROOT / "data" / "drawings"


def test_package_without_data_says_what_is_missing(tmp_path, monkeypatch):
    from glm_grpo.data import basics
    from glm_grpo.data.prompts import read_rows

    (tmp_path / "glm_grpo").mkdir()
    (tmp_path / "data").mkdir()  # somebody else's folder beside installed packages
    monkeypatch.setattr(basics.importlib.resources, "files", lambda _: tmp_path / "glm_grpo")
    monkeypatch.chdir(tmp_path)
    assert "prompts.txt: no such file" in basics.refusal(read_rows, "data/t2i/train/prompts.txt")
