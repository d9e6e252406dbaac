"""What goes wrong in the middle of a run is told once, with what to do; nothing that was learnt is lost, nothing half-written stays."""
import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from test_cli import GREEN, PROMPTS, at_root, files, folder, main, small, steps  # noqa: F401


def told(capsys): return capsys.readouterr().err.strip().splitlines()[-1]


def fails_at(call, what):
    "A reward that does something else in its n-th call (the first two are the checks before training)."
    return 'calls = []\n' + GREEN.replace('return', f'calls.append(1); len(calls) == {call} and {what}; return')


def loads(checkpoint):
    for f in checkpoint.rglob('*'):
        if f.suffix == '.safetensors': load_file(f)
        if f.suffix == '.pt': torch.load(f, weights_only=True)
    return json.loads((checkpoint / 'trainer.json').read_text())['step']


def test_steps_without_finite_numbers_end_the_run_with_the_drawing_on_disk(folder, capsys):
    (folder / 'green.py').write_text('import torch\ncalls = []\ndef green(images): calls.append(1); return torch.tensor([3e38, -3e38] * len(images))[:len(images)] if len(calls) > 3 else images[:, 1].mean((1, 2))\n')
    run = folder / 'run'
    assert main(*small(folder, '--num_steps', 50, '--reward.grpo.scale', 'none', '--training.save_interval', 1, '--output_dir', run)) == 2
    message, failed = told(capsys), run / 'failed_step'
    assert 'not finite 3 times in a row' in message and 'Lower the learning rate' in message and str(failed) in message and 'checkpoint_interrupt' in message
    lines = [json.loads(line) for line in (failed / 'rollout.json').read_text().splitlines()]
    assert [line['prompt'] in PROMPTS for line in lines] == [True, True] and [line['reward'] for line in lines] == [pytest.approx(3e38), pytest.approx(-3e38)]
    assert all(Image.open(failed / line['picture']).size == (64, 64) for line in lines)
    assert {'token_ids', 'token_logprobs', 'image_tensors', 'rewards', 'ar/advantages'} <= set(load_file(failed / 'rollout.safetensors'))
    good, stopped = (load_file(run / 'checkpoints' / name / 'adapter_model.safetensors') for name in ('checkpoint_step_2', 'checkpoint_interrupt'))
    assert steps(run) == [1, 2, 3, 4] and all(torch.equal(good[k], stopped[k]) for k in good)
    assert [json.loads(line)['skipped'] for line in (run / 'metrics.jsonl').read_text().splitlines()] == [0, 1, 1, 1]


@pytest.mark.parametrize('value', ['nan', 'inf', '-inf'])
def test_a_reward_that_is_no_number_is_named(folder, capsys, value):
    "One part of two: a NaN of a part means nothing to score, so both must say so before it is a mistake."
    (folder / 'bad.py').write_text(f'calls = []\ndef bad(images): calls.append(1); return [float("{value}") if len(calls) > 3 else 1.0] * len(images)\n')
    words = small(folder, '--num_steps', 5, '--output_dir', folder / 'run')
    assert main(*words, '--reward.functions', f'{folder}/bad.py:bad' if value == 'nan' else f'[{folder}/green.py:green,{folder}/bad.py:bad]') == 2
    message = told(capsys)
    assert 'reward bad' in message and ('nothing to score' in message or value in message) and steps(folder / 'run') == [1] and 'checkpoint_interrupt' in message
    assert loads(folder / 'run/checkpoints/checkpoint_interrupt') == 1


