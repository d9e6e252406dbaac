"""The calls of the first plan, as its readers type them: each works, or ends in one sentence."""

import inspect
from functools import cache

import pytest
import torch
from helpers import PROMPTS, ROOT, write_images
from torch.utils.data import DataLoader

import glm_grpo
from glm_grpo import (
    GLMImageWrapper,
    I2IDataset,
    MinimalGRPOTrainer,
    T2IDataset,
    simple_reward_function,
)
from glm_grpo.data.basics import refusal
from glm_grpo.toy import ICONS, ToyPainter, icon_images, nearness

TINY = ROOT / "data/tiny-glm-image"
SMALL = {"height": 64, "width": 64, "num_inference_steps": 1, "guidance_scale": 1.0}
NAMES = list(ICONS)[:3]
FEW = {"group_size": 2, "temperature": 3.0, "top_p": 1.0}


@cache
def model_of(component):
    "Shared: a step with the plan's learning rate hardly moves it."
    return GLMImageWrapper(model_name=TINY, component=component, lora=True, device="cpu")


@pytest.fixture
def data(tmp_path):
    "data/t2i and data/i2i as the plan lays them out: prompts.txt and folders of images."
    for mode in ("t2i", "i2i"):
        (tmp_path / mode).mkdir()
        (tmp_path / mode / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
        write_images(tmp_path / mode / "target_images", [(40 * i, 90, 60) for i in range(3)])
    write_images(tmp_path / "i2i/source_images", [(200, 40 * i, 60) for i in range(3)])
    return tmp_path


def text_data(data):
    return T2IDataset(
        prompts_file=data / "t2i/prompts.txt", target_images_dir=data / "t2i/target_images"
    )


def image_data(data):
    return I2IDataset(
        prompts_file=data / "i2i/prompts.txt",
        source_images_dir=data / "i2i/source_images",
        target_images_dir=data / "i2i/target_images",
    )


def trainer_of(loader, model=None, **changes):
    "The arguments come in the order of the plan's second version."
    return MinimalGRPOTrainer(
        model=model or model_of("ar"),
        reward_function=simple_reward_function,
        train_dataloader=loader,
        **SMALL | FEW | changes,
    )


@pytest.mark.parametrize(
    ("make", "options"), [(text_data, {"shuffle": True}), (image_data, {"num_workers": 1})]
)
def test_a_plain_dataloader_trains(data, make, options):
    trainer = trainer_of(DataLoader(make(data), batch_size=1, **options))
    (line,) = trainer.train(num_steps=1)
    assert line["step"] == trainer.step == 1 and -1 < line["reward_mean"] < 0


def test_a_plain_dataloader_gives_what_a_batch_promises(data):
    (batch,) = DataLoader(text_data(data), batch_size=3)
    assert batch["prompts"] == PROMPTS and batch["target_images"].shape == (3, 3, 64, 64)
    (batch,) = DataLoader(T2IDataset(data / "t2i/prompts.txt"), batch_size=3)
    assert batch["target_images"] is None
    (batch,) = DataLoader(image_data(data), batch_size=3)
    assert [row[0].getpixel((0, 0))[1] for row in batch["source_images"]] == [0, 40, 80]


def toy_of(loader, **changes):
    "The same trainer with a model of a few numbers."
    return MinimalGRPOTrainer(ToyPainter(NAMES), loader, nearness, group_size=2, **changes)


def test_items_of_ones_own_dataset_train_through_a_plain_dataloader():
    items = [{"prompt": p, "target": t} for p, t in zip(NAMES, icon_images(NAMES))]
    trainer = toy_of(DataLoader(items, batch_size=2), callbacks=())
    assert len(trainer.train()) == 2 and trainer.last_experience.rollout.prompts[0] == NAMES[2]


def test_train_without_a_number_makes_one_pass():
    items = [{"prompt": p, "target": t} for p, t in zip(NAMES, icon_images(NAMES))]
    trainer = toy_of(DataLoader(items, batch_size=1), callbacks=())
    assert len(trainer.train()) == 3
    assert len(trainer.train()) == 3 and trainer.step == 6
    assert "train(num_steps=100)" in refusal(toy_of(iter([])).train)


def test_progress_is_printed_unless_callbacks_are_given(capsys):
    batch = {"prompts": NAMES, "target_images": icon_images(NAMES)}
    toy_of([batch], callbacks=()).train(1)
    printed = capsys.readouterr()
    assert printed.out + printed.err == ""
    toy_of([batch]).train(1)
    printed = capsys.readouterr()
    assert "reward" in printed.out + printed.err


@pytest.mark.parametrize("component", ["dit", "both"])
def test_a_trainer_has_defaults_that_work(component, data):
    "Nothing but the model, the data and the reward; the size is the model's own."
    dataset = T2IDataset(data / "t2i/prompts.txt", data / "t2i/target_images", image_size=128)
    trainer = MinimalGRPOTrainer(
        model_of(component), DataLoader(dataset, batch_size=1), simple_reward_function, group_size=2
    )
    assert (trainer.options.height, trainer.options.rollout.num_inference_steps) == (128, 3)
    grpo = trainer.options.grpo
    assert (grpo.clip_range, grpo.dit_clip_range) == (0.2, 1e-4)
    (line,) = trainer.train(1)
    for name in trainer.policies:
        prefix = f"{name}/" if component == "both" else ""
        assert line[f"{prefix}old_new_gap"] < 1e-5
    assert trainer.last_experience.rollout.image_tensors.shape[1:] == (3, 128, 128)


def test_generate_with_tracking_needs_prompts_only():
    results = model_of("ar").generate_with_tracking(prompts=PROMPTS[:1])
    assert results["images"][0].size == (128, 128)
    assert results["image_tensors"].shape == (1, 3, 128, 128)
    assert results["log_probs"].shape == (1,) and results["token_ids"].shape == (1, 272)


def test_source_images_may_be_one_per_prompt(data):
    item = image_data(data)[0]
    (source,) = item["source"]
    results = model_of("ar").generate_with_tracking([item["prompt"]], images=[source], **SMALL)
    assert results.source_images == [[source]]
    trainer = trainer_of([], callbacks=())
    images, old_logprobs, token_ids = trainer.generate_samples(
        [item["prompt"]], source_images=[source]
    )
    assert images.shape == (2, 3, 64, 64) and old_logprobs.shape == token_ids.shape
    nested = trainer.generate_samples(item["prompt"], [[source]])
    assert torch.equal(nested[0], images)
    batch = {"prompts": [item["prompt"]], "source_images": [source], "target_images": [source]}
    assert trainer.train_step(batch)["reward_mean"] < 0


def test_log_probs_want_no_mask():
    model = model_of("ar")
    rollout = model.generate_with_tracking(PROMPTS[0], **SMALL, decode=False)
    for call in (model.compute_sequence_logprobs, model.compute_token_logprobs):
        for message in (
            refusal(call, rollout, rollout["token_ids"]),
            refusal(call, rollout, attention_mask=rollout["token_ids"]),
        ):
            assert "attention_mask: a rollout has its own masks" in message


def test_the_models_parts_have_the_plans_names():
    model = model_of("both")
    assert model.ar_model is model.ar and model.dit_model is model.dit
    assert model.tokenizer is model.processor.tokenizer
    weights = set(model.parameters())
    assert set(model.get_trainable_parameters()) < weights
    assert set(model.ar.parameters()) | set(model.dit.parameters()) == weights
    assert next(model.parameters()).device == model.device


@pytest.mark.parametrize("device_map", [None, "auto", "cpu"])
def test_a_device_map_of_one_device_is_that_device(device_map, monkeypatch):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    model = GLMImageWrapper(model_name=TINY, component="ar", device_map=device_map)
    assert model.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_map": {"": 0}}, "is not spread over devices"),
        ({"device_map": "tpu"}, "device 'tpu': unknown"),
        ({"torch_dtype": torch.float16}, "float16 cannot train"),
        ({"torch_dtype": "float16", "lora": True, "component": "dit"}, "float16 cannot train"),
    ],
)
def test_what_a_model_cannot_be_is_told_before_it_is_loaded(options, words, monkeypatch):
    monkeypatch.setattr("glm_grpo.model.wrapper.load_pipeline", None)
    assert words in refusal(GLMImageWrapper, TINY, **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_steps": 5}, "no option num_steps"),
        ({"reward_function": [1]}, "reward_function: for ar it is a list"),
        (
            {"reward_function": {"dit": simple_reward_function}},
            "reward_function: for ar it is a NoneType",
        ),
    ],
)
def test_what_a_trainer_does_not_take_is_told(changes, words):
    arguments = {"train_dataloader": [], "reward_function": simple_reward_function} | changes
    assert words in refusal(MinimalGRPOTrainer, model_of("ar"), **arguments)


