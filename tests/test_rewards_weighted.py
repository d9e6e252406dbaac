"Rewards side by side: threads, time limits, and how they end."

import gc
import subprocess
import sys
import threading
import time

import pytest
import torch

from glm_grpo.rewards.calling import RewardError
from glm_grpo.rewards.weighted import WeightedReward

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


def test_the_same_threads_serve_every_call_and_end_with_their_team():
    team = team_of(server=slow(0), letters=slow(0))
    for _ in range(3):
        team(IMAGES, PROMPTS)
        assert thread_names().count("reward letters") == 1
        assert thread_names().count("reward server") == 1
    del team
    gc.collect()
    time.sleep(0.5)
    assert "reward letters" not in thread_names()


def test_an_error_is_raised_at_once():
    begin = time.monotonic()
    with pytest.raises(RewardError, match="reward broken raised ZeroDivisionError"):
        team_of(10, broken=lambda images: 1 / 0, server=slow(5))(IMAGES, PROMPTS)
    assert time.monotonic() - begin < 4


def test_the_time_limit_is_for_all_parts_together():
    with pytest.raises(RewardError, match="The reward server has not answered"):
        team_of(0.6, letters=slow(0.4), server=slow(0.9))(IMAGES, PROMPTS)


def test_a_keyboard_interrupt_is_raised_in_the_thread_that_asked():
    def interrupted(images):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        team_of(5, interrupted=interrupted)(IMAGES, PROMPTS)


@pytest.mark.parametrize(
    "work, end",  # in the thread of a part, for longer than the program lives
    [
        ("torch.linalg.svd(torch.rand(4000, 4000))", "sys.exit(2)"),  # minutes; a script
        ("while True: (images * 2).mean((1, 2, 3))", "leave(2)"),  # our programs
    ],
)
def test_a_program_ends_while_a_part_computes(work, end):
    "PyTorch's code in a thread aborts a process whose Python is shut down (status 134)."
    program = f"""if True:
        import sys, time, torch
        from glm_grpo.rewards.calling import RewardError
        from glm_grpo.rewards.weighted import WeightedReward
        from glm_grpo.training.interrupts import leave

        def computes(images):
            {work}

        def breaks(images):
            time.sleep(0.3)
            raise ValueError("out of order")

        parts = {{"heavy": computes, "broken": breaks}}
        reward = WeightedReward(parts, {{"heavy": 1, "broken": 1}})
        try:
            reward.measure(torch.zeros(1, 3, 2, 2), ["one"])
        except RewardError as error:
            print(error)
        {end}
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "", (done.returncode, done.stderr)
    assert "broken raised ValueError: out of order" in done.stdout
