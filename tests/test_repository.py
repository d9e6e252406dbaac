"""The repository itself: are modules, notebooks, README and versions in step?"""
import json
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

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / 'nbs').glob('[0-9]*.ipynb')) + [ROOT / 'nbs/index.ipynb']
CODE = {n.name: [c for c in json.loads(n.read_text())['cells'] if c['cell_type'] == 'code'] for n in NOTEBOOKS}


def settings():
    config = ConfigParser(delimiters=['='])
    config.read(ROOT / 'settings.ini')
    return config['DEFAULT']


def pinned():
    lines = [l for l in (ROOT / 'constraints.txt').read_text().splitlines() if l and not l.startswith('#')]
    assert all(re.fullmatch(r'[\w.-]+==[\w.]+', l) for l in lines), 'constraints.txt holds exact versions only'
    return {canonicalize_name(l.split('==')[0]): l.split('==')[1] for l in lines}


@pytest.fixture(scope='module')
def made_again(tmp_path_factory):
    "The notebooks in a folder of their own, exported and cleaned there."
    copy = tmp_path_factory.mktemp('project')
    shutil.copy(ROOT / 'settings.ini', copy)
    shutil.copytree(ROOT / 'nbs', copy / 'nbs', ignore=shutil.ignore_patterns('.ipynb_checkpoints'))
    (copy / 'glm_grpo').mkdir()
    shutil.copy(ROOT / 'glm_grpo/__init__.py', copy / 'glm_grpo')
    for command in ('nbdev_export', 'nbdev_clean'):
        subprocess.run([Path(sys.executable).parent / command], cwd=copy, check=True)
    return copy


def test_modules_are_what_the_notebooks_export(made_again):
    have, made = ({p.name: p.read_text() for p in (top / 'glm_grpo').glob('*.py')} for top in (ROOT, made_again))
    assert sorted(have) == sorted(made), 'a module without a notebook, or the other way round'
    assert [name for name in have if have[name] != made[name]] == [], 'run nbdev_export'


def test_notebooks_are_clean(made_again):
    assert [n.name for n in NOTEBOOKS if n.read_bytes() != (made_again / 'nbs' / n.name).read_bytes()] == [], 'run nbdev_clean'


def test_readme_is_made_from_index():
    subprocess.run([sys.executable, ROOT / 'tools/make_readme.py', '--check'], check=True)


def test_readme_names_every_notebook_and_no_other():
    linked = re.findall(r'\]\(nbs/([^)]+\.ipynb)\)', (ROOT / 'README.md').read_text())
    assert sorted(linked) == sorted(n.name for n in NOTEBOOKS if n.name != 'index.ipynb')


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / 'README.md').read_text()
    links = re.findall(r'\]\(([^)\s]+)', text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    assert [l for l in links if not re.match(r'[a-z]+:|#', l) and not (ROOT / l.split('#')[0]).exists()] == []


def test_notebooks_come_in_the_order_of_dependence():
    "A module may import at its top only what an earlier notebook exports; its own number is unique."
    numbers = [n.name[:2] for n in NOTEBOOKS[:-1]]
    assert len(set(numbers)) == len(numbers)
    place = {}
    for number, notebook in zip(numbers, NOTEBOOKS):
        names = [m[1] for c in CODE[notebook.name] if (m := re.match(r'#\|\s*default_exp\s+(\w+)', ''.join(c['source'])))]
        assert len(names) == 1, f'{notebook.name} exports to {names}, expected one module'
        place[names[0]] = number
    for module, number in place.items():
        source = (ROOT / 'glm_grpo' / f'{module}.py').read_text()
        uses = re.findall(r'^(?:from glm_grpo\.|import glm_grpo\.|from \.)(\w+)', source, flags=re.M)
        assert [u for u in uses if place[u] >= number] == [], f'{module} uses what comes later'


@pytest.mark.parametrize('notebook', [n.name for n in NOTEBOOKS])
def test_notebook_was_run_to_its_end(notebook):
    "Outputs are committed: no errors, and what prints or plots has something to show."
    for cell in CODE[notebook]:
        source = ''.join(cell['source'])
        assert cell.get('id'), 'a cell without an id gets a random one'
        assert [o['evalue'] for o in cell['outputs'] if o['output_type'] == 'error'] == []
        shows = re.search(r'^((print|display)\(|plt\.show\(|\S.*\.imshow\()', source, flags=re.M)   # not what a def does when called
        assert cell['outputs'] or not shows or re.match(r'#\|\s*(export|hide)', source), f'no output: {source[:80]}'


def test_every_installed_package_has_its_exact_version_written_down():
    "Follows what the two commands install, from requirement to requirement."
    pins, config, seen, missing = pinned(), settings(), set(), []
    todo = (config['requirements'] + ' ' + config['dev_requirements']).split()
    for requirement in map(Requirement, todo):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), f'{requirement} against constraints.txt'
    while todo:
        requirement = Requirement(todo.pop())
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen: continue
        seen.add(key)
        if re.match(r'nvidia-|cuda-|triton$', key[0]): continue   # torch's own, named exactly by torch; not on a CPU
        if key[0] not in pins: missing.append(requirement.name)
        try: needs = requires(requirement.name) or []
        except PackageNotFoundError: continue
        for need in map(Requirement, needs):
            if any(need.marker is None or need.marker.evaluate({'extra': e}) for e in ('', *requirement.extras)): todo.append(str(need))
    assert missing == []


def test_modules_need_no_developers_packages():
    "`pip install .` without [dev] is enough for the package."
    names = sorted(p.stem for p in (ROOT / 'glm_grpo').glob('*.py') if not p.stem.startswith('_'))
    code = ("import sys\nfor name in ('nbdev', 'fastcore', 'execnb', 'nbconvert', 'nbformat', 'nbclient', 'pytest'): sys.modules[name] = None\n"
            f"import glm_grpo\nfor name in {names}: __import__('glm_grpo.' + name)")
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)


def test_version_is_the_same_everywhere():
    assert f'__version__ = "{settings()["version"]}"' in (ROOT / 'glm_grpo/__init__.py').read_text()
