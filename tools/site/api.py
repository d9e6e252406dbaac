"""Pages of the public names, read from the package's text: nothing is imported.

In signatures the comments next to the parameters stay, since they say shapes, units and defaults.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "glm_grpo"


def public_names() -> dict[str, str]:
    "Name -> module (maths.loss), in the order of `glm_grpo/__init__.py`."
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            return ast.literal_eval(node.value)
    raise LookupError("no _HOMES in glm_grpo/__init__.py")


def block(lines: list[str]) -> str:
    code = inspect.cleandoc("\n".join(["", *lines]))
    return f"```python\n{code}\n```\n"


def signature(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> list[str]:
    "Its lines with decorators and comments, up to the docstring."
    start = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    end = max(node.lineno, node.body[0].lineno - 1)
    code = lines[start - 1 : end]
    code = [re.sub(r"\s*# noqa:? ?[A-Z\d, ]*", "", line) for line in code]
    return code if code[-1].rstrip().endswith((":", ",")) else [*code[:-1], code[-1].rstrip()]


def docstring(node: ast.AST) -> str:
    "Its text, as Markdown."
    return (ast.get_docstring(node) or "").strip() + "\n"


def members(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    "The class's fields, then its public methods, as Markdown."
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign | ast.Assign)]
    public = [one for one in fields if not ast.unparse(one).startswith("_")]
    if public:
        code = []
        for one in public:
            code += lines[one.lineno - 1 : one.end_lineno]
        yield "## Fields\n"
        yield block(code)
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and (one.name == "__init__" or one.name[0] != "_"):
            yield f"## {'Arguments' if one.name == '__init__' else one.name}\n"
            yield block(signature(one, lines))
            yield docstring(one)


def page(name: str, module: str) -> str:
    "The Markdown of a public name."
    text = (PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    notebook = re.search(r"File to edit: (?:\.\./)*nbs/(.*)\.ipynb", text)[1]
    lines = text.splitlines()
    kinds, real = ast.FunctionDef | ast.ClassDef, name
    if alias := re.search(rf"(?m)^{name} = (\w+)", text):
        real = alias[1]
    (node,) = [n for n in ast.parse(text).body if isinstance(n, kinds) and n.name == real]
    parts = [
        f"# {name}\n",
        f"`from glm_grpo import {name}`; explained in [{notebook}](../{notebook}.ipynb)\n",
        block(signature(node, lines)),
        docstring(node),
    ]
    if isinstance(node, ast.ClassDef):
        parts += members(node, lines)
    return "\n".join(parts)


def write_pages(folder: Path) -> None:
    "A page for each name, and index.md."
    folder.mkdir(exist_ok=True)
    names = public_names()
    for name, module in names.items():
        (folder / f"{name}.md").write_text(page(name, module), encoding="utf-8")
    rows = "\n".join(names)
    index = "# Python names\n\nAll of them are imported from `glm_grpo`.\n\n"
    index += f"```{{toctree}}\n:maxdepth: 1\n\n{rows}\n```\n"
    (folder / "index.md").write_text(index, encoding="utf-8")
