"The program that runs all notebooks: which of them failed."

import importlib.util

import nbformat
import pytest
from helpers import ROOT

CELLS = {
    "good": "assert 1 + 1 == 2",
    "wrong": "assert 1 == 2",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "slow": "#| slow\nassert False",
}


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("nbdev_test", ROOT / "tools/nbdev_test.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def notebooks(tmp_path):
    for name, source in CELLS.items():
        cell = nbformat.v4.new_code_cell(source)
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / f"{name}.ipynb")
    return sorted(tmp_path.glob("*.ipynb"))


def test_notebooks_that_fail_or_are_killed_are_named(program, notebooks, capfd):
    failed = program.run_all(notebooks, jobs=2)
    assert sorted(path.stem for path in failed) == ["killed", "wrong"]
    out, err = capfd.readouterr()
    assert out.count("- Completed") == 2 and "- Failed (-9)" in out
    assert "assert 1 == 2" in err


def test_a_notebook_that_does_not_exist_is_refused(program, capsys):
    with pytest.raises(SystemExit):
        program.main(["nbs/nothing.ipynb"])
    assert "no such notebook" in capsys.readouterr().err
