"""What came with somebody else's run: its code does not run, and its servers get nothing, until the
command names them. All programs, and all of their options that name a run."""

import importlib
import json
import shutil
from unittest import mock

import pytest
from helpers import GREEN, ROOT, evaluate_main, files, main, small, steps, told

from glm_grpo.data.basics import refusal
from glm_grpo.data.options import list_options
from glm_grpo.run.command_line import OPTIONS, parse_args
from glm_grpo.run.evaluate import EvaluateOptions

pytestmark = pytest.mark.usefixtures("at_root")
PROGRAMS = {"train": main, "evaluate": evaluate_main}
NEEDS_TRUST = [
    ("train", "--resume RUN"),
    ("train", "--resume=RUN"),
    ("train", "--resume CHECKPOINT"),
    ("train", "--resume CHECKPOINT.pt"),
    ("train", "--resume CHECKPOINT/trainer.json"),
    ("train", "--resume RUN/checkpoints"),
    ("train", "--resume LINK"),
    ("train", "--resume latest --output_dir RUN"),
    ("train", "--resume latest --config PLACE"),
    ("train", "--dry_run --num_steps 9 --resume RUN"),
    ("train", "--resume RUN --reward.metrics.good 2"),
    ("evaluate", "--checkpoint RUN"),
    ("evaluate", "--checkpoint=CHECKPOINT"),
    ("evaluate", "--checkpoint LINK"),
    ("evaluate", "--checkpoint RUN --baseline RUN"),
    ("evaluate", "--checkpoint RUN --model data/tiny-glm-image"),
    ("evaluate", "--checkpoint RUN --output_dir OUT"),
    ("evaluate", "--checkpoint latest --output_dir OUT"),
]
TAKES_NO_RUN = [
    ("evaluate", "--resume RUN", "--checkpoint FOLDER"),
    ("evaluate", "--checkpoint RUN --resume RUN", "--checkpoint FOLDER"),
    ("evaluate", "--baseline RUN", "Add --checkpoint"),
    ("evaluate", "--checkpoint ''", "--checkpoint"),
    ("train", "--checkpoint RUN", "no such option"),
    ("train", "--config CALL", "resume and dry_run belong"),
    ("train", "--config RUN", "cannot be read"),
]


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    "A run that names a file which leaves a trace when it is loaded, and a server."
    run, trace = tmp_path / "outputs/theirs", tmp_path / "trace"
    checkpoint = run / "checkpoints/checkpoint_step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text(json.dumps({"step": 1, "made_by": {}}))
    (run / "code.py").write_text(f"open({str(trace)!r}, 'w')\ndef good(images): return 0\n")
    reward = {"functions": [f"{run}/code.py:good"], "remote": {"far": "http://127.0.0.1:9"}}
    (run / "config.yaml").write_text(json.dumps({"reward": reward}))
    (tmp_path / "link").symlink_to(checkpoint)
    (tmp_path / "place.yaml").write_text(f"training: {{output_dir: {run}}}\n")
    (tmp_path / "call.yaml").write_text(f"resume: {run}\n")
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)  # latest looks in outputs/
    return run


def words_of(line, run):
    names = {
        "CHECKPOINT": run / "checkpoints/checkpoint_step_1",
        "LINK": run.parent.parent / "link",
        "PLACE": run.parent.parent / "place.yaml",
        "CALL": run.parent.parent / "call.yaml",
        "OUT": run.parent.parent / "out",
        "RUN": run,
    }
    for name, path in names.items():
        line = line.replace(name, str(path))
    return ["" if word == "''" else word for word in line.split()]


@pytest.mark.parametrize(("program", "line"), NEEDS_TRUST)
def test_nothing_of_a_run_is_used_without_trust(theirs, capsys, program, line):
    before, words = files(theirs.parent.parent), words_of(line, theirs)
    assert PROGRAMS[program](*words) == 2
    said = capsys.readouterr().err
    for part in ("code.py:good", "--trust_run_code", "http://127.0.0.1:9", "have not named"):
        assert part in said
    assert PROGRAMS[program](*words, "--trust_run_code") == 2  # the server, still
    said = capsys.readouterr().err
    assert "'http://127.0.0.1:9'" in said and "code.py" not in said
    assert files(theirs.parent.parent) == before


