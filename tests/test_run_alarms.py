"""When the alarm is silent and when it rings: cases beyond those of nbs/6_run/03_alarms."""

from dataclasses import replace

import numpy as np
import pytest

from glm_grpo.run.alarms import Evaluation, compare_evaluations, reward_hacking_alarm


def column(values):
    "[P] -> [P][1]: one seed per prompt."
    return [[value] for value in values]


BEFORE = np.array([0.1, 0.4, 0.6, 0.9])
FIRST = Evaluation(
    rewards=column(BEFORE),
    metrics={"scene": 0.9},
    values={"scene": column([1, 1, 1, 0.6])},
)
LATER = replace(
    FIRST,
    step=10,
    rewards=column([0.2, 0.6, 0.7, 1.0]),
    values={"scene": column([0.5, 0.4, 0.5, 0.1])},
)


def with_scene(evaluation, *values):
    return replace(evaluation, values={"scene": column(values)})


def means(step, brightness=0.4, diversity=0.2):
    "An evaluation of one prompt; the reward rises with the step."
    values = {"brightness": [[brightness]], "diversity": [[diversity]]}
    statistics = {"brightness": brightness}
    return Evaluation(step=step, rewards=[[step / 10]], statistics=statistics, values=values)


def warnings_after(*later):
    return reward_hacking_alarm([means(0), *later])


def test_a_fall_that_is_the_same_on_every_prompt_warns():
    before = with_scene(FIRST, 0.9, 0.5, 0.8, 0.7)
    after = with_scene(LATER, 0.6, 0.2, 0.5, 0.4)  # the differences are not equal in floating point
    (warning,) = reward_hacking_alarm([before, after])
    (scene,) = [c for c in compare_evaluations(before, after) if c.name == "scene"]
    assert "Give scene a weight in reward.metrics" in warning and scene.error == 0


def test_what_has_no_weight_is_not_offered_one():
    "Statistics and diversity: no metric is named after them."
    for change in ({"brightness": 0.1}, {"diversity": 0.01}):
        (warning,) = warnings_after(means(5, **change), means(10, **change))
        assert [*change][0] in warning and "reward.metrics" not in warning
        assert "Lower training.learning_rate, raise reward.grpo.beta" in warning


def test_silent_unless_the_reward_rose_by_more_than_its_error():
    slightly_up = column(BEFORE + np.array([0.3, -0.2, 0.1, -0.1]))
    assert reward_hacking_alarm([FIRST, replace(LATER, rewards=FIRST.rewards)]) == []
    assert reward_hacking_alarm([FIRST, replace(LATER, rewards=slightly_up)]) == []


@pytest.mark.parametrize(
    "name, count", [("other", 1), ("jpeg_incompressibility", 0), ("jpeg_compressibility", 0)]
)
def test_the_size_of_a_file_never_warns(name, count):
    run = [
        replace(FIRST, metrics={name: 9}, values={name: [[9]] * 4}),
        replace(LATER, metrics={name: 1}, values={name: [[1]] * 4}),
    ]
    assert len(reward_hacking_alarm(run)) == count


def test_a_metric_may_start_at_zero_or_below():
    from_zero = [
        with_scene(FIRST, 0.1, -0.1, 0.1, -0.1),
        with_scene(LATER, -0.9, -1.2, -0.8, -1.1),
    ]
    one_percent = [
        with_scene(FIRST, -1, -1.2, -0.8, -1),
        with_scene(LATER, -1.010, -1.211, -0.809, -1.010),
    ]
    assert len(reward_hacking_alarm(from_zero)) == 1
    assert reward_hacking_alarm(one_percent) == []


def test_statistics_warn_both_ways_diversity_only_down():
    for moved in ({"brightness": 0.6}, {"brightness": 0.2}, {"diversity": 0.1}):
        assert len(warnings_after(means(1, **moved), means(2, **moved))) == 1
    assert warnings_after(means(1, diversity=0.4), means(2, diversity=0.4)) == []
    from_zero = [means(0, brightness=0.0), means(1, brightness=0.1)]
    assert reward_hacking_alarm(from_zero) == []


def test_twice_in_a_row_and_in_the_same_direction():
    assert len(warnings_after(means(1, brightness=0.6))) == 1  # no evaluation between
    assert warnings_after(means(1), means(2, brightness=0.6)) == []
    assert warnings_after(means(1, brightness=0.2), means(2, brightness=0.6)) == []


def test_the_advice_names_the_last_step_before_anything_was_gone():
    dark = [means(2, brightness=0.2)]
    dark += [means(step, brightness=0.2, diversity=0.1) for step in (3, 4)]
    warnings = warnings_after(means(1), *dark)
    assert len(warnings) == 2 and all("stop at step 1," in warning for warning in warnings)
    from_the_start = warnings_after(means(1, brightness=0.2), means(2, brightness=0.2))
    assert "and start again" in from_the_start[0] and "since step 1)" in from_the_start[0]


def test_a_file_that_repeats_its_prompts_warns_like_one_that_does_not():
    "A fall on one prompt of four may be noise; on four of sixteen it would be none."
    noisy = with_scene(LATER, 0.1, 1, 0.9, 0.6)

    def four_times(one, **changes):
        values = {"scene": one.values["scene"] * 4}
        return replace(one, rewards=one.rewards * 4, values=values, **changes)

    requests = [*range(4)] * 4
    assert reward_hacking_alarm([FIRST, noisy]) == []
    run = [four_times(FIRST), four_times(noisy, requests=requests)]  # the first is older
    assert reward_hacking_alarm(run) == []
    assert len(reward_hacking_alarm([run[0], four_times(noisy)])) == 1
    once, often = (compare_evaluations(*pair)[1] for pair in ([FIRST, noisy], run))
    assert np.isclose(once.error, often.error) and once.prompts == often.prompts == 4
