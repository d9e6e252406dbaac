"Names that cannot be used, and folders with something in them: one clear line, nothing written."

import pytest
from helpers import evaluate_main, files, main, small, told

from glm_grpo.data.basics import refusal
from glm_grpo.run.train import check_folder

pytestmark = pytest.mark.usefixtures("at_root")
NOT_UTF8 = b"caf\xe9".decode("utf-8", "surrogateescape")


def make_odd(folder):
    "A dangling link, two links that lead to each other, and a file."
    (folder / "dangling").symlink_to("gone")
    (folder / "loop_a").symlink_to("loop_b")
    (folder / "loop_b").symlink_to("loop_a")
    (folder / "file").write_text("")


ODD = {
    "dangling/run": "leads to gone, which does not exist",
    "loop_a": "leads to loop_b",
    NOT_UTF8: "not UTF-8",
}


@pytest.mark.parametrize("run", [main, evaluate_main])
def test_folders_that_cannot_be_written_are_told_first(folder, capsys, run):
    make_odd(folder)
    before = files(folder)
    for name, says in (ODD | {"file/run": "is a file"}).items():
        assert run(*small(folder, "--output_dir", f"{folder}/{name}")) == 2
        message = told(capsys)
        assert name.encode("ascii", "backslashreplace").decode() in message and says in message
        message.encode()  # it can be printed anywhere
    assert files(folder) == before


@pytest.mark.parametrize("name", ["eval.json", "page.html", "samples/step_000001.png"])
def test_results_of_others_are_not_overwritten(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    assert f"{tmp_path}: holds a run" in refusal(check_folder, str(tmp_path))
    check_folder(str(tmp_path), resume="some checkpoint")
    (tmp_path / name).unlink()
    check_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("option", "mode"),
    [
        ("--data.prompts_file", "t2i"),
        ("--data.eval_prompts_file", "i2i"),
        ("--data.target_images_dir", "t2i"),
        ("--data.source_images_dir", "i2i"),
    ],
)
def test_data_that_cannot_be_opened_are_told_first(folder, capsys, option, mode):
    make_odd(folder)
    run = folder / "run"
    for name, says in ODD.items():
        words = [option, f"{folder}/{name}", "--output_dir", run]
        assert main(*small(folder, *words, mode=mode)) == 2
        message = told(capsys)
        assert says in message
        message.encode()
    assert not run.exists()
