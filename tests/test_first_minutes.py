"""tools/first_minutes.py: the table on a CPU, and each check fails where its fault is."""

import math
import sys
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, coarse_compile, small_model
from ranks import on_ranks
from test_masked_rows import Kernel

from glm_grpo.data.rollout import Terms
from glm_grpo.model.policies import ARPolicy, DiTPolicy
from glm_grpo.model.wrapper import GLMImageWrapper
from glm_grpo.training.agreement import Agreement, Gap

CPU = torch.device("cpu")
sys.path.insert(0, str(ROOT / "tools"))
import first_minutes as tool  # noqa: E402


@pytest.fixture(autouse=True)
def less_work(monkeypatch):
    monkeypatch.setattr(tool, "MODEL", small_model())


def fail_alone(model, *words):
    "What the tool starts on each rank."
    tool.MODEL = model
    return tool.fail_alone(words)


def verdict(check, *arguments):
    return tool.judge(lambda: check(*arguments))[0]


def test_on_a_cpu_what_needs_a_gpu_is_skipped(tmp_path, monkeypatch, capsys):
    def launch(command, **options):
        "Two ranks, as the launcher starts them."
        assert command[1:3] == ["-m", "torch.distributed.run"] and command[-2] == "--fail-alone"
        found = on_ranks(2, tmp_path, fail_alone, small_model(), command[-1])
        status, printed = zip(*found)
        return SimpleNamespace(returncode=max(status), stderr="".join(printed))

    monkeypatch.setattr(tool.subprocess, "run", launch)
    monkeypatch.setattr(tool, "LENGTH", 192)  # 64 modulo 128 as well
    assert tool.main(["--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("torch ") and lines[-1] == "10 passed, 0 failed, 12 skipped"
    skipped = [line for line in lines if line.startswith("skipped")]
    assert all(line.endswith("needs a CUDA device") for line in skipped)
    assert any("eager against CUDA graph" in line for line in skipped)
    passed = "\n".join(line for line in lines if line.startswith("pass"))
    for name in ("default, padded", "math, no padding", "6: ar", "6: dit", "one fails", "peak"):
        assert name in passed


def test_a_failure_ends_with_status_1(monkeypatch, capsys):
    def fail():
        raise tool.Failed("three NaN")

    checks = {"good": str, "bad": fail, "broken": [].pop}
    monkeypatch.setattr(tool, "checks", lambda device: checks)
    assert tool.main(["--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "1 passed, 2 failed, 0 skipped" in printed
    assert "three NaN" in printed and "IndexError: pop from empty list" in printed


def test_nan_rows_are_reported_and_fail_only_in_the_projects_own_mask(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", Kernel())
    found = tool.check_kernel(CPU, "math", [54, 64])
    empty = 10 * 4 * 128  # padded rows, heads, channels
    assert "NaN: 0 in the output" in found and f"attend to nothing: {empty} and" in found
    own = tool.visibility
    monkeypatch.setattr(tool, "visibility", lambda inputs: tool.without_own_rows(own(inputs)))
    with pytest.raises(tool.Failed, match=f"NaN: {empty} in the output"):
        tool.check_kernel(CPU, "math", [54, 64])


def test_a_kernel_with_wrong_numbers_fails(monkeypatch):
    plain = F.scaled_dot_product_attention

    def without_the_mask(query, key, value, attn_mask=None, is_causal=False):
        wide = query.dtype == torch.float32
        return plain(query, key, value, attn_mask, is_causal=is_causal and wide)

    monkeypatch.setattr(F, "scaled_dot_product_attention", without_the_mask)
    with pytest.raises(tool.Failed, match="largest error"):
        tool.check_kernel(CPU, "math", [64, 64])


def test_another_ratio_fails(monkeypatch):
    def terms(policy, samples, *rest):
        return Terms(1.5 * policy.score(samples))

    for policy in (ARPolicy, DiTPolicy):
        monkeypatch.setattr(policy, "terms", terms)
    card = tool.measure_agreement.__wrapped__(CPU)
    gap = Gap(largest=math.nan, mean=math.nan, kl=math.nan, allowed=0.2)
    for found in (card, Agreement({"ar": gap, "dit": gap}, "bfloat16", 4)):
        monkeypatch.setattr(tool, "measure_agreement", lambda device, found=found: found)
        assert [verdict(tool.check_ratio, CPU, policy) for policy in ("ar", "dit")] == ["FAIL"] * 2


def test_another_temperature_in_scoring_fails(monkeypatch):
    def scored(model, inputs, index, ids, temperature, kept):
        return plain(model, inputs, index, ids, 1.2 * temperature, kept)

    plain = tool.score_tokens
    monkeypatch.setattr(tool, "score_tokens", scored)
    with pytest.raises(tool.Failed, match="largest gap"):
        tool.check_scoring(CPU, "float32")


class Nothing(tool.Eager):
    "A recording that repeats nothing."

    def record(self, step):
        return lambda: None


class Refuses(tool.Eager):
    def record(self, step):
        raise RuntimeError("operation not permitted when stream is capturing")


@torch.no_grad()
def test_a_wrong_recording_fails():
    work = tool.SamplingWork(CPU, "float32")
    launches = iter([50, 1, 50, 1]).__next__

    def count(step):
        step()
        return launches()

    found = tool.compare_recorders(work, tool.Eager(), count)
    assert found.startswith("same tokens; eager") and "50 launches" in found
    with pytest.raises(tool.Failed, match="tokens differ"):
        tool.compare_recorders(work, Nothing(), count)
    assert verdict(tool.compare_recorders, work, Refuses(), lambda step: 0) == "FAIL"


@torch.no_grad()
def test_host_waits_fail(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    message = "called a synchronizing CUDA operation"
    assert tool.count_waits(lambda: [warnings.warn(message, stacklevel=1)] * 2) == 1
    assert modes == ["warn", "default"]
    work = tool.SamplingWork(CPU, "float32")
    with pytest.raises(tool.Failed, match="was not counted"):
        tool.waits_of_loop(work)
    for waits in (0, 3):
        counts = iter([1, waits])
        monkeypatch.setattr(tool, "count_waits", lambda sample, counts=counts: next(counts))
        expected = "FAIL" if waits else "pass"
        assert verdict(tool.waits_of_loop, work) == expected


def test_ranks_that_do_not_end_fail():
    with pytest.raises(tool.Failed, match="have not ended"):
        tool.check_failing_rank(CPU, limit=0.5)


def test_a_step_without_a_gradient_fails():
    trainer = SimpleNamespace(train_step=lambda batch: {"grad_norm": math.nan})
    with pytest.raises(tool.Failed, match="gradient nan"):
        tool.train_once(trainer)


def test_a_peak_that_is_no_number_fails(monkeypatch):
    monkeypatch.setattr(tool.PeakMemory, "gigabytes", lambda self: math.nan)
    with pytest.raises(tool.Failed):
        tool.check_memory(CPU)


def wait(seconds, number=1.0):
    def work():
        time.sleep(seconds)
        return [torch.tensor([number, 2.0])]

    return work


@pytest.mark.parametrize(
    ("new", "allowed", "expected"),
    [
        (wait(0.001), 0, "kept"),
        (wait(0.02), 0, "dropped"),
        (wait(0.001, 1.1), 0, "changed"),
        (wait(0.001, 1.1), 0.06, "kept"),
        (wait(0.001, math.nan), 0.06, "changed"),
        (wait(0.001, 9.0), None, "kept"),
    ],
)
def test_a_way_is_kept_if_it_is_faster_and_right(new, allowed, expected):
    assert tool.Way("a way", wait(0.01), new, allowed).judge(times=3)[0] == expected


def test_each_way_has_the_numbers_of_the_other(monkeypatch, capsys):
    "On the small model; what is faster is no question of a test."
    monkeypatch.setattr(torch, "compile", coarse_compile)
    lora = {"rank": 2}
    model = GLMImageWrapper(
        small_model(), "both", device="cpu", lora=lora, gradient_checkpointing=True
    )
    ways = list(tool.ways_of(model, side=4, rows=4))
    decode, rows, compiled, eight, decisions, vae, update = ways
    for way, allowed in ((decode, 0), (rows, 1e-3), (decisions, 0), (vae, 1e-5), (update, 1e-5)):
        new = way.new()
        assert tool.far((way.like or way.old)(), new) <= allowed and new[0].any(), way.name
    for way in (compiled, eight):
        assert 1e-4 < tool.far(way.old(), way.new()) < 0.1
    broken = tool.Way("broken", [].pop, [].pop, 0)
    tool.time_ways([broken])
    assert "FAIL     broken" in capsys.readouterr().out
