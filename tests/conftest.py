"""Options and fixtures of all tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread is faster here

import pytest
import torch
from helpers import GREEN, PROMPTS, ROOT, write_images


def pytest_addoption(parser):
    parser.addoption(
        "--kills", type=int, default=3, help="how often tests/test_kill.py kills a run"
    )


@pytest.fixture
def at_root(monkeypatch):
    "The programs' default paths, such as data/tiny-glm-image, are relative to the repository."
    monkeypatch.chdir(ROOT)


@pytest.fixture
def folder(tmp_path):
    "Prompts with target images, and a reward that can score any image."
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    (tmp_path / "green.py").write_text(GREEN)
    write_images(tmp_path / "target_images", [(40 * i, 90, 60) for i in range(len(PROMPTS))])
    return tmp_path


@pytest.fixture
def two_threads():
    """Sums that several threads add up in any order are no longer equal bit for bit: seen where
    rows shared a gathered tensor. The other tests run with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
