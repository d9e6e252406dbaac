"""Several processes on a CPU (gloo): the gradients and evaluations of one, one line of metrics, one
writer, and an error of one rank ends all."""

import json
import os
import shutil
import time
from unittest import mock

import pytest
import torch
from PIL import Image
from helpers import GREEN, PROMPTS, evaluate_main, main, read_json, read_jsonl, resume, small
from helpers import small_model, step_of, steps, without_seconds, write_images
from programs.train_on_ranks import Work, run
from ranks import as_program, on_ranks, torchrun

from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.run.evaluation import evaluate
from glm_grpo.training.trainer import MinimalGRPOTrainer

pytestmark = pytest.mark.usefixtures("at_root")
FOUR_PROMPTS = [*PROMPTS, "a red ball on a white ground"]
# one comes twice
HELD_OUT = [*PROMPTS, 'a sign "yes" on a red ground', PROMPTS[0]]


def succeed(results):
    "What all ranks printed."
    assert [status for status, _ in results] == [0] * len(results), results
    return "".join(printed for _, printed in results)


def train_on(world, work):
    "What all ranks sampled, and the gradients on which they agree."
    if world == 1:
        assert run(work) == 0
    else:
        succeed(on_ranks(world, work.out, run, work))
    found = []
    for rank in range(world):
        found.append(torch.load(f"{work.out}/{world}_{rank}.pt", weights_only=True))
    first = found[0]
    for other in found[1:]:
        for a, b in zip(other["gradients"], first["gradients"]):
            assert torch.equal(a, b), "ranks drift apart"
    tokens = torch.cat([rank["tokens"] for rank in found])
    prompts = [prompt for rank in found for prompt in rank["prompts"]]
    return first | {"tokens": tokens, "prompts": prompts}


def different_samples(run, prompt):
    "How many different rows of tokens were sampled for a prompt."
    rows = zip(run["tokens"].tolist(), run["prompts"])
    return len({tuple(row) for row, own in rows if own == prompt})


SAME_METRICS = (
    "loss",
    "reward_mean",
    "reward_std",
    "advantage_mean",
    "equal_groups",
    "grad_norm",
    "ratio_mean",
    "entropy",
)


def check_same_metrics(a, b):
    for name in SAME_METRICS:
        assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name
    assert max(a["old_new_gap"], b["old_new_gap"]) < 1e-4
    assert a["tokens_outside"] == b["tokens_outside"] == 0


@pytest.mark.parametrize(
    "component, mini_batches, twice, full, matching, world",
    [
        ("ar", 3, True, False, False, 4),
        ("dit", 1, True, False, True, 2),
        ("ar", 3, True, True, False, 2),
        ("dit", 1, False, True, False, 2),
    ],
)
def test_ranks_give_the_gradients_of_one_process(
    tmp_path, component, mini_batches, twice, full, matching, world
):
    """Also where a mini-batch has no sample of some rank (3 of 8 samples on 4 ranks), and where a
    prompt comes twice in a step. `full`: all weights, spread over the ranks (FSDP2); quoted words
    make the DiT's calls more on one rank than on the other."""
    last = PROMPTS[0] if twice else 'a sign "yes" on a red ground'
    how = {"mini_batches": mini_batches, "full": full, "matching": matching}
    if component == "dit":  # what is faster and shows the same
        how["model"] = small_model()
    elif full:
        how["sources"] = True  # an edit has no preview
    else:
        how["steps"] = 1
    scale = "batch" if component == "ar" else "group"
    work = Work([*PROMPTS, last], str(tmp_path), component, scale, **how)
    one, many = train_on(1, work), train_on(world, work)
    if twice:
        wanted = 4 if component == "ar" else 2
        assert different_samples(one, PROMPTS[0]) == wanted, "the same noise twice"
    assert many["prompts"] == one["prompts"]
    assert torch.equal(many["tokens"], one["tokens"])
    assert len(one["gradients"]) == len(many["gradients"]) == work.steps * mini_batches
    for a, b in zip(one["gradients"], many["gradients"]):
        assert a.norm() > 0 and (a - b).norm() < 1e-5 * a.norm()
    for a, b in zip(one["lines"], many["lines"]):
        check_same_metrics(a, b)


