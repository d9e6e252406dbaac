"""Evaluations: ranks share the prompts, and no process scores the tokens."""

import json
import subprocess
import sys

import pytest
from helpers import GREEN, PROMPTS, ROOT, evaluate_main, read_json, read_jsonl
from test_ranks import environment, free_port, on_two_ranks, succeeds

from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.run.evaluation import HeldOut, evaluate

HELD_OUT = [*PROMPTS, 'a sign "yes" on a red ground', PROMPTS[0]]  # one prompt comes twice
SIZE = {"height": 64, "width": 64, "num_inference_steps": 2, "temperature": 3.0, "top_p": 1.0}


def green(images):
    return images[:, 1].mean((1, 2)) - images[:, [0, 2]].mean((1, 2, 3))


@pytest.fixture(scope="module")
def model():
    return GLMImageWrapper(device="cpu", torch_dtype="float32")


def test_an_evaluation_scores_no_token(model, monkeypatch):
    "One forward pass over all prompts takes 0.43 GB per prompt at 1024 x 1024."
    scored = []
    monkeypatch.setattr(model, "compute_token_logprobs", lambda rollout, size: scored.append(size))
    found = evaluate(model, HeldOut(HELD_OUT), green, seeds=(0,), **SIZE)
    assert scored == [] and len(found["rewards"]) == len(HELD_OUT)
    rollout = model.generate_with_tracking(PROMPTS[:1], score=False, **SIZE)
    assert rollout.token_logprobs is None and "no" not in repr(rollout)


def evaluated(*words):
    "`python -m glm_grpo.evaluate` on two ranks -> what it says."
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2]
    command += ["--master_port", free_port(), "-m", "glm_grpo.evaluate", *words]
    command = [str(word) for word in command]
    options = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, cwd=ROOT, env=environment(), **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def numbers_of(result):
    return {name: value for name, value in result.items() if name != "seconds"}


def test_two_ranks_measure_what_one_process_measures(tmp_path, capsys):
    """Bit for bit. Images are denoised one by one, because on a CPU, too, the last bit of an image
    depends on how many are computed together."""
    (tmp_path / "prompts.txt").write_text("a cat\n")
    (tmp_path / "heldout.txt").write_text("\n".join(HELD_OUT) + "\n")
    (tmp_path / "green.py").write_text(GREEN)
    words = ["--data.prompts_file", tmp_path / "prompts.txt", "--data.image_size", 64]
    words += ["--data.eval_prompts_file", tmp_path / "heldout.txt"]
    words += ["--rollout.num_inference_steps", 2, "--rollout.temperature", 3, "--rollout.top_p", 1]
    words += ["--reward.functions", f"{tmp_path}/green.py:green", "--model.device", "cpu"]
    words += ["--training.eval_samples", 2, "--rollout.batch_size", 1]
    assert evaluate_main(*words, "--output_dir", tmp_path / "one") == 0
    said = evaluated(*words, "--output_dir", tmp_path / "two")
    assert said.count("written:") == 1
    one, two = (read_json(tmp_path / name / "eval.json")["before"] for name in ("one", "two"))
    assert len({json.dumps(row) for row in one["rewards"]}) == len(HELD_OUT)  # noise differs
    assert numbers_of(two) == numbers_of(one)
    assert one["pictures"] == 2 * len(HELD_OUT)
    pictures = [(tmp_path / name / "before_after.png").read_bytes() for name in ("one", "two")]
    assert pictures[0] == pictures[1]


def test_a_run_on_two_ranks_evaluates_together(tmp_path):
    "Before, in between and after: each prompt once, and only the first rank writes."
    judged = tmp_path / "judged.txt"  # one write per call: two processes append to it
    note = f"    with open({str(judged)!r}, 'a') as out:\n        out.write(f'{{len(images)}}\\n')\n"
    counting = GREEN.replace("    return", note + "    return")
    (tmp_path / "green.py").write_text(counting)
    (tmp_path / "heldout.txt").write_text("\n".join(HELD_OUT) + "\n")
    words = ["--training.eval_samples", 1, "--training.eval_interval", 1, "--num_steps", 2]
    words += ["--data.eval_prompts_file", tmp_path / "heldout.txt"]
    said = succeeds(*on_two_ranks(tmp_path, *words))
    assert said.count("measuring 5 held-out prompts") == 2
    run = tmp_path / "run"
    history = read_jsonl(run / "eval_history.jsonl")
    assert [line["step"] for line in history] == [0, 1, 2]
    assert all(len(line["rewards"]) == len(HELD_OUT) for line in history)
    counts = [int(line) for line in judged.read_text().splitlines()]
    assert sum(counts) >= 3 * len(HELD_OUT)
    assert max(counts) < len(HELD_OUT), "one rank judged all prompts"
