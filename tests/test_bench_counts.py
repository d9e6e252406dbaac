"""Bounds on what a step consists of, at the published sizes and from shapes alone."""

import copy

import pytest
import torch
from peft.tuners.lora import Linear as PeftLinear

from glm_grpo.bench.counts import CountedWork, build_published_dit, count, count_denoising
from glm_grpo.bench.counts import count_published, counts_table
from glm_grpo.model.adapters import LoraOptions, add_lora
from glm_grpo.model.sizes import PUBLISHED, build_ar, published_layout
from glm_grpo.run.command_line import parse_args
from glm_grpo.run.plan import Step, forward_flop

# operators of a decode step that calls the model's own layers and peft's adapters
OPERATORS_ONE_BY_ONE = 3559
LARGEST_SHARE_OF_BYTES = 1.3  # of a DiT forward pass: with adapters over without


@pytest.fixture(scope="module")
def lines():
    return {(line["name"][:3], line["adapters"]): line for line in count_published()}


def test_a_decode_step_is_a_tenth_of_the_launches(lines):
    adapted = lines["AR,", True]
    assert adapted["launches"] <= OPERATORS_ONE_BY_ONE / 10
    assert adapted["launches"] == 1  # a graph is one launch, whatever it holds
    assert adapted["operators"] < OPERATORS_ONE_BY_ONE / 3  # so its operators have a bound too


def test_adapters_of_the_dit_move_few_bytes(lines):
    plain, adapted = lines["DiT", False], lines["DiT", True]
    assert plain["bytes"] < adapted["bytes"] <= LARGEST_SHARE_OF_BYTES * plain["bytes"]
    assert plain["flop"] < adapted["flop"] < 1.01 * plain["flop"]


def share_of_bytes(in_float32):
    "Bytes with adapters over bytes without, of one block at the published width."
    dit = build_published_dit({"dit": PUBLISHED["dit"] | {"num_layers": 1}})
    plain = count_denoising(dit, CountedWork())
    add_lora(dit, LoraOptions(), half="dit")
    for layer in dit.modules():
        if in_float32 and isinstance(layer, PeftLinear):
            layer.__class__ = PeftLinear
    return count_denoising(dit, CountedWork()).bytes / plain.bytes


def test_the_bound_would_notice_adapters_in_float32():
    assert share_of_bytes(in_float32=False) < LARGEST_SHARE_OF_BYTES
    assert share_of_bytes(in_float32=True) > 1.5 * LARGEST_SHARE_OF_BYTES


def test_counts_by_hand():
    x, y = torch.empty(3, 5, device="meta"), torch.empty(7, 5, device="meta").bfloat16()
    product = count(lambda: x @ y.float().T)  # a copy in float32, a view, a product
    assert product.names == {"_to_copy": 1, "mm": 1}
    assert product.bytes == 35 * (2 + 4) + 4 * (15 + 35 + 21)
    assert product.flop == 2 * 3 * 5 * 7


def test_the_table_has_a_line_per_work(lines):
    text = counts_table(list(lines.values()), CountedWork())
    assert text.count("| none |") == text.count("| rank 16 |") == 2


@pytest.fixture(scope="module")
def recipe():
    "`real_both_80gb` with the sizes that are counted: 64 prompt tokens, 32 rows at a time."
    words = "--config configs/real_both_80gb.yaml --rollout.token_batch_size 32"
    config = parse_args([*words.split(), "--training.batch_size", "4"])
    return Step(config, published_layout())


def test_the_dry_runs_formulas_agree_with_the_counts(lines, recipe):
    assert recipe.rows == 32
    read = (recipe.ar.weights + recipe.rows * recipe.ar.tokens * recipe.cache) * recipe.bytes
    assert read == pytest.approx(lines["AR,", False]["bytes"], rel=0.05)
    images = CountedWork().images
    assert images * forward_flop(recipe.dit) == pytest.approx(lines["DiT", False]["flop"], rel=0.05)


def test_the_formula_of_an_ar_pass_agrees_with_the_count(recipe):
    config = copy.deepcopy(PUBLISHED["ar"])
    config["text_config"]["num_hidden_layers"] = 4
    text_model = build_ar(config).model.language_model
    ids = torch.empty(1, recipe.ar.tokens, dtype=torch.long, device="meta")
    positions = torch.empty(3, 1, recipe.ar.tokens, dtype=torch.long, device="meta")
    embedded = torch.empty(*ids.shape, 4096, dtype=torch.bfloat16, device="meta")
    found = count(
        lambda: text_model(inputs_embeds=embedded, position_ids=positions, use_cache=False)
    )
    head = 2 * recipe.ar.tokens * 4096 * 16512
    assert 10 * found.flop + head == pytest.approx(forward_flop(recipe.ar), rel=0.05)
