"""What surrounds the training loop: killed processes, signals, averages, trackers."""

import errno
import os
import signal
import threading
from unittest import mock

import pytest
from PIL import Image

from glm_grpo.data.basics import atomic_dir
from glm_grpo.training.callbacks import Callback, CheckpointCallback, TrackerLogger
from glm_grpo.training.checkpoints import find_checkpoint, read_note
from glm_grpo.toy import ICONS, ToyPainter, icon_images, nearness
from glm_grpo.training.trainer import MinimalGRPOTrainer

BATCH = {"prompts": list(ICONS), "target_images": icon_images(list(ICONS))}


def make_trainer(**changes):
    options = {"learning_rate": 0.3, "group_size": 4, "callbacks": ()} | changes
    return MinimalGRPOTrainer(ToyPainter(list(ICONS)), [BATCH], nearness, **options)


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
def test_a_killed_process_leaves_complete_checkpoints(tmp_path, die):
    trainer = make_trainer()
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


def test_trackers_get_images_if_they_can_show_them(tmp_path):
    with_images, without = mock.Mock(), mock.Mock(spec=["name", "log", "finish"])
    started = {"one": with_images, "two": without}
    logger = TrackerLogger(tmp_path, every=3, image_every=5, log_with=["one", "two"])

    class Nan(Callback):
        def on_step_end(self, trainer, metrics, experience):
            metrics["kl"] = float("nan")

    with mock.patch("glm_grpo.training.callbacks.start_tracker", lambda name, *_: started[name]):
        make_trainer(callbacks=[Nan(), logger]).train(7)
    shown = with_images.log_images.call_args_list
    assert [call.kwargs["step"] for call in shown] == [1, 5]  # the first, and every few
    (images,) = shown[0].args
    assert isinstance(images["train/samples"][0], Image.Image) and list(images) == ["train/samples"]
    for tracker in (with_images, without):
        assert [call.kwargs["step"] for call in tracker.log.call_args_list] == [3, 6]
        assert tracker.finish.called
    (numbers,) = without.log.call_args.args
    assert "train/reward_mean" in numbers and "train/kl" not in numbers


def test_a_full_disk_while_tensorboard_writes_is_one_error(tmp_path, monkeypatch):
    "TensorBoard's thread raises it as well, and its traceback would be printed."
    printed = mock.Mock()
    monkeypatch.setattr(threading, "excepthook", printed)

    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = make_trainer(callbacks=[TrackerLogger(tmp_path)])
    writer = "tensorboard.summary.writer.record_writer.RecordWriter.write"

    class Fill(Callback):
        def on_step_end(self, trainer, metrics, experience):
            if trainer.step == 2:
                mock.patch(writer, full).start()

    trainer.callbacks.insert(0, Fill())
    try:
        with pytest.raises(OSError, match="No space left"):
            trainer.train(5)
    finally:
        mock.patch.stopall()
    assert trainer.step == 2 and not printed.called and threading.excepthook is printed
