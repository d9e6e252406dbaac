"""LPIPS, and the program that made its weights."""

import hashlib
import io
import pickle
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from glm_grpo.rewards.perception import LPIPS

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "data/weights/lpips_alex.safetensors"
sys.path.append(str(ROOT / "tools"))
import convert_lpips  # noqa: E402


def test_the_committed_file_is_made_from_such_an_archive(tmp_path, monkeypatch):
    "The archive is not in the repository: here is one with our weights in its layout."
    kept, layout = LPIPS(WEIGHTS).weights, {"AlexNet_0": {}}
    for i in range(5):
        kernel = kept[f"trunk.{i}.weight"].numpy().transpose(2, 3, 1, 0).copy()
        bias = kept[f"trunk.{i}.bias"].numpy()
        layout["AlexNet_0"][f"Conv_{i}"] = {"kernel": kernel, "bias": bias}
        head = kept[f"head.{i}"].numpy().reshape(1, 1, -1, 1)
        layout[f"NetLinLayer_{i}"] = {"Conv_0": {"kernel": head}}
    checkpoint = pickle.dumps(layout, protocol=4)
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        entry = tarfile.TarInfo(convert_lpips.CHECKPOINT)
        entry.size = len(checkpoint)
        tar.addfile(entry, io.BytesIO(checkpoint))
    with pytest.raises(SystemExit, match="damaged or changed"):
        convert_lpips.convert(archive)
    checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(convert_lpips, "ARCHIVE", checksum)
    assert convert_lpips.convert(archive) == WEIGHTS.read_bytes()


class Evil:
    def __reduce__(self):
        return eval, ("1 + 1",)


def test_a_pickle_of_something_else_is_refused():
    with pytest.raises(SystemExit, match=r"builtins\.eval"):
        convert_lpips.ArraysOnly(io.BytesIO(pickle.dumps({"AlexNet_0": Evil()}))).load()


def test_smallest_image():
    reward = LPIPS(WEIGHTS)
    image = torch.rand(1, 3, 31, 31, generator=torch.Generator().manual_seed(0))
    assert reward(image, 1 - image) < 0 and reward(image, image).abs() < 1e-6
