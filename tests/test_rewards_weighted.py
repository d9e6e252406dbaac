"Rewards side by side: threads, time limits, and how they end."

import gc
import subprocess
import sys
import threading
import time

import pytest
import torch

from glm_grpo.rewards.calling import RewardError
from glm_grpo.rewards.weighted import Judging, WeightedReward

IMAGES = torch.cat([torch.ones(1, 3, 2, 2), torch.zeros(1, 3, 2, 2)])
PROMPTS = ["one", "two"]


def slow(seconds):
    def reward(images):
        time.sleep(seconds)
        return images.mean((1, 2, 3))

    return reward


def team_of(time_limit=None, **parts):
    return WeightedReward(parts, dict.fromkeys(parts, 1.0), time_limit)


def thread_names():
    return [thread.name for thread in threading.enumerate()]


def test_the_same_threads_serve_every_call():
    team = team_of(server=slow(0), letters=slow(0))
    for _ in range(3):
        team(IMAGES, PROMPTS)
        assert thread_names().count("reward letters") == 1
        assert thread_names().count("reward server") == 1


def test_a_thread_ends_with_its_team():
    team = team_of(short=slow(0))
    team(IMAGES, PROMPTS)
    assert "reward short" in thread_names()
    del team
    gc.collect()
    assert "reward short" not in thread_names()


def test_a_part_that_hangs_is_named_with_its_image():
    begin = time.monotonic()
    with pytest.raises(RewardError, match="has not answered within 0.3 s") as caught:
        team_of(0.3, scene=slow(0), server=slow(5))(IMAGES, PROMPTS)
    assert time.monotonic() - begin < 4
    assert caught.value.reward == "server" and caught.value.prompt == "one"
    assert torch.equal(caught.value.image, IMAGES[0])


def test_an_error_is_raised_at_once():
    begin = time.monotonic()
    with pytest.raises(RewardError, match="ZeroDivisionError") as caught:
        team_of(10, broken=lambda images: 1 / 0, server=slow(5))(IMAGES, PROMPTS)
    assert caught.value.reward == "broken" and time.monotonic() - begin < 4


def test_the_time_limit_is_for_all_parts_together():
    with pytest.raises(RewardError, match="The reward server has not answered"):
        team_of(2.0, letters=slow(1.5), server=slow(3.2))(IMAGES, PROMPTS)


def test_a_keyboard_interrupt_is_raised_in_the_thread_that_asked():
    def interrupted(images):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        team_of(5, interrupted=interrupted)(IMAGES, PROMPTS)


def test_a_part_that_changes_torch_is_refused():
    def double(images):
        torch.set_default_dtype(torch.float64)
        return images.mean((1, 2, 3))

    with pytest.raises(RewardError, match="beside it.*set_default_dtype"):
        team_of(5, double=double, quick=slow(0))(IMAGES, PROMPTS)
    assert torch.get_default_dtype() == torch.float32


def test_the_error_of_a_silent_image_keeps_it():
    parts = {"text": lambda images: torch.tensor([1.0, float("nan")])}
    with pytest.raises(RewardError, match="has nothing to score in image 1") as caught:
        WeightedReward(parts, {"text": 1.0}).score(IMAGES, ["one", "two"])
    assert caught.value.reward == "text" and caught.value.prompt == "two"
    assert torch.equal(caught.value.image, IMAGES[1])


@pytest.mark.parametrize("device, early", [("cpu", True), ("cuda:0", False), ("mps", False)])
def test_only_parts_on_the_cpu_are_asked_early(device, early):
    sizes = []

    def part(images):
        sizes.append(len(images))
        return images.mean((1, 2, 3))

    part.device = torch.device(device)
    judging = Judging(WeightedReward({"part": part}, {"part": 1.0}), ["one", "two"])
    judging.add([1], IMAGES[1:])
    judging.add([0], IMAGES[:1])
    assert judging.finish(IMAGES).rewards.tolist() == [1, 0]
    assert sizes == ([1, 1] if early else [2])


def test_add_raises_what_an_earlier_batch_raised():
    def afraid(images):
        raise ValueError("no server")

    reward = WeightedReward({"afraid": afraid}, {"afraid": 1.0})
    judging = Judging(reward, ["one", "two"])
    judging.add([0], IMAGES[:1])
    judging.batches[0][2]["afraid"].exception()  # wait until it has failed
    with pytest.raises(RewardError, match="no server"):
        judging.add([1], IMAGES[1:])


@pytest.mark.parametrize("rows", [[[0]], [[0, 1], [1]]])
def test_batches_must_be_all_images_once(rows):
    judging = Judging(WeightedReward({"part": slow(0)}, {"part": 1.0}), ["one", "two"])
    for batch in rows:
        judging.add(batch, IMAGES[batch])
    with pytest.raises(ValueError, match="rows were added in batches, but there are 2 images"):
        judging.finish(IMAGES)


def test_a_program_ends_while_a_part_still_works():
    "A thread that wakes up while Python shuts down must not abort the process."
    program = """if True:
        import time, torch
        from glm_grpo.rewards.calling import RewardError
        from glm_grpo.rewards.weighted import WeightedReward

        def slow(images):
            time.sleep(1.5)
            return torch.zeros(len(images))

        reward = WeightedReward({"slow": slow}, {"slow": 1.0}, time_limit=0.1)
        try:
            reward.score(torch.zeros(1, 3, 2, 2), ["one"])
        except RewardError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "has not answered within 0.1 s" in done.stdout
