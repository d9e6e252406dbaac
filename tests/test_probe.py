"`python -m glm_grpo.probe`: the tree it samples, what it says, and what it refuses."

import pytest
import torch
from helpers import PROMPTS, read_json, small, small_model, told

from glm_grpo.maths.noise import SampleNames
from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.run.probe import group_numbers, main, variance_parts

pytestmark = pytest.mark.usefixtures("at_root")


def probe(folder, *words, mode=None):
    words = ["--num_prompts", 2, "--output_dir", folder / "probe", *words]
    words = small(folder, *words, mode=mode)
    return main([str(word) for word in words])


def test_large_grids_of_a_preview_share_its_tokens_and_nothing_else_changes():
    model = GLMImageWrapper(small_model(), device="cpu", torch_dtype="float32")
    size = {"height": 64, "width": 64, "num_inference_steps": 1, "temperature": 3, "top_p": 1}
    shape = {"samples": 2 * 2, "images": 2}
    tree = SampleNames.grow(0, 0, PROMPTS[:1], **shape, grids_per_preview=2, own_noise=True)
    rollout = model.generate_with_tracking(PROMPTS[:1], names=tree, **size)
    preview = rollout.tokens.grids[0][0] * rollout.tokens.grids[0][1]
    previews = rollout.token_ids[:, :preview].view(2, 2, 2, preview)
    assert (previews == previews[:, :1, :1]).all() and not torch.equal(previews[0], previews[1])
    large = rollout.token_ids[:, preview:].view(2, 2, 2, -1)
    assert torch.equal(large[:, :, 0], large[:, :, 1])
    assert not torch.equal(large[:, 0], large[:, 1])
    flat = SampleNames.grow(0, 0, PROMPTS[:1], **shape)
    alone = model.generate_with_tracking(PROMPTS[:1], names=flat, **size)
    first = [row for row, sample in enumerate(flat.sample_of_image) if sample % 2 == 0]
    assert torch.equal(alone.token_ids[first], rollout.token_ids[first])
    noise = rollout.initial_latents
    assert len({tuple(row) for row in noise.flatten(1)[:, :8].tolist()}) == len(tree.images)


def test_a_reward_is_probed_as_it_would_be_trained(folder, capsys):
    assert probe(folder, mode="t2i") == 0
    said = capsys.readouterr().out
    assert "between previews" in said and "Train model.component" in said
    record = read_json(folder / "probe/probe.json")
    assert (folder / "probe/probe.png").stat().st_size > 5000
    rewards = torch.tensor(record["reward"]["rewards"])
    assert rewards.shape == (2, 4, 2, 2) and rewards.std() > 0
    assert record["reward"]["shares"]["previews"][0] == variance_parts(rewards)["previews"][0]


def test_a_prompt_that_is_repeated_is_probed_once(folder, capsys):
    (folder / "prompts.txt").write_text("\n".join([PROMPTS[0], PROMPTS[0], PROMPTS[1]]))
    assert probe(folder, "--num_prompts", 3, mode="t2i") == 0
    assert "reward, 2 prompts" in capsys.readouterr().out


def test_a_run_is_not_probed_as_if_it_were_untrained(folder, capsys):
    assert probe(folder, "--resume", "latest", "--output_dir", folder) == 2
    assert "--resume continues a training" in told(capsys)


def test_a_reward_without_differences_cannot_teach(folder, capsys):
    (folder / "green.py").write_text("def green(images):\n    return [0.5] * len(images)\n")
    assert probe(folder) == 0
    assert "little or nothing" in capsys.readouterr().out
    assert read_json(folder / "probe/probe.json")["reward"]["shares"]["images"] == [None, None]


GAPS = """\
def green(images, prompts):
    gone = prompts[0].startswith("{}")
    return [None if i == 0 and gone else i for i in range(len(images))]
"""


@pytest.mark.parametrize("gone, left_out", [("two", 1), ("", 3)])
def test_prompts_with_images_without_a_score_are_left_out(folder, capsys, gone, left_out):
    (folder / "green.py").write_text(GAPS.format(gone))
    status, said = probe(folder, "--num_prompts", 3), capsys.readouterr()
    assert f"reward: {left_out} prompts left out" in said.out
    if left_out < 3:
        assert status == 0 and "reward, 2 prompts: mean 7.5" in said.out
    else:
        assert status == 2 and "for all images of none of the prompts" in said.err


def test_previews_that_differ_by_rounding_are_equal():
    rewards = torch.full((1, 2, 2, 2), 20.0)
    rewards[0, 0, 0, 0] = 20.000002
    assert group_numbers(rewards)["equal_tokens"] == group_numbers(rewards)["equal_images"] == 1


def test_large_grids_of_an_edit_differ(folder):
    "It has no preview, so all grids are compared as such."
    assert probe(folder, "--previews", 2, "--grids", 2) == 0
    record = read_json(folder / "probe/probe.json")["reward"]
    rewards = torch.tensor(record["rewards"])
    assert rewards.shape == (2, 1, 4, 2) and rewards.mean(3).std(2).min() > 0
    assert record["shares"]["previews"][0] == 0


@pytest.mark.parametrize("words", [["--num_prompts", "1"], ["--previews", "many"]])
def test_a_wrong_number_is_refused(folder, capsys, words):
    assert probe(folder, *words) == 2
    assert words[0] in told(capsys) and not (folder / "probe").exists()