def test_a_disk_that_is_full_from_the_second_checkpoint_on(folder, capsys, monkeypatch):
    import glm_grpo.data as data
    sync, run = data._sync, folder / 'run'
    def full(path):
        if 'checkpoint_step_1.' in str(path) or 'checkpoint_' not in str(path): return sync(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(data, '_sync', full)
    assert main(*small(folder, '--num_steps', 5, '--training.save_interval', 1, '--output_dir', run)) == 2
    message = told(capsys)
    assert 'checkpoint_step_2: the checkpoint cannot be written' in message and 'No space left' in message and f'--resume {run}/checkpoints/checkpoint_step_1' in message
    assert [p.name for p in (run / 'checkpoints').iterdir()] == ['checkpoint_step_1'] and loads(run / 'checkpoints/checkpoint_step_1') == 1
    monkeypatch.undo()
    os.chdir(Path(__file__).parent.parent)
    assert main('--resume', 'latest', '--output_dir', run, '--num_steps', 2) == 0 and steps(run) == [1, 2]


def test_a_disk_that_really_is_full(folder, capsys):
    "A file system of 4 MB; mounting one takes root."
    disk = folder / 'disk'
    disk.mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', str(disk)], capture_output=True).returncode: pytest.skip('mounting is not allowed here')
    try:
        run = disk / 'run'
        assert main(*small(folder, '--num_steps', 50, '--training.save_interval', 1, '--training.keep_checkpoints', 'null', '--output_dir', run)) == 2
        message = told(capsys)
        assert 'o space left' in message and 'disk is full' in message and f'--resume {run}/checkpoints/checkpoint_step_' in message
        there = sorted((run / 'checkpoints').iterdir())
        assert there and [loads(p) for p in there] and not [p for p in files(disk) if p.name.startswith('.') or p.parent.name.startswith('.')]
    finally: subprocess.run(['umount', str(disk)], check=True)


def test_a_picture_that_breaks_while_the_run_goes_on(folder, capsys):
    "All were whole before training; the message names the one that is not, and what was learnt is kept."
    sources = folder / 'source_images'
    sources.mkdir()
    for i in range(3): Image.new('RGB', (64, 64), (90, 60, 40 * i)).save(sources / f'{i}.png')
    whole = {p: p.read_bytes() for p in sources.iterdir()}
    (folder / 'green.py').write_text('import pathlib\n' + fails_at(4, f'[p.write_bytes(p.read_bytes()[:60]) for p in pathlib.Path("{sources}").iterdir()]'))
    words = small(folder, '--mode', 'i2i', '--num_steps', 4, '--output_dir', folder / 'run')
    assert main(*words) == 2
    message = told(capsys)
    assert 'a broken picture' in message and str(sources) in message and steps(folder / 'run') == [1, 2] and '2 steps are saved' in message
    for p, content in whole.items(): p.write_bytes(content)
    assert main('--resume', 'latest', '--output_dir', folder / 'run') == 0 and steps(folder / 'run') == [1, 2, 3, 4]


LONG = {'10,000 letters': 'a cat in the middle on a red ground ' * 278, 'one word of 10,000 letters': 'x' * 10_000, '10,000 Chinese characters': '一只猫坐在红色的地上' * 1000,
        'right to left': 'قطة في الوسط على أرضية حمراء', 'signs of many scripts': 'кошка बिल्ली 猫 고양이 🐈 ȩ́ \u200b\u202e \x07', 'a quote that does not close': 'a sign with the word "UP and a \'cat', 'quotes in quotes': '“a ”b "c" \'d\' «e» 「f」'}


@pytest.mark.parametrize('name', LONG)
def test_prompts_of_any_length_and_script_train_or_are_refused(folder, capsys, name):
    "The tiny model has 4,096 positions and few words, so that long prompts in unknown scripts do not fit; the real one has 131,072."
    (folder / 'prompts.txt').write_text(LONG[name].strip() + '\n')
    for p in (folder / 'target_images').iterdir(): p.unlink()
    (folder / 'target_images').rmdir()
    status = main(*small(folder, '--num_steps', 1, '--output_dir', folder / 'run'))
    if name in ('one word of 10,000 letters', '10,000 Chinese characters'):
        message = told(capsys)
        assert status == 2 and 'prompts.txt, line 1: 10,000 characters' in message and 'Shorten the prompt' in message and not (folder / 'run').exists()
    else:
        line = json.loads((folder / 'run/metrics.jsonl').read_text())
        assert status == 0 and line['ratio_std'] < 1e-4 and line['old_new_gap'] < 1e-3 and line['tokens_outside'] == 0


@pytest.mark.parametrize('name', ['logs', 'samples'])
def test_a_file_where_the_curves_must_go_is_told_at_once(folder, capsys, name):
    run = folder / 'run'
    run.mkdir()
    (run / name).write_text('')
    assert main(*small(folder, '--num_steps', 1, '--output_dir', run)) == 2
    assert f'{name} is a file, and a folder is needed there' in told(capsys) and files(run) == [run / name]


@pytest.mark.parametrize('updates, saved', [(1, 'checkpoint_interrupt'), (2, 'checkpoint_step_1')])
def test_out_of_memory_is_told_with_what_to_lower(folder, capsys, monkeypatch, updates, saved):
    "In the last update of the second step. In the middle of a step's updates there is no state worth keeping: the older checkpoint is named."
    from glm_grpo.glm import ARPolicy
    calls, score = [], ARPolicy.score
    def tight(self, rollout):
        calls.append(1)
        if len(calls) == 2 * updates: raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20 GiB')
        return score(self, rollout)
    monkeypatch.setattr(ARPolicy, 'score', tight)
    run = folder / 'run'
    assert main(*small(folder, '--num_steps', 5, '--training.save_interval', 1, '--training.updates_per_rollout', updates, '--output_dir', run)) == 2
    message = told(capsys)
    assert 'Out of memory. Lower training.micro_batch_size' in message and f'--resume {run}/checkpoints/{saved}' in message
    assert steps(run) == [1] and all(loads(p) == 1 for p in (run / 'checkpoints').iterdir())
    assert main('--resume', 'latest', '--output_dir', run, '--num_steps', 2) == 0 and steps(run) == [1, 2]


def test_curves_go_to_wandb_without_a_network(folder, monkeypatch):
    pytest.importorskip('wandb', reason='pip install wandb')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    run = folder / 'run'
    assert main(*small(folder, '--num_steps', 2, '--training.sample_interval', 1, '--training.trackers', '[tensorboard,wandb]', '--output_dir', run)) == 0
    assert list(run.glob('wandb/offline-run-*/*.wandb')) and list(run.glob('wandb/offline-run-*/files/media/images/train/*.png')) and list((run / 'logs').glob('events*'))


def test_a_tracker_whose_package_is_missing_is_told_before_anything(folder, capsys, monkeypatch):
    import importlib.util
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name, *a: None if name == 'wandb' else find(name, *a))
    assert main(*small(folder, '--training.trackers', 'wandb', '--output_dir', folder / 'run')) == 2
    assert 'training.trackers wandb' in (message := told(capsys)) and 'pip install wandb' in message and not (folder / 'run').exists()


