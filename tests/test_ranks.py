"""Several processes on a CPU (gloo): the same gradients as one, one line of metrics, one writer, and an error of one rank ends all."""
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ['a cat in the middle on a red ground', 'two dogs on a blue ground', 'a key left of a snail on a green ground', 'a red ball on a white ground']
WORK = '''
import json, sys, torch
from glm_grpo.data import UserError, make_dataloader
from glm_grpo.glm import GLMImageWrapper, cut_like
from glm_grpo.trainer import Callback, MinimalGRPOTrainer, Ranks
prompts, component, scale, mini_batches, full, fails, out = json.loads(sys.argv[1])
ranks = Ranks.start('cpu')
def green(images):
    if fails == ranks.rank: raise RuntimeError('the paint is dry')
    return images[:, 1].mean((1, 2)) - images[:, [0, 2]].mean((1, 2, 3))
model = GLMImageWrapper('data/tiny-glm-image', component, lora=None if full else dict(rank=2), device='cpu', torch_dtype='float32')
if full: ranks.shard(model)
whole = lambda x: x.full_tensor() if ranks.shards else x
loader = make_dataloader([dict(prompt=p, target=None, index=i, metadata={}) for i, p in enumerate(prompts)], len(prompts), rank=ranks.rank, world=ranks.world)
trainer = MinimalGRPOTrainer(model, loader, green, group_size=2, height=64, width=64, num_inference_steps=2, guidance_scale=1, temperature=3, top_p=1, scale=scale, micro_batch_size=(1 if component == 'ar' else 4) if full else 2, mini_batches=mini_batches, ranks=ranks,
                             rollout_options=dict(sde_type='cps') if component == 'dit' else None)
gradients, draw, drawings = [], trainer.draw, []
trainer.draw = lambda batch: (drawings.append(draw(batch)), drawings[-1])[1]
@torch.no_grad()
def kept():
    gradients.append(torch.cat([whole(p.grad).flatten() for p in trainer.trained]))
    g = torch.Generator().manual_seed(len(gradients))
    for p in trainer.trained: p += cut_like((0.005 if full else 0.02) * torch.randn(p.shape, generator=g), p)          # the same for all: after a step along the gradient a rounding error can turn one token of thousands, and then a whole picture
trainer.optimizer.step = kept
class Stop(Callback):
    def on_step_end(self, trainer, metrics, rollout): trainer.stop = trainer.step == 2 and ranks.rank == ranks.world - 1         # one alone is asked to stop
trainer.callbacks = [Stop()]
try: lines = trainer.train(5)
except UserError as e: print(f'rank {ranks.rank} told: {e}', flush=True); ranks.stop(); sys.exit(2)
torch.save(dict(tokens=drawings[0]['token_ids'], prompts=drawings[0]['prompts'], gradients=gradients, lines=lines), f'{out}/{ranks.world}_{ranks.rank}.pt')
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


def gradients(tmp_path, world, prompts, *options):
    results = launch(world, ['-c', WORK, json.dumps([prompts, *options, None, str(tmp_path)])])
    assert [status for status, _ in results] == [0] * world, results
    found = [torch.load(tmp_path / f'{world}_{rank}.pt', weights_only=True) for rank in range(world)]
    for other in found[1:]: assert all(torch.equal(a, b) for a, b in zip(other['gradients'], found[0]['gradients'])), 'ranks drift apart'
    return found[0] | dict(tokens=torch.cat([f['tokens'] for f in found]), prompts=[p for f in found for p in f['prompts']])


@pytest.mark.parametrize('component, scale, mini_batches, twice, full, worlds', [('ar', 'batch', 3, True, False, [2, 4]), ('dit', 'group', 1, True, False, [2]), ('ar', 'batch', 3, True, True, [2]), ('dit', 'group', 1, False, True, [2])])
def test_ranks_give_the_gradients_of_one_process(tmp_path, component, scale, mini_batches, twice, full, worlds):
    "Also where a mini-batch has no sample of some rank (3 of 8 samples on 4 ranks), and where a prompt comes twice in a step. `full`: all weights, spread over the ranks (FSDP2); quoted words make the DiT's calls more on one rank than on the other."
    prompts = [*PROMPTS[:3], PROMPTS[0]] if twice else [*PROMPTS[:3], 'a sign "yes" on a red ground']
    one = gradients(tmp_path, 1, prompts, component, scale, mini_batches, full)
    if twice: assert len({tuple(row) for row, p in zip(one['tokens'].tolist(), one['prompts']) if p == PROMPTS[0]}) == (4 if component == 'ar' else 2), 'the same noise twice'
    for world in worlds:
        many = gradients(tmp_path, world, prompts, component, scale, mini_batches, full)
        assert many['prompts'] == one['prompts'] and torch.equal(many['tokens'], one['tokens'])
        assert len(one['gradients']) == len(many['gradients']) == 2 * mini_batches
        for a, b in zip(one['gradients'], many['gradients']):
            assert a.norm() > 0 and (a - b).norm() < 1e-5 * a.norm()
        for a, b in zip(one['lines'], many['lines']):
            for k in ('loss', 'reward_mean', 'reward_std', 'advantage_mean', 'equal_groups', 'grad_norm', 'ratio_mean', 'entropy'): assert a[k] == pytest.approx(b[k], rel=1e-3, abs=1e-5), k
            assert max(a['old_new_gap'], b['old_new_gap']) < 1e-4 and a['tokens_outside'] == b['tokens_outside'] == 0


def test_a_rank_that_fails_ends_all_with_its_reason(tmp_path):
    results = launch(2, ['-c', WORK, json.dumps([PROMPTS, 'ar', 'group', 1, False, 1, str(tmp_path)])], timeout=120)
    assert 'rank 0 told: rank 1 failed' in results[0][1] and 'the paint is dry' in results[0][1] and results[0][0] == 2
    assert results[1][0] != 0 and 'the paint is dry' in results[1][1]


def launched(*words):
    "torchrun, for `accelerate launch` starts several processes on GPUs only (on CPUs through MPI)."
    command = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', 2, '--master_port', free_port(), '-m', 'glm_grpo.train', *words]
    return subprocess.run([str(w) for w in command], cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=300)


def small(tmp_path, *words):
    (tmp_path / 'prompts.txt').write_text('\n'.join(PROMPTS) + '\n')
    if not (tmp_path / 'green.py').exists(): (tmp_path / 'green.py').write_text('def green(images): return images[:, 1].mean((1, 2)) - images[:, [0, 2]].mean((1, 2, 3))\n')
    return ['--data.prompts_file', f'{tmp_path}/prompts.txt', '--data.image_size', 64, '--training.batch_size', 2, '--reward.grpo.num_samples', 2, '--rollout.num_inference_steps', 2, '--rollout.guidance_scale', 1, '--rollout.temperature', 3,
            '--rollout.top_p', 1, '--reward.functions', f'{tmp_path}/green.py:green', '--training.sample_interval', 0, '--model.device', 'cpu', '--training.save_interval', 1, '--num_steps', 2, '--output_dir', tmp_path / 'run', *words]


def weights(checkpoint): return {str(p.relative_to(checkpoint)): p.read_bytes() for p in checkpoint.rglob('*.safetensors')}


@pytest.mark.parametrize('full', [False, True])
def test_a_run_on_two_ranks_writes_once_and_goes_on_bit_for_bit(tmp_path, full):
    "1 of 2 steps, resume, 1 step == 2 steps: both halves, two mini-batches and two passes; adapters with averages, or all weights in bfloat16, spread over the ranks with their float32 copies."
    words = small(tmp_path, '--model.component', 'both', '--training.eval_samples', 1, '--training.eval_prompts', 1, '--training.mini_batches', 2, '--training.updates_per_rollout', 2,
                  *(['--model.lora', 'false', '--model.torch_dtype', 'bfloat16', '--training.shard', 'true', '--training.learning_rate', 1e-4] if full else ['--training.ema_decay', 0.5]))
    done = launched(*words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count('loading') == 1 and 'on 2 ranks' in done.stdout
    lines = lambda: [{k: v for k, v in json.loads(line).items() if not k.startswith(('seconds', 'memory'))} for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
    straight, checkpoints = lines(), tmp_path / 'run/checkpoints'
    assert [line['step'] for line in straight] == [1, 2]
    final = weights(checkpoints / 'checkpoint_final')
    if full: assert len(final) == 3 and 'masters.safetensors' in final and 'FSDP' not in ''.join(p.read_text() for p in checkpoints.rglob('config.json'))
    else: assert len(final) == 4 and all(final[f'ema/{half}/adapter_model.safetensors'] != final[f'{half}/adapter_model.safetensors'] for half in ('ar', 'dit'))
    for name in ('checkpoint_final', 'checkpoint_step_2'): shutil.rmtree(checkpoints / name)
    done = launched('--resume', 'latest', '--output_dir', tmp_path / 'run')
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert lines() == straight and weights(checkpoints / 'checkpoint_final') == final


def test_a_rank_that_is_killed_ends_the_others(tmp_path):
    "kill -9, in the second step: the launcher ends the rest, and the checkpoint of the first step is whole."
    (tmp_path / 'green.py').write_text('import os, signal\ncalls = []\ndef green(images):\n    calls.append(1)\n    if os.environ["RANK"] == "1" and len(calls) == 4: os.kill(os.getpid(), signal.SIGKILL)\n    return images[:, 1].mean((1, 2))\n')
    begun = time.monotonic()
    done = launched(*small(tmp_path, '--training.eval_samples', 0, '--num_steps', 100))
    assert done.returncode != 0 and time.monotonic() - begun < 200
    assert 'Signal 9 (SIGKILL)' in done.stderr, done.stderr[-3000:]
    kept = [p for p in (tmp_path / 'run/checkpoints').iterdir() if p.name.startswith('checkpoint_')]
    assert kept and all(json.loads((p / 'trainer.json').read_text())['step'] == 1 and weights(p) for p in kept)
