"The page of a run, read with a parser; its script in a real browser where chromium is installed."

import base64
import hashlib
import io
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from helpers import ROOT, read_jsonl
from PIL import Image

from glm_grpo.run.train import write_results
from glm_grpo.run.config import Config
from glm_grpo.run.evaluation import PeriodicEvaluation
from glm_grpo.run.alarms import Change, Evaluation
from glm_grpo.run.report import CARDS, FIRST, merge_reward, write_page
from glm_grpo.training.agreement import Agreement, Gap
from glm_grpo.training.metrics import LEGEND, legend_key

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NASTY = "<script>alert(\"1\")</script> & a 'cat' <img src=x onerror=alert(1)>"
GOOD = Agreement({"ar": Gap(8e-6, 1e-7, 1e-13, 1e-3)}, "float32", None)
BAD = Agreement({"dit": Gap(0.5, 0.1, 0.01, 1e-4)}, "bfloat16", 4)


def result(shift, prompts=40, side=16, **changes):
    "What `evaluate` would return: the reward of prompt i has moved by shift * i / 40."
    image = Image.effect_noise((side, side), 60).convert("RGB")
    made = {
        "reward_mean": 0.5 + shift / 2,
        "rewards": [[0.5 + shift * i / 40] for i in range(prompts)],
        "prompts": [NASTY] * prompts,
        "seeds": [0],
        "pictures": prompts,
        "images": [[image]] * prompts,
        "sources": [image] * prompts,
        "metrics": {"<b>": 0.5 + shift},
        "values": {"<b>": [[0.5 + shift]] * prompts},
    }
    return Evaluation(**made | changes)


class Reader(HTMLParser):
    "The tags with their attributes, and the texts. AssertionError if a tag closes another one."

    def __init__(self, path):
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.open, self.tags, self.texts = [], [], []
        self.feed(self.text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "source", "br", "input", "polyline", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)

    def policy(self):
        "The content security policy: directive -> sources."
        (content,) = [at["content"] for _, at in self.tags if "http-equiv" in at]
        return {words[0]: words[1:] for words in map(str.split, content.split(";"))}


@pytest.fixture
def write(tmp_path):
    def written(before, after, **options):
        write_page(tmp_path / "page.html", before, after, **options)
        return Reader(tmp_path / "page.html")

    return written


def test_hostile_names_become_text(write):
    seen = write(result(0), result(1), title=NASTY, agreement=GOOD)
    assert seen.count("script") == 1 and seen.texts.count(NASTY) == 2 + 40  # 2: titles
    assert "<b>" in seen.texts and seen.text.count("alert(") == seen.text.count("alert(1)") * 2


