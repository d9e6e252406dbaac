"What a first reader meets: the times that the main road claims, and the README's example."

import json
import os
import re

from helpers import ROOT

NBS = ROOT / "nbs"
CONTENTS = (NBS / "contents.md").read_text(encoding="utf-8")
ROAD = re.search(r"Main road\n\nindex\n([^`]*)", CONTENTS)[1].split()


def cells_of(name):
    "(text, is code) of each cell that a reader sees."
    cells = json.loads((NBS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    pairs = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
    return [pair for pair in pairs if not re.match(r"#\|\s*(hide|default_exp)", pair[0])]


def minutes_of(name):
    "Minutes at 200 words and three cells of code per minute."
    cells = cells_of(name)
    words = sum(len(text.split()) for text, is_code in cells if not is_code)
    return words / 200 + sum(is_code for _, is_code in cells) / 3


def test_the_times_that_the_main_road_claims():
    wrong = []
    for name in ROAD:
        text = "\n".join(text for text, is_code in cells_of(name) if not is_code)
        claimed = int(re.search(r"\*\*Time\*\*: about (\d+) minutes", text)[1])
        needed = minutes_of(name)
        if not 0.75 * needed <= claimed <= 1.5 * needed + 3:
            wrong.append(f"{name}: about {needed:.0f} minutes")
    assert wrong == []


def test_the_main_road_takes_about_three_hours():
    assert 2.5 * 60 < sum(map(minutes_of, ROAD)) < 3.5 * 60
    for path in (ROOT / "README.md", NBS / f"{ROAD[0]}.ipynb"):
        assert "about three hours" in path.read_text(encoding="utf-8"), path


def test_the_example_of_the_readme_runs(tmp_path, monkeypatch):
    "One step of two images instead of five steps of sixteen."
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"(?s)```python\n(.*?)```", readme)
    changes = {"train(5)": "train(1)", "group_size=8": "group_size=2", "outputs": str(tmp_path)}
    changes |= {"batch_size=2": "batch_size=1", "num_inference_steps=4": "num_inference_steps=1"}
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    monkeypatch.chdir(ROOT)
    names = {}
    exec(source, names)
    assert names["trainer"].step == 1 and 0 <= names["trainer"].history[0]["reward_mean"] <= 1
    assert "trainer.json" in os.listdir(tmp_path / "first")
