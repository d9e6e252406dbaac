"""GenEval with a detector and a CLIP of random weights."""

import pytest
import torch
from small_models import save_clip, save_detector

from glm_grpo.data.basics import refusal
from glm_grpo.rewards.geneval import CLASSES, GenEval, GenEvalCorrect

IMAGES = torch.rand(3, 3, 96, 128, generator=torch.Generator().manual_seed(0))
METADATA = [
    {"include": [{"class": "cat", "count": 1}]},
    {"include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1}]},
    {"tag": "colors", "include": [{"class": "car", "count": 1, "color": "yellow"}]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("geneval")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_detector(folder)
        save_clip(folder / "clip")
    return folder


def test_a_detector_that_is_sure_of_nothing(folder):
    judge = GenEval(folder, device="cpu")
    assert judge.detect(IMAGES[:2]) == [[], []]
    assert judge(IMAGES, METADATA).tolist() == [0, 0, 0]


def test_a_detector_that_sees_cats_only(folder):
    judge = GenEval(folder, device="cpu", batch_size=2)
    judge.detector.class_predictor.bias.data[CLASSES.index("cat")] = 20
    found, _ = judge.detect(IMAGES[:2])
    assert found and {one.name for one in found} == {"cat"}
    for one in found:
        left, top, right, bottom = one.box
        assert one.mask.shape == (96, 128)
        assert one.mask.sum() == one.mask[top:bottom, left:right].sum()
        assert one.mask[top].any() and one.mask[bottom - 1].any() and one.mask[:, left].any()
    rewards = judge(IMAGES, METADATA)
    assert rewards.shape == (3,) and rewards[0] == 2 - len(found)
    correct = GenEvalCorrect(folder, device="cpu")
    correct.detector = judge.detector
    assert correct(IMAGES, METADATA).tolist() == [1, 0, 0]


def test_rows_of_tables_and_of_other_tasks(folder):
    "Absent keys come back as None; where there is nothing of GenEval's, there is no score."
    judge, correct = (kind(folder, device="cpu") for kind in (GenEval, GenEvalCorrect))
    judge.detector.class_predictor.bias.data[CLASSES.index("cat")] = 20
    correct.detector = judge.detector
    none = {"color": None, "position": None}
    rows = []
    for record in METADATA:
        include = [none | clause for clause in record["include"]]
        rows.append({"tag": None, "exclude": None} | record | {"include": include})
    others = [{}, None, {"tag": None, "include": None, "exclude": []}, {"texts": ["OPEN"]}]
    for reward in (judge, correct):
        assert torch.equal(reward(IMAGES, rows), reward(IMAGES, METADATA))
        mixed = reward(IMAGES[[0, 1, 0, 2]], [rows[0], others[0], others[2], rows[2]])
        assert mixed[[0, 3]].tolist() == reward(IMAGES[[0, 2]], METADATA[::2]).tolist()
        assert mixed[1:3].isnan().all()
        assert reward(IMAGES[[0, 1, 2, 0]], others).isnan().all()


def test_without_a_clip(folder):
    (folder / "clip").rename(folder / "elsewhere")
    assert str(folder / "clip") in refusal(GenEval, folder, device="cpu")