@pytest.mark.parametrize('dry', [[], ['--dry_run']])
def test_a_held_out_prompt_that_is_too_long_is_refused(folder, capsys, dry):
    (folder / 'held').mkdir()
    (folder / 'held/prompts.txt').write_text('a cat\n' + 'x' * 10_000 + '\n')
    assert main(*dry, *small(folder, '--data.eval_prompts_file', folder / 'held/prompts.txt', '--output_dir', folder / 'run')) == 2
    assert 'held/prompts.txt, line 2: 10,000 characters' in told(capsys) and not (folder / 'run').exists()


def test_evaluate_refuses_a_prompt_that_is_too_long(folder):
    from glm_grpo.data import UserError
    from glm_grpo.evaluate import main as evaluate_main
    (folder / 'prompts.txt').write_text('a cat\n' + 'x' * 10_000 + '\n')
    shutil.rmtree(folder / 'target_images')
    with pytest.raises(UserError, match='prompts.txt, line 2: 10,000 characters'): evaluate_main(small(folder, '--output_dir', str(folder / 'out')))
    assert not (folder / 'out').exists()


def test_the_newest_checkpoint_is_named_when_nothing_more_can_be_saved(folder, capsys, monkeypatch):
    import glm_grpo.data as data
    sync, run = data._sync, folder / 'run'
    def full(path):
        if 'checkpoint_step_3.' not in str(path) and 'interrupt' not in str(path): return sync(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(data, '_sync', full)
    assert main(*small(folder, '--num_steps', 5, '--training.save_interval', 1, '--output_dir', run)) == 2
    assert f'--resume {run}/checkpoints/checkpoint_step_2' in told(capsys)
