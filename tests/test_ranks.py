"""Several processes on a CPU (gloo): the same gradients as one, one line of metrics, one writer, and an error of one rank ends all."""
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ['a cat in the middle on a red ground', 'two dogs on a blue ground', 'a key left of a snail on a green ground', 'a red ball on a white ground']
WORK = '''
import json, sys, torch
from glm_grpo.data import UserError, make_dataloader
from glm_grpo.glm import GLMImageWrapper
from glm_grpo.trainer import MinimalGRPOTrainer, Ranks
prompts, scale, fails, out = json.loads(sys.argv[1])
ranks = Ranks.start('cpu')
def green(images):
    if fails == ranks.rank: raise RuntimeError('the paint is dry')
    return images[:, 1].mean((1, 2)) - images[:, [0, 2]].mean((1, 2, 3))
model = GLMImageWrapper('data/tiny-glm-image', lora=dict(rank=2), device='cpu', torch_dtype='float32')
loader = make_dataloader([dict(prompt=p, target=None, index=i, metadata={}) for i, p in enumerate(prompts)], len(prompts), rank=ranks.rank, world=ranks.world)
trainer = MinimalGRPOTrainer(model, loader, green, group_size=2, height=64, width=64, num_inference_steps=1, guidance_scale=1, temperature=3, top_p=1, scale=scale, micro_batch_size=2, ranks=ranks)
gradients = []
@torch.no_grad()
def kept():
    gradients.append(torch.cat([p.grad.flatten() for p in trainer.trained]))
    for p in trainer.trained: p -= p.grad          # not AdamW: its first step is the gradient's sign, so rounding alone would move the weights far
trainer.optimizer.step = kept
try: lines = trainer.train(2)
except UserError as e: print(f'rank {ranks.rank} told: {e}', flush=True); ranks.stop(); sys.exit(2)
torch.save(dict(gradients=gradients, lines=lines, weights=torch.cat([p.detach().flatten() for p in trainer.trained])), f'{out}/{ranks.world}_{ranks.rank}.pt')
ranks.stop()
'''


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def launch(world, words, timeout=300):
    "The same command on `world` processes, as a launcher starts it -> their (status, what they said)."
    port, processes = free_port(), []
    for rank in range(world):
        env = dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
        processes.append(subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try: said = [p.communicate(timeout=timeout)[0] for p in processes]
    finally:
        for p in processes: p.kill()
    return [(p.returncode, text) for p, text in zip(processes, said)]


def gradients(tmp_path, world, scale):
    results = launch(world, ['-c', WORK, json.dumps([PROMPTS, scale, None, str(tmp_path)])])
    assert [status for status, _ in results] == [0] * world, results
    found = [torch.load(tmp_path / f'{world}_{rank}.pt', weights_only=True) for rank in range(world)]
    for other in found[1:]: assert torch.equal(other['weights'], found[0]['weights']), 'ranks have drifted apart'
    return found[0]


@pytest.mark.parametrize('scale', ['group', 'batch'])
def test_one_two_and_four_ranks_give_the_same_gradients(tmp_path, scale):
    one = gradients(tmp_path, 1, scale)
    for world in (2, 4) if scale == 'group' else (2,):
        many = gradients(tmp_path, world, scale)
        for a, b in zip(one['gradients'], many['gradients']):
            assert a.norm() > 0 and (a - b).norm() < 1e-5 * a.norm()
        for a, b in zip(one['lines'], many['lines']):
            for k in ('loss', 'reward_mean', 'reward_std', 'advantage_mean', 'equal_groups', 'grad_norm', 'ratio_mean'): assert a[k] == pytest.approx(b[k], rel=1e-3, abs=1e-5), k


def test_a_rank_that_fails_ends_all_with_its_reason(tmp_path):
    results = launch(2, ['-c', WORK, json.dumps([PROMPTS, 'group', 1, str(tmp_path)])], timeout=120)
    assert 'rank 0 told: rank 1 failed' in results[0][1] and 'the paint is dry' in results[0][1] and results[0][0] == 2
    assert results[1][0] != 0 and 'the paint is dry' in results[1][1]


def test_a_run_on_two_ranks_writes_once_and_goes_on_bit_for_bit(tmp_path):
    "torchrun, for `accelerate launch` starts several processes on GPUs only (on CPUs through MPI); 1 of 2 steps, resume, 1 step == 2 steps, with averages."
    (tmp_path / 'prompts.txt').write_text('\n'.join(PROMPTS) + '\n')
    (tmp_path / 'green.py').write_text('def green(images): return images[:, 1].mean((1, 2)) - images[:, [0, 2]].mean((1, 2, 3))\n')
    words = ['--data.prompts_file', f'{tmp_path}/prompts.txt', '--data.image_size', 64, '--training.batch_size', 2, '--reward.grpo.num_samples', 2, '--rollout.num_inference_steps', 1, '--rollout.guidance_scale', 1, '--rollout.temperature', 3,
             '--rollout.top_p', 1, '--reward.functions', f'{tmp_path}/green.py:green', '--training.eval_samples', 1, '--training.eval_prompts', 1, '--training.sample_interval', 0, '--model.device', 'cpu', '--training.ema_decay', 0.5,
             '--training.save_interval', 1, '--num_steps', 2, '--output_dir', tmp_path / 'run']
    def launched(*words):
        command = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', 2, '--master_port', free_port(), '-m', 'glm_grpo.train', *words]
        return subprocess.run([str(w) for w in command], cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=300)
    done = launched(*words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count('loading') == 1 and 'on 2 ranks' in done.stdout
    lines = lambda: [{k: v for k, v in json.loads(line).items() if 'seconds' not in k} for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
    straight, checkpoints = lines(), tmp_path / 'run/checkpoints'
    assert [line['step'] for line in straight] == [1, 2]
    final = {p.name: p.read_bytes() for p in (checkpoints / 'checkpoint_final').glob('*.safetensors')} | {'ema': (checkpoints / 'checkpoint_final/ema/adapter_model.safetensors').read_bytes()}
    assert final['ema'] != final['adapter_model.safetensors']
    import shutil
    shutil.rmtree(checkpoints / 'checkpoint_final')
    done = launched('--resume', checkpoints / 'checkpoint_step_1')
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert lines() == straight
    assert final == {p.name: p.read_bytes() for p in (checkpoints / 'checkpoint_final').glob('*.safetensors')} | {'ema': (checkpoints / 'checkpoint_final/ema/adapter_model.safetensors').read_bytes()}
