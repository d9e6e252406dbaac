"""The first table of 4_rewards/09_registry, "From what you have to what you write": every line of
it makes a reward and scores images, with small models of random weights in the place of real ones.
"""

import json
import re
import shlex

import pytest
import torch
from helpers import ROOT, main, small
from small_models import save_clip, save_detector, save_llava

from glm_grpo.rewards.registry import load_function
from glm_grpo.rewards.remote import serve

NOTEBOOK = json.loads((ROOT / "nbs/4_rewards/09_registry.ipynb").read_text())
TEXTS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"]]
(PAGE,) = [text for text in TEXTS if text.startswith("## From what you have")]
LINES = re.findall(r"\| `(--reward[^`]*)` \|", PAGE)
(MY_REWARD,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
GENEVAL = """\
{"tag": "counting", "include": [{"class": "bus", "count": 3}], \
"exclude": [{"class": "bus", "count": 4}], "prompt": "a photo of three buses"}
{"tag": "position", "include": [{"class": "couch", "count": 1}, \
{"class": "bird", "count": 1, "position": ["left of", 0]}], "prompt": "a bird left of a couch"}
"""
SERVED = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    with torch.random.fork_rng(devices=[]):
        save_clip(folder / "clip")
        save_llava(folder / "vlm")
        save_clip(folder / "geneval/clip")
        save_detector(folder / "geneval")
    return folder


@pytest.fixture
def home(folder, models, monkeypatch):
    "A folder in which the commands of the page run."
    (folder / "models").symlink_to(models)
    (folder / "geneval").mkdir()
    (folder / "geneval/evaluation_metadata.jsonl").write_text(GENEVAL)
    (folder / "my_reward.py").write_text(MY_REWARD)
    (folder / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(folder)
    return folder


def options_without_reward(folder):
    words = small(folder, mode="t2i")
    at = words.index("--reward.functions")
    return words[:at] + words[at + 2 :]


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_table_makes_a_reward(home, capsys, line):
    words = shlex.split(line)
    if SERVED not in line:
        assert main("--dry_run", *options_without_reward(home), *words) == 0, capsys.readouterr()
        return
    with serve(load_function("my_reward.py:redness")) as server:
        words = [word.replace(SERVED, server.url) for word in words]
        assert main("--dry_run", *options_without_reward(home), *words) == 0, capsys.readouterr()


def test_the_table_has_a_line_for_each_kind_of_reward():
    kinds = ("functions", "metrics", "models", "remote")
    assert all(any(f"--reward.{kind}" in line for line in LINES) for kind in kinds)
    assert len(LINES) == PAGE.count("\n| ") - 1  # all rows but the head


def test_the_file_of_the_page_scores_images(home):
    images = torch.eye(3).view(3, 3, 1, 1).expand(-1, -1, 8, 8)
    redness = load_function("my_reward.py:redness")
    assert redness(images).tolist() == [1, -0.5, -0.5]
    for name in ("Contrast", "Photo"):
        reward = load_function(f"my_reward.py:{name}")
        assert reward(images, ["a", "b", "c"]).shape == (3,)
