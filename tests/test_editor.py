"""What an editor sees: jedi completes the public names and the methods of their classes."""

import ast
import importlib.util
import re

import jedi
import pytest
from helpers import ROOT

import glm_grpo

HELD = {  # class -> some of what people call on it
    "MinimalGRPOTrainer": ["train", "train_step", "save_checkpoint", "generate_samples", "options"],
    "GLMImageWrapper": ["generate_with_tracking", "compute_token_logprobs", "save_pretrained"],
    "T2IDataset": ["prompts", "load"],
}


def completions(code):
    project = jedi.Project(ROOT)
    return {found.name for found in jedi.Script(code, project=project).complete()}


def test_the_public_names_are_those_of_the_type_checker():
    tree = ast.parse((ROOT / "glm_grpo/__init__.py").read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            for name in node.names:
                imported.add((name.name, node.module))
    assert imported == set(glm_grpo._HOMES.items())
    assert set(glm_grpo._HOMES) <= completions("from glm_grpo import ")
    for name in glm_grpo.__all__:
        assert callable(getattr(glm_grpo, name))


@pytest.mark.parametrize("name", HELD)
def test_methods_are_completed(name):
    code = f"from glm_grpo import {name}\n\ndef work(held: {name}):\n    held."
    assert set(HELD[name]) <= completions(code)


def test_names_in_the_readmes_example_lead_somewhere():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    script = jedi.Script(code, project=jedi.Project(ROOT))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            place = node.end_lineno, node.end_col_offset - 1
            assert script.goto(*place, follow_imports=True), ast.unparse(node)


def test_each_public_name_has_a_page_on_the_site(tmp_path):
    spec = importlib.util.spec_from_file_location("site_api", ROOT / "tools/site/api.py")
    api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api)
    api.write_pages(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.md")} == {*glm_grpo.__all__, "index"}
    trainer = (tmp_path / "MinimalGRPOTrainer.md").read_text(encoding="utf-8")
    assert "group_size: int" in trainer and "\n## train_step\n" in trainer
    assert "## Fields" in (tmp_path / "TrainerOptions.md").read_text(encoding="utf-8")
