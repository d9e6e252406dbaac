"""The support rooms of the training floor under a whole trainer: stop and go on, killed processes,
interrupts, callbacks. A toy with a table of logits; fast."""

import io
import json
import os
import signal
import warnings
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from PIL import Image

from glm_grpo.data.basics import UserError, refusal
from glm_grpo.data.files import atomic_dir
from glm_grpo.data.loader import make_dataloader
from glm_grpo.data.rollout import Policy, Rollout, Samples
from glm_grpo.maths.noise import named_uniforms
from glm_grpo.training.callbacks import (
    Callback,
    CheckpointCallback,
    JsonlLogger,
    ProgressBar,
    TrackerLogger,
)
from glm_grpo.training.checkpoints import CheckpointFolder, find_checkpoint, read_note
from glm_grpo.training.interrupts import Interrupts
from glm_grpo.training.experience import save_experience
from glm_grpo.training.trainer import MinimalGRPOTrainer

PROMPTS = ["black", "red", "blue"]


class ColorTable(Policy):
    "A table [prompts, 9, 4] of logits: nine tokens in four colours."

    name = "ar"

    def __init__(self, prompts, dtype):
        self.row = {prompt: i for i, prompt in enumerate(prompts)}
        self.logits = torch.nn.Parameter(torch.ones(len(prompts), 9, 4, dtype=dtype))

    def parameters(self):
        return [self.logits]

    def logprobs(self, prompts):
        return self.logits[[self.row[p] for p in prompts]].float().log_softmax(-1)

    def samples(self, rollout, group_rows):
        return Samples(rollout, rollout.token_logprobs, group_rows)

    def score(self, samples):
        rollout = samples.rollout
        return self.logprobs(rollout.prompts).gather(-1, rollout.token_ids[..., None])[..., 0]


class ToyModel:
    name, component, lora = "toy-table", "ar", None

    def __init__(self, prompts=PROMPTS, dtype=torch.float32):
        self.policies = {"ar": ColorTable(prompts, dtype)}

    @property
    def logits(self):
        return self.policies["ar"].logits

    @torch.no_grad()
    def generate_with_tracking(self, prompts, images=None, *, names, **options):
        policy = self.policies["ar"]
        below = (
            policy.logprobs(prompts).exp().cumsum(-1) < named_uniforms(names.tokens(), 9)[..., None]
        )
        ids = below[..., :-1].sum(-1)
        painted = (ids.float() / 3).view(-1, 1, 3, 3).expand(-1, 3, 3, 3)
        rollout = Rollout(prompts, painted, token_ids=ids)
        return replace(rollout, token_logprobs=policy.score(Samples(rollout, ids, 1)))

    def save_pretrained(self, folder):
        torch.save(self.logits.detach(), folder / "table.pt")

    def load_adapter(self, folder):
        self.logits.data.copy_(torch.load(folder / "table.pt", weights_only=True))


def brightness(images):
    return images.mean((1, 2, 3))


def make_trainer(reward=brightness, model=None, batch_size=2, **changes):
    items = [{"prompt": p, "target": None, "index": 0, "metadata": {}} for p in PROMPTS]
    options = {"learning_rate": 0.3, "lr_scheduler": "linear", "group_size": 4} | changes
    loader = make_dataloader(items, batch_size)
    return MinimalGRPOTrainer(model or ToyModel(), loader, reward, **options)


def logits(trainer):
    return trainer.model.logits.detach()


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, metrics, experience):
        trainer.stop = trainer.step == self.step


@pytest.fixture
def ctrl_c():
    "Ctrl+C raises KeyboardInterrupt, also where a shell has it ignored."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ema_decay", [None, 0.8])
