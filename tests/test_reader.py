"What a first reader meets: pages of bearable length, and the README's example."

import json
import os
import re

from helpers import ROOT

NBS = ROOT / "nbs"
CONTENTS = (NBS / "contents.md").read_text(encoding="utf-8")
ROAD = re.search(r"Main road\n:titlesonly:\n\nindex\n([^`]*)", CONTENTS)[1].split()


def cells_of(name):
    "(text, is code) of each cell that a reader sees."
    cells = json.loads((NBS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    pairs = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
    return [pair for pair in pairs if not re.match(r"#\|\s*(hide|default_exp)", pair[0])]


def lines_of(text):
    return sum(bool(line.strip()) for line in text.splitlines())


def size_of(name):
    "Words of text and lines of code, without blank ones, of a notebook."
    cells = cells_of(name)
    words = sum(len(text.split()) for text, is_code in cells if not is_code)
    return words, sum(lines_of(text) for text, is_code in cells if is_code)


def test_the_main_road_takes_about_three_hours():
    words, lines = map(sum, zip(*map(size_of, ROAD)))
    assert words <= 15_000 and lines <= 2_600, (words, lines)
    for path in (ROOT / "README.md", NBS / f"{ROAD[0]}.ipynb"):
        assert "about three hours" in path.read_text(encoding="utf-8"), path


def test_each_page_of_the_main_road():
    "Its place, short cells, three questions with folded answers, and where to read on."
    for place, name in enumerate(ROAD, 1):
        cells = cells_of(name)
        text = "\n".join(text for text, is_code in cells if not is_code)
        assert f"part {place} of {len(ROAD)}" in cells[0][0], name
        code = [text for text, is_code in cells if is_code and "#| export" not in text]
        assert max(map(lines_of, code), default=0) <= 15, name
        assert text.count("<summary>Answer") == 3 and "<summary>Hint" in text, name
        assert "## Further reading" in text, name


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


def test_the_programs_of_the_readme_name_ones_own_reward():
    "A run's own code runs only if the command names it."
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"(?s)```sh\n(MINE=.*?)```", readme)
    programs = re.findall(r"^python -m glm_grpo\.(?:train|probe|evaluate) .*", block, re.M)
    assert len(programs) == 4 and all(" $MINE " in line for line in programs)
