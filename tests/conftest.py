"""Options and fixtures of all tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread is faster here
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a second one does not wait in a loop

import shutil
from pathlib import Path

import pytest
import torch
from helpers import ROOT, make_folder, small_model


def pytest_addoption(parser):
    parser.addoption(
        "--kills", type=int, default=3, help="how often tests/test_kill.py kills a run"
    )


LONG = """second_device ranks machines cli model matching first_minutes faults options_act kill
packaging probe signals tiny""".split()


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist would put files with few tests last


def pytest_collection_modifyitems(items):
    "Files that take long come first, so that all workers end at about the same time."
    place = {f"test_{name}": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_sessionfinish():
    if small_model.cache_info().currsize:
        shutil.rmtree(Path(small_model()).parent)


@pytest.fixture
def at_root(monkeypatch):
    "The programs' default paths, such as data/tiny-glm-image, are relative to the repository."
    monkeypatch.chdir(ROOT)


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


@pytest.fixture
def two_threads():
    """Sums that several threads add up in any order are no longer equal bit for bit: seen where
    rows shared a gathered tensor. The other tests run with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
