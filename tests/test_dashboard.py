"A training in a notebook: what is displayed, when, and what changes elsewhere."

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from glm_grpo.data.rollout import Rollout, Samples
from glm_grpo.training.callbacks import Callback, Dashboard, ProgressLines
from glm_grpo.training.callbacks import callbacks_or_default
from glm_grpo.training.experience import NO_BREAK, Experience
from glm_grpo.toy import ICONS, ToyPainter, ToyStudio, icon_images, nearness
from glm_grpo.training.trainer import MinimalGRPOTrainer

PROMPTS = list(ICONS)
BATCH = {"prompts": PROMPTS, "target_images": icon_images(PROMPTS)}


class Area:
    "Stands for IPython's display and for the handle that it returns."

    def __init__(self):
        self.begun, self.updates = [], []

    def __call__(self, shown, display_id):
        assert display_id is True
        self.begun.append(shown._repr_html_())
        return self

    def update(self, shown):
        self.updates.append(shown._repr_html_())


def make_trainer(model=None, **options):
    options = {"group_size": 4, "learning_rate": 0.3, "lr_scheduler": "constant"} | options
    return MinimalGRPOTrainer(model or ToyPainter(PROMPTS), [BATCH], nearness, **options)


@pytest.fixture
def kernel(monkeypatch):
    "IPython with a kernel; its display is an `Area`."
    area = Area()
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel="a kernel"))
    ipython.version_info = (9, 0)  # matplotlib asks for it
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=area))
    return area


def captions(shown):
    return re.findall("<figcaption>([^<]*)<", shown)


def test_without_a_notebook_it_prints_lines(capsys):
    trainer = make_trainer(callbacks=[Dashboard()])
    trainer.train(2)
    assert "step 2/2" in capsys.readouterr().out


def test_in_a_notebook_a_training_updates_one_area_each_step(kernel, capsys):
    trainer = make_trainer()
    history = trainer.train(5)
    assert len(kernel.begun) == 1 and len(kernel.updates) == 5
    for i, (shown, line) in enumerate(zip(kernel.updates, history)):
        assert f"Step {i + 1}: reward {line['reward_mean']:.3f}" in shown
        assert f'<progress value="{i + 1}" max="5"' in shown and f"step {i + 1}/5, " in shown
        assert (f"reward of steps 1 to {i + 1}" in shown) == (i > 0)
        assert "agreement of sampling" in shown
    rewards = trainer.last_experience.rewards[:4].sort(descending=True).values
    best = [float(text.split(",")[0]) for text in captions(kernel.updates[-1])[:4]]
    assert best == pytest.approx(rewards.tolist(), abs=6e-4)
    assert capsys.readouterr().out == ""
    trainer.train(2)  # another area, whose curve goes on
    assert len(kernel.begun) == 2 and len(kernel.updates) == 7
    assert "steps 1 to 7" in kernel.updates[-1] and "step 7/7" in kernel.updates[-1]


def test_a_dashboard_may_look_rarely_and_says_where_training_stopped(kernel):
    class Break(Callback):
        def on_step_end(self, trainer, metrics, experience):
            if trainer.step == 8:
                raise OSError("disk full")

    trainer = make_trainer(callbacks=[Dashboard(every=3), Break()])
    with pytest.raises(OSError, match="disk full"):
        trainer.train(10)
    steps = [re.search('<progress value="(.)"', shown)[1] for shown in kernel.updates]
    assert steps == ["1", "3", "6", "8"] and "steps 1 to 8" in kernel.updates[-1]
    assert repr(trainer.callbacks[0]) == "Dashboard(training stopped after step 8 of 10)"


@pytest.mark.parametrize("shell", ["absent", None, SimpleNamespace()])
def test_outside_a_notebook_lines_are_printed(monkeypatch, capsys, shell):
    "Without IPython, with IPython outside of a shell, and in a shell on a terminal."
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    if shell != "absent":
        ipython = SimpleNamespace(get_ipython=lambda: shell)
        monkeypatch.setitem(sys.modules, "IPython", ipython)
    trainer = make_trainer()
    assert [type(callback) for callback in trainer.callbacks] == [ProgressLines]
    if shell == "absent":
        assert "IPython" not in sys.modules
    trainer.train(2)
    assert capsys.readouterr().out.count(" s/step, ") == 2


def test_given_callbacks_are_kept(kernel):
    keep = Callback()
    assert make_trainer(callbacks=[keep]).callbacks == [keep]
    assert make_trainer(callbacks=()).callbacks == []
    assert callbacks_or_default(None, first=False) == [] == kernel.begun


def test_captions_have_the_advantages_of_both_policies():
    trainer = make_trainer(ToyStudio(PROMPTS), callbacks=(), images_per_sample=2)
    experience = trainer.collect(BATCH)
    group = experience.rewards[:8]
    best = group.argmax().item()
    tokens = experience.samples["ar"].advantages[best // 2]
    light = experience.samples["dit"].advantages[best]
    expected = f"{group[best]:.3f}, adv{NO_BREAK}ar{NO_BREAK}{tokens:+.2f}, "
    expected += f"adv{NO_BREAK}dit{NO_BREAK}{light:+.2f}"
    assert captions(experience._repr_html_())[0] == expected


def test_sources_stand_first_and_prompts_are_text():
    red = Image.new("RGB", (8, 8), "red")
    prompts = ["<b>a cat</b>"] * 2
    rollout = Rollout(prompts, torch.zeros(2, 3, 8, 8), source_images=[[red]] * 2)
    samples = {"ar": Samples(rollout, old_logprobs=None, group_size=2)}
    shown = Experience(rollout, samples, {}, torch.tensor([0.1, 0.9]), {}).html()
    assert captions(shown) == ["source", "0.900", "0.100"]
    assert "&lt;b&gt;a cat" in shown and "<b>" not in shown + rollout._repr_html_()