def test_a_rank_that_fails_ends_all_with_its_reason(tmp_path):
    work = Work(FOUR_PROMPTS, str(tmp_path), fails=1, sources=True, model=small_model())
    (status, said), (failed_status, failed_said) = on_ranks(2, tmp_path, run, work, seconds=120)
    assert "rank 0 told: rank 1 failed" in said and "the paint is dry" in said and status == 2
    assert failed_status != 0 and "the paint is dry" in failed_said


def options_of(folder, *words):
    "Options of a small run for two ranks."
    (folder / "prompts.txt").write_text("\n".join(FOUR_PROMPTS) + "\n")
    write_images(folder / "source_images", ["red", "green", "blue", "grey"])
    if not (folder / "green.py").exists():
        (folder / "green.py").write_text(GREEN)
    options = ["--training.batch_size", 2, "--rollout.num_inference_steps", 2]
    options += ["--model.device", "cpu", "--training.save_interval", 1, "--num_steps", 2]
    return small(folder, *options, "--output_dir", folder / "run", *words)


def weights(checkpoint):
    paths = checkpoint.rglob("*.safetensors")
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in paths}


ADAPTERS = ["--training.ema_decay", 0.5]
ALL_WEIGHTS = ["--model.lora", "false", "--model.torch_dtype", "bfloat16"]
ALL_WEIGHTS += ["--training.shard", "true", "--training.learning_rate", 1e-4]


def check_files(final, checkpoints, full):
    "What a last checkpoint consists of."
    if full:
        configs = "".join(p.read_text() for p in checkpoints.rglob("config.json"))
        assert len(final) == 2 and "state/masters.safetensors" in final and "FSDP" not in configs
        return
    assert len(final) == 4
    for half in ("ar", "dit"):
        name = f"{half}/adapter_model.safetensors"
        assert final[f"ema/{name}"] != final[name]


@pytest.mark.parametrize("full", [False, True])
def test_a_run_on_two_ranks_writes_once_and_goes_on_bit_for_bit(tmp_path, full):
    """1 of 2 steps, resume, 1 step == 2 steps, two mini-batches; adapters of both halves with
    averages and two passes, or all weights of the AR in bfloat16, spread over the ranks with their
    float32 copies. All weights of both: tests/second_device/rank_cases.py."""
    run = tmp_path / "run"
    words = ["--training.mini_batches", 2, "--model.component", "ar" if full else "both"]
    words += ALL_WEIGHTS if full else [*ADAPTERS, "--training.updates_per_rollout", 2]
    said = succeed(on_ranks(2, tmp_path, main, *options_of(tmp_path, *words)))
    assert said.count("loading") == 1 and said.count("on 2 ranks") == 1
    straight, checkpoints = without_seconds(run), run / "checkpoints"
    assert steps(run) == [1, 2]
    final = weights(checkpoints / "checkpoint_final")
    check_files(final, checkpoints, full)
    for name in ("checkpoint_final", "checkpoint_step_2"):
        shutil.rmtree(checkpoints / name)
    succeed(on_ranks(2, tmp_path, resume, "latest", "--output_dir", run))
    assert without_seconds(run) == straight
    assert weights(checkpoints / "checkpoint_final") == final


def out_of_memory_alone(words):
    "Rank 1 fails alone, in work that rank 0 waits for, and where leaving the group waits, too."
    torch.distributed.destroy_process_group = lambda group=None: time.sleep(3600)
    if os.environ["RANK"] == "1":
        MinimalGRPOTrainer.learn = mock.Mock(side_effect=torch.OutOfMemoryError("planted"))
    as_program("glm_grpo.train", *words)


def test_a_rank_that_fails_alone_says_so_and_ends(tmp_path):
    "Then its launcher ends the others: the next test."
    words = options_of(tmp_path)
    _, (status, said) = on_ranks(2, tmp_path, out_of_memory_alone, words, grace=1)
    assert status == 2 and "error: Out of memory. Lower training.micro_batch_size" in said


KILLED = """\
import os, pathlib, signal
calls, once = [], pathlib.Path(__file__).with_name("killed")
def green(images):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 4 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return images[:, 1].mean((1, 2))
"""


