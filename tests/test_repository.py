"""The repository itself: are modules, notebooks, README and versions in step?"""

import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import glm_grpo

ROOT = Path(__file__).resolve().parent.parent
NBS, PACKAGE = ROOT / "nbs", ROOT / "glm_grpo"
PROGRAMS = [
    "train.py",
    "evaluate.py",
    "probe.py",
    "export.py",
    "remote.py",
    "bench/__main__.py",
    "__main__.py",
]
NOTEBOOKS = sorted(n for n in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in n.parts)


def name_of(notebook):
    return str(notebook.relative_to(NBS))


def code_cells(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def modules_in(package):
    "Path in the package -> text."
    paths = sorted(package.rglob("*.py"))
    return {str(p.relative_to(package)): p.read_text(encoding="utf-8") for p in paths}


def is_written_by_hand(name, text):
    "The programs, and `__init__.py`: that of the package, and empty ones."
    if name in ("__init__.py", *PROGRAMS):
        return True
    return Path(name).name == "__init__.py" and not text.strip()


def settings():
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini")
    return config["DEFAULT"]


def pinned():
    "Package -> exact version."
    text = (ROOT / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    inexact = [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
    assert inexact == [], "constraints.txt holds exact versions only"
    pairs = [line.split("==") for line in lines]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.fixture(scope="module")
def made_again(tmp_path_factory):
    "The notebooks in a folder of their own, exported and cleaned there."
    copy = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "settings.ini", copy)
    shutil.copytree(NBS, copy / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for name, text in modules_in(PACKAGE).items():
        if is_written_by_hand(name, text):
            (copy / "glm_grpo" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PACKAGE / name, copy / "glm_grpo" / name)
    for command in ("nbdev_export", "nbdev_clean"):
        subprocess.run([Path(sys.executable).parent / command], cwd=copy, check=True)
    return copy


def test_modules_are_what_the_notebooks_export(made_again):
    have, made = modules_in(PACKAGE), modules_in(made_again / "glm_grpo")
    assert sorted(have) == sorted(made), "a module without a notebook, or the other way round"
    assert [name for name in have if have[name] != made[name]] == [], "run nbdev_export"


def test_notebooks_are_clean(made_again):
    copies = {n: made_again / "nbs" / name_of(n) for n in NOTEBOOKS}
    unclean = [name_of(n) for n, copy in copies.items() if n.read_bytes() != copy.read_bytes()]
    assert unclean == [], "run nbdev_clean"


def test_each_notebook_has_its_place_in_the_contents():
    text = (NBS / "contents.md").read_text(encoding="utf-8")
    entries = re.findall(r"(?m)^(?:.* <)?([\w/]+)>?$", "".join(re.findall(r"\n\n([^`]*)```", text)))
    assert sorted(entries) == sorted(name_of(n).removesuffix(".ipynb") for n in NOTEBOOKS)


def test_readmes_are_made_from_the_notebooks():
    subprocess.run([sys.executable, ROOT / "tools/make_readme.py", "--check"], check=True)


def test_the_readme_is_short_and_each_notebook_is_in_a_table():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1500
    text = (NBS / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([\w/]+\.ipynb)\)", text)
    assert sorted([*linked, "index.ipynb"]) == [name_of(n) for n in NOTEBOOKS]


def markdown(path):
    "The text of a notebook without its code, or of a Markdown file."
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return re.sub(r"(?s)```.*?```|`[^`\n]*`", "", text)


def test_links_of_readme_and_notebooks_lead_somewhere():
    broken = []
    for path in [*ROOT.glob("*.md"), *NBS.rglob("*.md"), *NOTEBOOKS]:
        text = markdown(path)
        links = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
        inside = [link.split("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
        broken += [f"{path.name}: {x}" for x in inside if not (path.parent / x).exists()]
    assert broken == []


def test_notebooks_were_run_to_their_end():
    "Outputs are committed: no errors, and what prints or plots has something to show."
    # at the start of a line: not what a function does when it is called
    shows_something = re.compile(r"^((print|display)\(|plt\.show\(|\S.*\.imshow\()", flags=re.M)
    wrong = []
    for notebook, cell in ((n, cell) for n in NOTEBOOKS for cell in code_cells(n)):
        source = "".join(cell["source"])
        kinds = {o.get("name", o["output_type"]) for o in cell["outputs"]}
        shows = shows_something.search(source) and not re.match(r"#\|\s*(export|hide)", source)
        if not cell.get("id") or kinds & {"error", "stderr"} or (shows and not kinds):
            wrong.append(f"{name_of(notebook)}: {kinds or 'no output'}: {source[:60]}")
    assert wrong == []


def needs_of(requirement):
    "What an installed package requires here, with its extras."
    try:
        needs = requires(requirement.name) or []
    except PackageNotFoundError:
        return []
    found = []
    for need in map(Requirement, needs):
        extras = ("", *requirement.extras)
        if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras):
            found.append(need)
    return found


def test_every_installed_package_has_its_exact_version_written_down():
    "Follows what the two commands install, from requirement to requirement."
    pins, config, seen, missing = pinned(), settings(), set(), []
    names = config["requirements"] + " " + config["dev_requirements"]
    todo = [Requirement(name) for name in names.split()]
    for requirement in todo:
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} against constraints.txt"
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        # torch names its own packages for GPUs exactly; they are not there on a CPU
        of_torch = re.match(r"nvidia-|cuda-|triton$", name)
        if of_torch or (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        if name not in pins:
            missing.append(requirement.name)
        todo += needs_of(requirement)
    assert missing == []


LIGHT = """
import os, sys
before = dict(os.environ)
from glm_grpo import *
heavy = {"matplotlib", "transformers", "diffusers"} & {name.split(".")[0] for name in sys.modules}
assert not heavy, heavy
assert os.environ == before, os.environ.items() - before.items()
"""


def test_the_trainer_is_imported_without_what_draws_or_loads_models():
    "The wrapper's module, by contrast, needs transformers."
    names = [name for name in glm_grpo.__all__ if name != "GLMImageWrapper"]
    program = LIGHT.replace("*", ", ".join(names))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, check=True)


def test_programs_share_cores_before_torch_is_imported():
    program = """import os, runpy, sys
class Stop(BaseException): pass
class Finder:
    def find_spec(self, name, *rest):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            raise Stop
sys.meta_path.insert(0, Finder())
try:
    runpy.run_module(sys.argv[1], run_name="__main__")
except Stop:
    pass
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("GOMP_SPINCOUNT", None)
    env.pop("OMP_WAIT_POLICY", None)
    for path in set(PROGRAMS) - {"__main__.py"}:  # which lists the others
        name = path.removesuffix(".py").removesuffix("/__main__")
        words = [sys.executable, "-c", program, f"glm_grpo.{name}"]
        said = subprocess.run(words, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
        assert said.stdout == "2000\n", name


def test_version_is_the_same_everywhere():
    version = settings()["version"]
    assert f'__version__ = "{version}"' in (PACKAGE / "__init__.py").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"(?m)^## ([\d.]+)", changes)[1] == version
    assert len(changes.splitlines()) <= 60 or changes.count("\n## ") > 1, "for users, no diary"
