"""The house: imports go down the floors, and code stays short enough to be read."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "glm_grpo"
FLOORS = ["maths", "data", "model", "rewards", "training", "run", "bench"]  # lowest first
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py")
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if "/." not in str(p))
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# What is longer than its limit, and why. Each name must really be longer.
LONG_FUNCTIONS = {
    "compute_grpo_loss": "public interface: its options are those of TRL's loss",
    "MinimalGRPOTrainer.__init__": "public interface: thirteen parameters",
}
MANY_PARAMETERS = {
    "compute_grpo_loss": "public interface",
    "MinimalGRPOTrainer.__init__": "public interface",
    "GLMImageWrapper.__init__": "public interface",
    "GLMImageWrapper.generate_with_tracking": "public interface",
}


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def floor_of(name):
    "glm_grpo.model.tokens -> 2; None for the programs and `glm_grpo` itself, which may see all."
    parts = name.split(".")
    return FLOORS.index(parts[1]) if len(parts) > 1 and parts[1] in FLOORS else None


def imported_modules(tree, here):
    "Names of our modules that a tree imports, at its top or inside a function."
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            stem = node.module or ""
            if node.level:
                base = here.split(".")[: -node.level]
                stem = ".".join([*base, stem]).rstrip(".")
            found |= {stem} | {f"{stem}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("glm_grpo.")}


def upward(tree, here):
    "Imports of a higher floor."
    own = floor_of(here)
    if own is None:
        return []
    floors = {name: floor_of(name) for name in imported_modules(tree, here)}
    return [name for name, floor in floors.items() if floor is not None and floor > own]


def code_cells(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]


def parse_cell(source):
    "A cell without its magics."
    lines = [line for line in source.splitlines() if not re.match(r"\s*[%!]", line)]
    return ast.parse("\n".join(lines))


def exported_to(notebook):
    "The module that a notebook exports to, or None."
    for source in code_cells(notebook):
        if m := re.match(r"#\|\s*default_exp\s+(\S+)", source):
            return f"glm_grpo.{m[1]}"
    return None


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_modules_import_from_their_own_floor_and_below(path):
    package = path.name == "__init__.py"
    here = module_name(path) + (".__init__" if package else "")
    assert upward(ast.parse(path.read_text(encoding="utf-8")), here) == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda n: n.stem)
def test_notebook_cells_import_from_their_own_floor_and_below(notebook):
    here = exported_to(notebook)
    if here is None:
        pytest.skip("exports nothing")
    found = []
    for source in code_cells(notebook):
        found += upward(parse_cell(source), here)
    assert found == []


def test_no_circles():
    names = {module_name(p): p for p in MODULES}
    arrows = {}
    for name, path in names.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        here = name + (".__init__" if path.name == "__init__.py" else "")
        arrows[name] = {t for t in imported_modules(tree, here) if t in names and t != name}

    def reach(start):
        seen, todo = set(), list(arrows[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += arrows[name]
        return seen

    assert [name for name in names if name in reach(name)] == []


def test_a_wrong_arrow_is_seen():
    "The checks above can fail."
    inside = ast.parse("def f():\n    from ..model.tokens import PromptInputs")
    assert upward(inside, "glm_grpo.data.files") == [
        "glm_grpo.model.tokens"
    ] or "glm_grpo.model.tokens" in upward(inside, "glm_grpo.data.files")
    assert upward(ast.parse("from glm_grpo.run import config"), "glm_grpo.training.trainer")
    assert not upward(ast.parse("from ..data.files import atomic_dir"), "glm_grpo.model.saving")


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_private_names_stay_at_home(path):
    tree, found = ast.parse(path.read_text(encoding="utf-8")), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or "glm_grpo" in (node.module or "")):
            found += [alias.name for alias in node.names if alias.name.startswith("_")]
    assert found == []


@pytest.mark.parametrize(
    "statement",
    [
        "import glm_grpo",
        "from glm_grpo import compute_advantages, compute_grpo_loss, sde_step",
        "from glm_grpo import T2IDataset, MinimalGRPOTrainer, simple_reward_function",
    ],
)
def test_a_toy_needs_neither_transformers_nor_diffusers(statement):
    loaded = "[m for m in ('transformers', 'diffusers') if m in sys.modules]"
    code = f"{statement}\nimport sys\nprint({loaded})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def functions(path):
    "(qualified name, node) of each function of a module."
    found = []

    def walk(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                walk(child, f"{child.name}.")
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                owner = patched_class(child)
                found.append((f"{owner}.{child.name}" if owner else prefix + child.name, child))

    walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def patched_class(function):
    "`@patch_to(Class)` -> Class."
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "patch_to":
            return decorator.args[0].id
    return None


def lines_of(path, node):
    lines = path.read_text(encoding="utf-8").splitlines()
    return sum(bool(line.strip()) for line in lines[node.lineno - 1 : node.end_lineno])


def test_functions_fit_on_a_screen():
    too_long = {}
    for path in MODULES:
        for name, node in functions(path):
            if (n := lines_of(path, node)) > 40:
                too_long[name] = n
    assert sorted(too_long) == sorted(set(LONG_FUNCTIONS) & set(too_long)), too_long


def test_functions_have_few_parameters():
    too_many = {}
    for path in MODULES:
        for name, node in functions(path):
            args = node.args
            n = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
            if n > 10:
                too_many[name] = n
    assert set(too_many) <= set(MANY_PARAMETERS), too_many


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_modules_are_short_and_their_lines_end_at_100(path):
    text = re.sub(r"(?s)^__all__ = \[.*?\]$", "", path.read_text(encoding="utf-8"), flags=re.M)
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) <= 350
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_comprehensions_are_not_nested(path):
    if floor_of(module_name(path)) not in [FLOORS.index(f) for f in ("maths", "model", "training")]:
        pytest.skip("allowed where it is the plainest form")
    tree, nested = ast.parse(path.read_text(encoding="utf-8")), []
    for outer in ast.walk(tree):
        if not isinstance(outer, COMPREHENSIONS):
            continue
        inner = [x for x in ast.walk(outer) if isinstance(x, COMPREHENSIONS) and x is not outer]
        nested += [f"line {outer.lineno}" for _ in inner]
    assert nested == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda n: n.stem)
def test_notebooks_are_short(notebook):
    cells = code_cells(notebook)
    lines = [line for source in cells for line in source.splitlines() if line.strip()]
    exported = [s for s in cells if re.match(r"#\|\s*export", s)]
    assert len(cells) <= 90 and len(lines) <= 460  # about 450
    assert max((len(s.splitlines()) for s in exported), default=0) <= 60
    assert [line for line in lines if len(line) > 100] == []


def shadowed(tree):
    "Names of methods added by `@patch_to` that the module imports or defines under that name, too."
    taken = set()
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            taken |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        plain = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if plain and not (isinstance(node, ast.FunctionDef) and patched_class(node)):
            taken.add(node.name)
    methods = [n for n in tree.body if isinstance(n, ast.FunctionDef) and patched_class(n)]
    return [method.name for method in methods if method.name in taken]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_patched_methods_do_not_hide_what_the_module_uses(path):
    "A method added in a later cell stands in the module as a function of its own name."
    assert shadowed(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_a_hidden_name_is_seen():
    patched = "\n@patch_to(Thing)\ndef score(self): ..."
    assert shadowed(ast.parse("from scoring import score" + patched)) == ["score"]
    assert shadowed(ast.parse("def score(): ..." + patched)) == ["score"]
    assert shadowed(ast.parse("from scoring import score as rate" + patched)) == []