def test_the_order_of_the_first_version_is_told():
    "model, tokenizer, dataloader, reward: the reward lands in group_size."
    for reward in (simple_reward_function, {"ar": simple_reward_function}):
        message = refusal(MinimalGRPOTrainer, model_of("ar"), None, [], reward)
        assert "tokenizer: " in message and "model, train_dataloader, reward_function" in message


def test_a_trainer_and_its_model_have_the_plans_attributes():
    trainer = trainer_of([], clip_range=0.1)
    assert trainer.device == trainer.model.device and trainer.tokenizer is trainer.model.tokenizer
    assert trainer.reward_function is simple_reward_function
    assert (trainer.group_size, trainer.clip_range) == (2, 0.1)
    for name, value in SMALL.items():
        assert getattr(trainer, name) == value
    assert trainer.model.train() is trainer.model


def test_the_clip_range_is_that_of_tokens_as_in_yaml():
    grpo = trainer_of([], model_of("both"), clip_range=0.3).options.grpo
    assert (grpo.clip_range, grpo.dit_clip_range) == (0.3, 1e-4)


def test_a_batch_without_prompts_is_told():
    trainer = trainer_of([["a cat"]], callbacks=())
    assert "must be a dict with 'prompts'" in refusal(trainer.train, 1)
    message = refusal(trainer.train_step, {"text": ["a cat"]})
    assert "text" in message


def test_one_denoising_step_leaves_nothing_to_learn():
    batch = {"prompts": PROMPTS[:1], "target_images": torch.rand(1, 3, 64, 64)}
    trainer = trainer_of([batch], model_of("both"), callbacks=())
    assert "Take at least 2 num_inference_steps" in refusal(trainer.train, 1)


def test_objects_say_what_they_are(data):
    trainer = trainer_of(DataLoader(text_data(data)), model_of("both"), num_inference_steps=2)
    assert repr(trainer) == (
        "MinimalGRPOTrainer(ar and dit of tiny-glm-image: step 0, groups of 2, 64 x 64 pixels, "
        "2 denoising steps, learning rate 5e-06)"
    )
    experience = trainer.collect(
        {"prompts": PROMPTS[:1], "target_images": torch.rand(1, 3, 64, 64)}
    )
    assert "2 samples of ar, 4 samples of dit, mean reward -0." in repr(experience)
    assert len(repr(experience)) < 300 > len(repr(experience.samples["ar"]))
    assert "denoising decisions each" in repr(experience.rollout)


def test_public_names_can_be_imported():
    for name in glm_grpo.__all__:
        assert inspect.isclass(getattr(glm_grpo, name)) or callable(getattr(glm_grpo, name))