@pytest.mark.parametrize(("program", "line", "part"), TAKES_NO_RUN)
def test_other_options_do_not_bring_in_a_run(theirs, capsys, program, line, part):
    before = files(theirs.parent.parent)
    assert PROGRAMS[program](*words_of(line, theirs)) == 2
    assert part in told(capsys)
    assert files(theirs.parent.parent) == before


@pytest.mark.parametrize("program", ["remote", "bench.__main__"])
def test_the_other_programs_take_no_run(theirs, capsys, program):
    main = importlib.import_module(f"glm_grpo.{program}").main
    assert main(["--resume", str(theirs)]) == 2
    assert "--resume: no such option" in capsys.readouterr().err
    assert not (theirs.parent.parent / "trace").exists()


def test_every_option_that_names_a_run_is_in_these_lists():
    options = OPTIONS | list_options(EvaluateOptions)
    named = [name for name, o in options.items() if "checkpoint: " in o.metadata["help"]]
    assert named == ["resume", "checkpoint", "baseline"]
    lines = [(case[0], name) for case in NEEDS_TRUST + TAKES_NO_RUN for name in case[1].split()]
    tried = {(program, word.lstrip("-").split("=")[0]) for program, word in lines}
    assert {name for _, name in tried} >= {*named, "config"}


def test_what_the_command_names_is_the_users_own(theirs):
    "Also the run's own config.yaml, as --config: then the user has named that file."
    file = theirs / "config.yaml"
    named = ["--reward.functions", f"{theirs}/code.py:good", "--reward.remote.x"]
    for words in (["--config", str(file)], [*named, "http://127.0.0.1:9/"]):
        config = parse_args(["--resume", str(theirs), *words])
        assert f"{theirs}/code.py:good" in config.reward.functions
        assert parse_args(words, run=theirs).reward.remote
    assert parse_args(["--config", str(file)]).reward.functions  # a new run with these options
    only_code = ["--resume", str(theirs), "--reward.remote", "null", "--trust_run_code"]
    assert parse_args(only_code).reward.functions
    assert "code.py" in refusal(parse_args, [*only_code, "--trust_run_code", "false"])
    assert "code.py" in refusal(parse_args, [], run=theirs)  # whatever program asks


def test_a_baseline_lends_its_weights_and_no_options(theirs):
    mine = theirs.parent / "mine"
    shutil.copytree(theirs, mine)
    (mine / "config.yaml").write_text("training: {seed: 5}\n")
    with mock.patch("glm_grpo.run.evaluate.compare") as compare:
        assert evaluate_main("--checkpoint", mine, "--baseline", theirs) == 0
    config = compare.call_args.args[0]
    assert config.training.seed == 5
    assert config.reward.functions is None and config.reward.remote is None


def test_evaluate_does_not_write_into_a_run(theirs, capsys):
    before = {path: path.read_bytes() for path in files(theirs)}
    assert evaluate_main("--output_dir", theirs) == 2
    assert "--output_dir" in (said := told(capsys)) and "holds a run" in said
    assert {path: path.read_bytes() for path in files(theirs)} == before


def test_runs_that_start_at_the_same_moment_have_folders_of_their_own(folder, monkeypatch):
    "Here another run takes the free name while this one tries its reward."
    monkeypatch.chdir(folder)
    other = "import os\nos.makedirs('outputs/run_001', exist_ok=True)\n"
    (folder / "green.py").write_text(other + GREEN)
    model = ["--model.name", ROOT / "data/tiny-glm-image"]
    assert main(*small(folder, "--num_steps", 1, *model)) == 0
    assert not files(folder / "outputs/run_001")
    run = folder / "outputs/run_002"
    assert (
        steps(run) == [1]
        and f"output_dir: {run.relative_to(folder)}" in (run / "config.yaml").read_text()
    )