def test_stop_save_load_go_on_is_the_straight_run(tmp_path, dtype, ema_decay):
    "With a rate that falls to 0 at the end of the run, two updates per rollout, and mini-batches."

    def make(**more):
        model = ToyModel(dtype=dtype)
        options = {"updates_per_rollout": 2, "mini_batches": 2, "ema_decay": ema_decay}
        return make_trainer(model=model, learning_rate=3e-3, **options, **more)

    straight, half, resumed = make(), make(callbacks=[StopAt(3)]), make()
    lines = straight.train(6)
    half.train(6)
    half.save_checkpoint(tmp_path / "half")
    resumed.load_checkpoint(tmp_path / "half")
    again = resumed.train(3)
    assert [m["loss"] for m in again] == [m["loss"] for m in lines[3:]]
    assert [m["learning_rate"] for m in again] == [m["learning_rate"] for m in lines[3:]]
    assert torch.equal(logits(resumed), logits(straight)) and logits(straight).ne(1).any()
    if dtype == torch.bfloat16:
        assert torch.equal(resumed.optimizer.masters[0], straight.optimizer.masters[0])
    if ema_decay:
        averages = [t.optimizer.ema.shadow_params[0] for t in (resumed, straight)]
        assert torch.equal(*averages) and not torch.equal(averages[0], logits(straight).float())


def test_small_steps_in_bfloat16_need_float32_copies():
    moved = {}
    for copies in (True, False):
        trainer = make_trainer(model=ToyModel(dtype=torch.bfloat16), learning_rate=2e-4)
        if not copies:
            optimizer = trainer.optimizer
            optimizer.masters = None
            optimizer.adamw = torch.optim.AdamW(optimizer._groups(), weight_decay=0.0)
        trainer.train(60)
        moved[copies] = logits(trainer).ne(1).any().item()
    assert moved == {True: True, False: False}


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"model": ToyModel([*PROMPTS, "white"])}, "parameters: 108 in the checkpoint, 144 here"),
        ({"mode": "i2i"}, "mode: t2i in the checkpoint, i2i here"),
        ({"batch_size": 3}, "batch size 2, this run has 3"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, changes, part):
    trained, other = make_trainer(), make_trainer(**changes)
    trained.train(2)
    trained.save_checkpoint(tmp_path / "two")
    with warnings.catch_warnings(action="ignore"):
        assert part in refusal(other.load_checkpoint, tmp_path / "two")
    assert other.step == 0 and logits(other).eq(1).all() and not other.optimizer.adamw.state
    assert other.train_dataloader.state_dict()["batches"] == 0