def test_the_policy_allows_one_script_and_one_style_and_nothing_from_elsewhere(write):
    seen = write(result(0), result(1))
    policy = seen.policy()
    assert policy["default-src"] == ["'none'"] and policy["img-src"] == ["data:"]
    for tag in ("script", "style"):
        (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", seen.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == [f"'sha256-{digest}'"], "page.html needs this hash"
    for tag, attributes in seen.tags:
        assert tag not in ("link", "iframe", "object", "base", "form")
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        addresses = [attributes[name] for name in ("src", "href", "srcset") if name in attributes]
        assert all(address.startswith(("data:image/", "#")) for address in addresses)
    assert "://" not in seen.text and "url(" not in seen.text and "@import" not in seen.text


def test_each_card_has_a_slider_that_is_hidden_without_the_script(write):
    seen = write(result(0, prompts=3), result(1, prompts=3))
    assert seen.count("article") == 3 and seen.count("img") == 9
    sliders = [attributes for tag, attributes in seen.tags if tag == "input"]
    assert len(sliders) == 3 and all(one["type"] == "range" for one in sliders)
    assert ".slide { display: none }" in seen.text
    stacked = [line for line in seen.text.split("\n") if "grid-area: 1 / 1" in line]
    assert stacked and all(line.strip().startswith(".js ") for line in stacked)


def test_a_card_shows_the_seed_that_changed(write):
    "Of two seeds the second one rises, so its images stand under the gain."
    grey = [[Image.new("RGB", (4, 4), (40 * k, 0, 0)) for k in (1, 2)]]
    bright = [[Image.new("RGB", (4, 4), (40 * k, 0, 0)) for k in (3, 4)]]
    same = {"prompts": 1, "sources": None, "values": {"<b>": [[0.1, 0.2]]}}
    one = result(0, rewards=[[0.5, 0.25]], images=grey, **same)
    two = result(0, rewards=[[0.5, 0.75]], images=bright, **same)
    seen = write(one, two)
    pixels = []
    for _, attributes in seen.tags:
        if attributes.get("src", "").startswith("data:image/"):
            data = base64.b64decode(attributes["src"].split(",")[1])
            pixels.append(Image.open(io.BytesIO(data)).getpixel((0, 0))[0])
    assert pixels == pytest.approx([80, 160], abs=3)
    texts = " ".join(seen.texts)
    assert "before 0.25" in texts and "after 0.75" in texts and "<b> 0.2 → 0.2" in texts


def test_the_largest_changes_stand_first_and_long_lists_are_cut(write):
    number = FIRST + CARDS + 3
    before, after = result(0, number), result(1, number)
    for i in (7, 8):
        after.rewards[i] = [-3.0 - i]
    for one in (before, after):
        one.prompts = [f"prompt {i}" for i in range(number)]
    seen = write(before, after)
    prompts = [text for text in seen.texts if text.startswith("prompt ")]
    assert prompts[:6] == [f"prompt {number - i}" for i in (number - 8, number - 7, 1, 2, 3, 4)]
    assert prompts[-1] == "prompt 3" and seen.count("article") == FIRST + CARDS
    assert "3 that changed less" in seen.text


def test_large_images_are_shrunk(write):
    seen = write(result(0, prompts=1, side=1024), result(1, prompts=1, side=1024))
    assert seen.count("img") == 3 and 100_000 < len(seen.text) < 3 * 250_000


def test_an_interrupted_run_has_a_page(write):
    "With the numbers of the newest evaluation, or with those from before alone."
    history = [result(0), result(1, step=8)]
    seen = write(history[0], None, history=history, lines=lines_of(9), facts={"model": NASTY})
    assert "interrupted" in seen.text and "after step 8" in seen.text and NASTY in seen.texts
    assert seen.count("input") == 0 and "0.500 → 0.988" in seen.text and seen.count("table") == 1
    seen = write(history[0], None, history=history[:1])
    assert "interrupted" in seen.text and seen.count("table") == 0
    assert seen.count("img") == 2 * 40  # each with its source


def test_the_agreement_card(write):
    seen = write(result(0), result(1), agreement=GOOD)
    assert GOOD._repr_html_() in seen.text and "disagree" not in seen.text
    assert "<pre>" not in write(result(0), result(1)).text  # no agreement, no card
    seen = write(result(0), result(1), agreement=BAD)
    assert "Sampling and scoring disagree" in seen.texts and BAD.problem() in seen.texts


def test_values_that_are_missing(write):
    values = {"<b>": [[None]] * 39 + [[0.5]]}
    texts = " ".join(write(result(0, values=values), result(1, values=values)).texts)
    assert texts.count("<b> 0.5 → 0.5") == 1 and "<b> –" not in texts and " nan" not in texts


def lines_of(steps):
    "metrics.jsonl of both policies; one KL is missing, one is not finite."
    made = []
    for step in range(1, steps + 1):
        line = {"step": step, "reward_mean": step / 10, "ar/kl": 0.1 * step, "dit/kl": 0.2}
        made.append(line | {2: {"ar/kl": None}, 3: {"ar/kl": math.nan}}.get(step, {}))
    return made


@pytest.mark.parametrize("steps, evaluations, curves", [(1, 2, 0), (5, 2, 1), (5, 3, 2)])
def test_the_curves_of_the_steps_and_of_the_evaluations(write, steps, evaluations, curves):
    history = [result(shift / 2, step=shift) for shift in range(evaluations)]
    seen = write(history[0], history[-1], lines=lines_of(steps), history=history)
    assert sum(at.get("class") == "curve" for _, at in seen.tags) == curves


def test_a_run_writes_its_steps_and_its_agreement_into_the_page(tmp_path):
    lines = [json.dumps(line) for line in lines_of(5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = SimpleNamespace(
        out=tmp_path,
        before=result(0, prompts=1),
        after=result(1, prompts=1),
        watch=PeriodicEvaluation(tmp_path / "eval_history.jsonl", None),
        trainer=SimpleNamespace(agreement=BAD),
        config=Config(),
    )
    write_results(run)
    seen = Reader(tmp_path / "page.html")
    assert "Sampling and scoring disagree" in seen.texts and "steps" in seen.texts
    assert "5 of 14, 0.0 minutes" in seen.texts and "data/tiny-glm-image" in seen.text
    assert 'href="microscope.html"' in seen.text and (tmp_path / "microscope.html").exists()
    run.after = None  # interrupted before another evaluation
    write_results(run)
    assert "interrupted" in Reader(tmp_path / "page.html").text


@pytest.mark.skipif(not CHROMIUM, reason="no chromium")
@pytest.mark.parametrize("allowed", [True, False])
def test_a_browser_runs_the_script_if_its_hash_is_in_the_policy(tmp_path, allowed):
    page = tmp_path / "page.html"
    write_page(page, result(0, prompts=1), result(1, prompts=1))
    if not allowed:
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace("script-src 'sha256-", "script-src 'sha256-0"))
    words = "--headless=new --no-sandbox --disable-gpu --dump-dom".split()
    words += [f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    found = subprocess.run([CHROMIUM, *words], capture_output=True, text=True, timeout=60)
    assert ('<html lang="en" class="js">' in found.stdout) is allowed


def test_only_a_reward_shares_its_row_with_its_metric():
    def names(*metrics):
        changes = [Change("reward", "reward", 0.4, 0.6, 0.1, 8, True)]
        return [change.name for change in merge_reward(changes + [*metrics])]

    scene = Change("metrics", "scene", 0.4, 0.6, 0.1, 8, True)
    share = Change("statistics", "dark_share", 0.4, 0.6, 0.1, 8, False)
    other = Change("metrics", "sign", 0.4, 0.5, 0.1, 8, True)
    assert names(scene, share) == ["reward = scene", "dark_share"]
    assert names(share, other) == ["reward", "dark_share", "sign"]
    assert names(scene, other) == ["reward", "scene", "sign"]  # the other part did not move it


def test_images_have_their_size_and_paper_shows_all(write):
    wide = Image.new("RGB", (800, 400))
    history = [result(step / 2, prompts=1, images=[[wide]], step=step) for step in range(3)]
    seen = write(history[0], history[-1], history=history, lines=lines_of(3))
    images = [attributes for tag, attributes in seen.tags if tag == "img"]
    assert len(images) == 3 + 2
    for attributes in images:
        assert "loading" not in attributes
        image = Image.open(io.BytesIO(base64.b64decode(attributes["src"].split(",")[1])))
        ratio = int(attributes["width"]) / int(attributes["height"])
        assert ratio == pytest.approx(image.width / image.height, rel=0.01)
    (paper,) = re.findall("@media print {\n(.*?)\n}", seen.text, re.DOTALL)
    assert ".wide { overflow: visible }" in paper and "details-content" in paper


def test_every_metric_has_a_line_of_legend(write):
    "Of the recorded runs of the recipes; `helpers.without_seconds` looks at those of the tests."
    lines = [
        line for file in (ROOT / "results").rglob("*metrics.jsonl") for line in read_jsonl(file)
    ]
    assert len(lines) > 100 and {legend_key(name) for line in lines for name in line} <= {*LEGEND}
    seen = write(
        result(0), result(1), lines=lines_of(2) + [{"step": 3, "reward_mean": 1, "mine": 2}]
    )
    assert [text for text in seen.texts if text in LEGEND] == ["step", "kl", "reward_mean"]
    assert LEGEND["kl"] in seen.texts and LEGEND["seconds"] not in seen.texts
