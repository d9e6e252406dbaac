"""kill -9 at random moments: the newest checkpoint always loads, `--resume latest` always goes on, and at the end nothing is different.

python -m pytest -q -s tests/test_kill.py --kills 50
"""
import json
import os
import random
import signal
import time

import torch
from safetensors.torch import load_file
from test_cli import GREEN, PROMPTS, ROOT, small


def start(words, log):
    "The program in a process of its own, forked from this one, which has imported all that takes long -> its id."
    process = os.fork()
    if process: return process
    try:
        with open(log, 'w') as f: [os.dup2(f.fileno(), n) for n in (1, 2)]
        from glm_grpo.train import main
        os._exit(main([str(w) for w in words]))
    finally: os._exit(99)


def test_killed_at_random_moments(tmp_path, monkeypatch, pytestconfig):
    from glm_grpo.config import find_checkpoint
    from glm_grpo.glm import GLMImageWrapper
    from glm_grpo.train import main
    from glm_grpo.trainer import newest_first
    GLMImageWrapper(ROOT / 'data/tiny-glm-image', device='cpu', lora=dict(rank=2))           # imports what is imported late
    torch.set_num_threads(1)
    monkeypatch.chdir(ROOT)
    kills, g = pytestconfig.getoption('kills'), random.Random(0)
    (tmp_path / 'prompts.txt').write_text('\n'.join(PROMPTS) + '\n')
    (tmp_path / 'green.py').write_text(GREEN)
    run = tmp_path / 'run'
    words = small(tmp_path, '--training.save_interval', 1, '--training.lr_scheduler', 'constant', '--training.ema_decay', 0.9, '--training.trackers', 'null', '--model.lora_rank', 2, '--model.device', 'cpu')
    def step():
        "Of the newest checkpoint; one may go while we look."
        try: return max((json.loads((c / 'trainer.json').read_text())['step'] for c in newest_first(run / 'checkpoints')), default=0)
        except FileNotFoundError: return step()
    seen, torn = 0, 0
    for kill in range(kills):
        process = start([*words, *(['--resume', 'latest'] if seen else []), '--num_steps', 100000, '--output_dir', run], tmp_path / 'log')
        try:
            limit = time.monotonic() + 300
            while step() <= seen:                                            # one step is saved
                ended, _ = os.waitpid(process, os.WNOHANG)
                assert not ended and time.monotonic() < limit, (tmp_path / 'log').read_text()[-2000:]
                time.sleep(0.01)
            seconds = json.loads((run / 'metrics.jsonl').read_text().splitlines()[-1])['seconds']
            time.sleep(g.random() * 1.3 * seconds)                           # anywhere in the next one, or while it is saved
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        torn += any((run / 'checkpoints').glob('.*'))
        newest = find_checkpoint('latest', run)
        files = [*newest.rglob('*.safetensors'), *newest.rglob('*.pt')]
        assert len(files) == 4, files                                # adapter, averages, and the memory of both
        for f in files: assert load_file(f) if f.suffix == '.safetensors' else torch.load(f, weights_only=True)
        assert step() > seen
        seen = step()
        print('.', end='', flush=True)
    last = ['--num_steps', str(seen + 1)]
    assert main(['--resume', 'latest', '--output_dir', str(run), *last]) == 0
    assert not [p for p in run.rglob('.*')], 'something is left over'
    assert len(list((run / 'checkpoints').glob('checkpoint_step_*'))) == 3
    assert main([str(w) for w in words] + last + ['--output_dir', str(tmp_path / 'straight')]) == 0
    for name in ('adapter_model.safetensors', 'ema/adapter_model.safetensors'):
        a, b = (load_file(r / 'checkpoints/checkpoint_final' / name) for r in (run, tmp_path / 'straight'))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    lines = [[{k: v for k, v in json.loads(line).items() if not k.startswith(('seconds', 'memory'))} for line in (r / 'metrics.jsonl').read_text().splitlines()] for r in (run, tmp_path / 'straight')]
    assert lines[0] == lines[1] and len(lines[0]) == seen + 1
    print(f'\n{kills} kills in {seen} steps, {torn} of them while a checkpoint was being written; each time the newest checkpoint loaded and --resume latest went on; '
          'afterwards adapter, averages and metrics were those of a run that was never killed, bit for bit')