def test_half_a_step_is_not_saved(tmp_path):
    trainer = make_trainer()
    trainer.half_done = True
    assert "between two updates of one step" in refusal(trainer.save_checkpoint, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where, done", [("reward", 3), ("learning", 4)])
def test_ctrl_c_leaves_a_whole_step(tmp_path, ctrl_c, where, done):
    "In step 4. While it samples the step has not happened; while it learns, the step is finished."
    calls = []

    def press(moment):
        calls.extend([moment] * (moment == where))
        if calls.count(where) == 4 and moment == where:
            ctrl_c()

    class Model(ToyModel):
        def __init__(self):
            super().__init__()
            score = self.policies["ar"].score

            def pressed(samples):
                if samples.advantages is not None:
                    press("learning")
                return score(samples)

            self.policies["ar"].score = pressed

    def reward(images):
        press("reward")
        return brightness(images)

    straight = make_trainer(lr_scheduler="constant")
    straight.train(6)
    log = tmp_path / "metrics.jsonl"
    trainer = make_trainer(reward, Model(), lr_scheduler="constant", callbacks=[JsonlLogger(log)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(6)
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert trainer.step == done and steps == list(range(1, done + 1))
    trainer.train(6 - done)
    assert torch.equal(logits(trainer), logits(straight))


def test_interrupts_stop_a_trainer_after_its_step(ctrl_c):
    class Press(Callback):
        def on_step_end(self, trainer, metrics, experience):
            if trainer.step == 2:
                ctrl_c()

    with Interrupts() as interrupts:
        interrupts.trainer = trainer = make_trainer(callbacks=[Press()])
        assert len(trainer.train(5)) == 2
    assert interrupts.status == 130


def killed_while(work):
    "A child process that is killed (SIGKILL) at the end of `work`."
    child = os.fork()
    if not child:
        work()
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def fill_and_die(path):
    "Killed in the middle of writing a checkpoint."
    context = atomic_dir(path)
    (context.__enter__() / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def replace_and_die(path):
    "Killed after the old checkpoint was moved aside, before the new one has its name."
    path.rename(path.with_name(f".{path.name}.{os.getpid()}.old"))


@pytest.mark.parametrize("die", [fill_and_die, replace_and_die])
def test_a_killed_process_leaves_whole_checkpoints(tmp_path, die):
    "The next run puts them in order, and goes on bit for bit."
    straight, trainer = make_trainer(lr_scheduler="constant"), make_trainer()
    straight.train(4)
    trainer.train(2)
    folder = tmp_path / "checkpoints"
    trainer.save_checkpoint(folder / "checkpoint_step_2")
    killed_while(lambda: die(folder / "checkpoint_step_2"))
    left = [p.name for p in folder.iterdir() if p.name.startswith(".")]
    assert len(left) == 1
    CheckpointCallback(folder).on_train_begin(trainer)
    assert [p.name for p in folder.iterdir()] == ["checkpoint_step_2"]
    found = find_checkpoint("latest", tmp_path)
    assert read_note(found)["step"] == 2 and not (found / "half").exists()


def test_checkpoints_rotate_and_the_best_stays(tmp_path):
    best = CheckpointCallback(tmp_path, every=1, keep=2, best=lambda: 2)
    trainer = make_trainer(callbacks=[best])
    trainer.train(5)
    names = sorted(p.name for p in tmp_path.iterdir())
    kept = ["checkpoint_best", "checkpoint_final", "checkpoint_step_4", "checkpoint_step_5"]
    assert names == kept and read_note(tmp_path / "checkpoint_best")["step"] == 2
    final = make_trainer()
    final.load_checkpoint(tmp_path / "checkpoint_final")
    assert torch.equal(logits(final), logits(trainer))


def test_the_best_of_the_last_step_is_a_link(tmp_path):
    make_trainer(callbacks=[CheckpointCallback(tmp_path, best=lambda: 3)]).train(3)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["checkpoint_best", "checkpoint_final"]
    tables = [tmp_path / name / "table.pt" for name in names]
    assert os.path.samefile(*tables)
    CheckpointFolder(tmp_path).copy(tmp_path / "checkpoint_final", "checkpoint_best")
    assert os.path.samefile(*tables)  # a second time, over the first


@pytest.mark.parametrize("newest", range(3))
def test_latest_is_the_newest_of_all_runs(tmp_path, monkeypatch, newest):
    "Not the first run, nor the last, nor the one with the most steps."
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        for step in (8, 9):
            checkpoint = tmp_path / f"outputs/run_{i}/checkpoints/checkpoint_step_{step - i}"
            checkpoint.mkdir(parents=True)
            note = checkpoint / "trainer.json"
            note.touch()
            written = 1000 * (i == newest) + 100 * i + step
            os.utime(note, ns=(written, written))
    found = find_checkpoint("latest")
    assert found.parts[1] == f"run_{newest}" and found.name == f"checkpoint_step_{9 - newest}"
    assert find_checkpoint("outputs/run_1").parts[1] == "run_1"


def test_the_end_of_each_callback_comes(tmp_path, capsys):
    "Also after an error in another's step; and lines on disk are whole."

    class Fail(Callback):
        def on_step_end(self, trainer, metrics, experience):
            if trainer.step == 2:
                raise UserError("the paint is dry")

    log = JsonlLogger(tmp_path / "metrics.jsonl")
    trainer = make_trainer(callbacks=[ProgressBar(), log, Fail()])
    assert refusal(trainer.train, 5) == "the paint is dry"
    assert log.file.closed
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert "step 2/5" in capsys.readouterr().out


def test_the_rollout_of_a_step_is_saved(tmp_path):
    trainer = make_trainer()
    trainer.train(1)
    last = trainer.last_experience
    save_experience(last, tmp_path / "rollout")
    text = (tmp_path / "rollout" / "rollout.json").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["reward"] for line in lines] == last.rewards.tolist()
    assert [line["advantage"] for line in lines] == last.samples["ar"].advantages.tolist()
    assert all((tmp_path / "rollout" / line["picture"]).is_file() for line in lines)


@pytest.mark.parametrize("averaged", [False, True])
def test_training_does_not_see_its_average(averaged):
    "An evaluation of the averages in between changes no later step."
    trainer, plain = make_trainer(ema_decay=0.8), make_trainer()
    for _ in range(3):
        trainer.train(1)
        plain.train(1)
        with trainer.optimizer.averaged() if averaged else nullcontext():
            inside = logits(trainer).clone()
        assert torch.equal(inside, logits(trainer)) != (averaged and trainer.step > 1)
    assert torch.equal(logits(trainer), logits(plain))


def test_progress_of_two_policies():
    two = {"reward_mean": 0.5}
    for name, clipped in (("ar", 0.25), ("dit", 0.5)):
        two |= {f"{name}/grad_norm": 1.5, f"{name}/clip_fraction": clipped, f"{name}/kl": 0.125}
    text = io.StringIO()
    bar = ProgressBar(text)
    trainer = SimpleNamespace(last_step=1, step=0, policies={"ar": 0, "dit": 0})
    bar.on_train_begin(trainer)
    trainer.step = 1
    bar.on_step_end(trainer, two, None)
    bar.on_train_end(trainer)
    assert "  reward 0.500, ar/grad 1.5, ar/clip 25.0%, ar/kl 0.125, dit/grad" in text.getvalue()
    assert "dit/clip 50.0%" in text.getvalue()


def test_trackers_get_images_if_they_can_show_them(tmp_path):
    logger = TrackerLogger(tmp_path, log_with=["one", "two"])
    with_images, without = mock.Mock(), mock.Mock(spec=["log", "finish"])
    with_images.name = "one"
    started = {"one": [with_images], "two": [without]}
    with mock.patch("glm_grpo.training.callbacks.start_tracker", lambda name, *args: started[name]):
        make_trainer(callbacks=[logger]).train(1)
    (images,) = with_images.log_images.call_args.args
    assert isinstance(images["train/samples"][0], Image.Image) and list(images) == ["train/samples"]
    assert with_images.log_images.call_args.kwargs == {"step": 1}
    assert with_images.finish.called and without.log.called and without.finish.called


def test_trackers_get_images_of_the_first_step_and_then_every_few(tmp_path):
    tracker = mock.Mock()
    with mock.patch("glm_grpo.training.callbacks.start_tracker", lambda *args: [tracker]):
        make_trainer(callbacks=[TrackerLogger(tmp_path, image_every=5)]).train(6)
    assert [call.kwargs["step"] for call in tracker.log_images.call_args_list] == [1, 5]


def test_trackers_skip_steps_and_numbers_that_are_not_finite(tmp_path):
    class Nan(Callback):
        def on_step_end(self, trainer, metrics, experience):
            metrics["kl"] = float("nan")

    tracker = mock.Mock()
    with mock.patch("glm_grpo.training.callbacks.start_tracker", lambda *args: [tracker]):
        logger = TrackerLogger(tmp_path, every=3, image_every=0)
        make_trainer(callbacks=[Nan(), logger]).train(7)
    assert [call.kwargs["step"] for call in tracker.log.call_args_list] == [3, 6]
    for call in tracker.log.call_args_list:
        assert "train/loss" in call.args[0] and "train/kl" not in call.args[0]
    assert not tracker.log_images.called