def test_a_rank_that_is_killed_ends_the_others_and_the_same_command_goes_on(tmp_path):
    """kill -9, in the second step: the launcher ends the rest, and the checkpoint of the first step
    is whole. The command of a job that comes back into the queue is the same."""
    (tmp_path / "green.py").write_text(KILLED)
    words = options_of(tmp_path, "--num_steps", 3, "--resume", "auto")
    begun = time.monotonic()
    done = torchrun("-m", "glm_grpo.train", *words)
    assert done.returncode != 0 and time.monotonic() - begun < 200
    assert "Signal 9 (SIGKILL)" in done.stderr, done.stderr[-3000:]
    assert "it was killed from outside" in done.stderr and "a bug in" not in done.stderr
    run = tmp_path / "run"
    kept = [path for path in (run / "checkpoints").iterdir() if path.name.startswith("checkpoint_")]
    assert kept
    for checkpoint in kept:
        assert step_of(checkpoint) == 1 and weights(checkpoint)
    said = succeed(on_ranks(2, tmp_path, main, *words))  # as a launcher starts it
    assert steps(run) == [1, 2, 3] and said.count("--resume auto: going on from") == 1


@pytest.mark.parametrize("mistake", [["--stepz", 3], ["--training.batch_size", 3]])
def test_a_mistake_is_told_by_the_first_rank_alone(tmp_path, mistake):
    """Before and after the ranks have found each other. The second one waits before it speaks, and
    a launcher ends it meanwhile."""
    words = options_of(tmp_path, "--dry_run", *mistake)
    (status, told), (_, silent) = on_ranks(2, tmp_path, main, *words, grace=1)
    assert status == 2 and told.count("error: ") == 1
    assert "error" not in silent and "     data  " not in silent


def test_an_evaluation_scores_no_token(monkeypatch):
    "One forward pass over all prompts takes 0.43 GB per prompt at 1024 x 1024."
    model, scored = GLMImageWrapper(small_model(), device="cpu", torch_dtype="float32"), []
    monkeypatch.setattr(model, "compute_token_logprobs", lambda rollout, size: scored.append(size))
    size = {"height": 64, "width": 64, "num_inference_steps": 2, "temperature": 3, "top_p": 1}
    source = [Image.new("RGB", (64, 64), "olive")]
    items = [{"prompt": prompt, "target": None, "source": source} for prompt in PROMPTS]
    found = evaluate(model, items, lambda images: images.mean((1, 2, 3)), **size)
    assert scored == [] and len(found.rewards) == len(PROMPTS)
    rollout = model.generate_with_tracking(PROMPTS[:1], [source], score=False, **size)
    assert rollout.token_logprobs is None and "no" not in repr(rollout)


def write_held_out(folder):
    "Edits: those of the same prompt have the same source."
    rows = []
    for prompt in HELD_OUT:
        source = f"source_images/{HELD_OUT.index(prompt)}.png"
        rows.append(json.dumps({"prompt": prompt, "source": source}))
    (folder / "heldout.jsonl").write_text("\n".join(rows) + "\n")
    return ["--data.eval_prompts_file", folder / "heldout.jsonl"]


def numbers_of(result):
    return {name: value for name, value in result.items() if name != "seconds"}


def test_two_ranks_measure_what_one_process_measures(tmp_path):
    """Bit for bit. Images are denoised one by one, because the last bit of an image depends on
    how many are computed together, on a CPU as well."""
    words = options_of(tmp_path, *write_held_out(tmp_path), "--training.eval_samples", 2)
    words += ["--rollout.batch_size", 1]
    assert evaluate_main(*words, "--output_dir", tmp_path / "one") == 0
    said = succeed(on_ranks(2, tmp_path, evaluate_main, *words, "--output_dir", tmp_path / "two"))
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
    note = (
        f"    with open({str(judged)!r}, 'a') as out:\n        out.write(f'{{len(images)}}\\n')\n"
    )
    counting = GREEN.replace("    return", note + "    return")
    (tmp_path / "green.py").write_text(counting)
    words = ["--training.eval_samples", 1, "--training.eval_interval", 1, "--num_steps", 2]
    words = options_of(tmp_path, *words, *write_held_out(tmp_path))
    said = succeed(on_ranks(2, tmp_path, main, *words))
    assert said.count("measuring 1 images of each prompt") == 2
    run = tmp_path / "run"
    history = read_jsonl(run / "eval_history.jsonl")
    assert [line["step"] for line in history] == [0, 1, 2]
    assert all(len(line["rewards"]) == len(HELD_OUT) for line in history)
    counts = [int(line) for line in judged.read_text().splitlines()]
    assert sum(counts) >= 3 * len(HELD_OUT)
    assert max(counts) < len(HELD_OUT), "one rank judged all prompts"
