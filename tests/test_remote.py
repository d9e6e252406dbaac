"A remote reward as a process: what notebook 19 cannot show within itself."
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from glm_grpo.remote import RemoteReward

ROOT = Path(__file__).resolve().parent.parent
REWARD = '''
def redness(images, prompts):
    if "fail" in prompts: raise RuntimeError("no such prompt, please")
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
'''


def test_command_line(tmp_path):
    "Starts, answers, lives through an exception of the reward, and ends quietly at Ctrl+C."
    (tmp_path / 'my_reward.py').write_text(REWARD)
    env = {k: v for k, v in os.environ.items() if k != 'GLM_GRPO_TOKEN'} | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    with subprocess.Popen([sys.executable, '-m', 'glm_grpo.remote', 'my_reward.py:redness', '--port', '0'], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            first = server.stdout.readline()
            assert first.startswith('redness is served at http://127.0.0.1:') and 'wants images, prompts' in first, first + server.stderr.read()
            remote = RemoteReward(first.split()[4], timeout=20, retries=0)
            assert remote.name == 'redness' and remote.wants == ['images', 'prompts']
            images = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
            local = images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
            try: remote(images, ['fail'] * 5)
            except OSError as e: assert 'no such prompt' in str(e) and 'status 500' in str(e)
            else: raise AssertionError('the error did not arrive')
            assert torch.allclose(remote(images, ['a cat'] * 5), local, atol=1e-6)
            server.send_signal(signal.SIGINT)
            out, err = server.communicate(timeout=20)
        finally: server.kill()
    assert server.returncode == 0 and err == '' and out.endswith('ended.\n') and '5 pictures' in out and 'Traceback' in out, (server.returncode, out, err)
