"Fast tests of the data floor: what is refused, and orders that must stay as they are."

import datetime
import io
import itertools
import json
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from glm_grpo.data.basics import atomic_dir, refusal
from glm_grpo.data.images import load_image, match_images, pil_to_tensor, tensor_to_pil
from glm_grpo.data.loader import PromptLoader, endless_batches
from glm_grpo.data.prompts import I2IDataset, T2IDataset, read_records, read_rows, split_off
from glm_grpo.rewards.scenes import Drawings, parse_prompt
from glm_grpo.model.tokens import check_source_sizes

ROOT = Path(__file__).parent.parent
COLORS = [(220, 40, 40), (40, 160, 60), (40, 80, 220)]
PROMPTS = ["a red disc", "a green disc", "a blue disc"]
OBJECTS = ["cat", "dog", "fish", "strawberry"]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def save_images(folder, names, size=(8, 8)):
    folder.mkdir(exist_ok=True)
    for name, color in zip(names, itertools.cycle(COLORS)):
        Image.new("RGB", size, color).save(folder / name)
    return folder


# the order of the prompts


def loader(n, batch_size, **options):
    "Of n prompts without images."
    names = ("prompt", "target", "metadata", "index")
    items = [dict(zip(names, (f"prompt {i}", None, {}, i))) for i in range(n)]
    return PromptLoader(items, batch_size, **options)


def batches(loader, number):
    return [batch["indices"] for batch in itertools.islice(loader, number)]


def test_order_is_the_one_of_earlier_runs():
    "A checkpoint of an older version continues in the same order."
    assert batches(loader(6, 6), 2) == [[3, 4, 2, 0, 1, 5], [0, 1, 2, 3, 4, 5]]
    assert batches(loader(6, 4, seed=0), 3) == [[3, 4, 2, 0], [1, 5, 0, 1], [2, 3, 4, 5]]


def test_ranks_together_see_what_one_rank_sees_also_after_a_stop():
    world = 3
    alone = batches(loader(10, 6, seed=7), 9)
    shares = []
    for rank in range(world):
        stopped, resumed = (loader(10, 6, seed=7, rank=rank, world=world) for _ in range(2))
        head = batches(stopped, world)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        shares.append(head + batches(resumed, 9 - world))
    assert [sum(parts, []) for parts in zip(*shares)] == alone


def test_states_and_batches_that_cannot_be_used_are_refused():
    state = loader(10, 4, seed=7).state_dict()
    for other in (loader(11, 4, seed=7), loader(10, 5, seed=7), loader(10, 4, seed=8)):
        assert "Use the same" in refusal(other.load_state_dict, state) and other.batches == 0
    for broken in ({"n": 10}, [1], state | {"batches": None}):
        assert "checkpoint" in refusal(loader(10, 4).load_state_dict, broken)
    for number, batch_size, world in ((0, 1, 1), (1, 0, 1), (10, 4, 3)):
        assert "training.batch_size" in refusal(loader, number, batch_size, world=world)
    assert "no batches" in refusal(next, endless_batches([]))


def test_a_record_ends_where_its_line_ends(tmp_path):
    path = tmp_path / "history.jsonl"
    records = [{"prompts": "a cat\u2028on\u2029a\x85mat"}, {"prompts": "a dog"}]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text(text, encoding="utf-8")
    assert read_records(path, {"prompts": str}) == records


def test_a_loader_without_a_length_trains_from_its_start():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(itertools.count())

    batches = endless_batches(torch.utils.data.DataLoader(Endless(), batch_size=None))
    assert list(itertools.islice(batches, 3)) == [0, 1, 2]
    assert "has no length" in refusal(endless_batches, Endless(), 1)


# prompt files


@pytest.mark.parametrize(
    "name, content, place",
    [
        ("a.txt", "\n  \n", "a.txt, line 1"),
        ("a.txt", "a cat\na dog\n\n", "a.txt, line 3"),
        ("a.txt", "a cat\n".encode("utf-16"), "a.txt, line 1: not UTF-8"),
        ("a.tar", "a cat\n", ".tar"),
        ("a.csv", "name,label\na,b\n", "The columns are name, label"),
        ("a.csv", "prompt,target\na,b\na, red, cat\n", "a.csv, row 2"),
        ("a.csv", 'prompt\n"a cat\n', "a.csv, row 1"),
        ("a.csv", 'prompt,metadata\na,"{1}"\n', "row 1, metadata"),
        ("a.csv", 'prompt,source\na,"[1]"\n', "row 1: a wrong value: 'source'"),
    ],
)
def test_bad_prompt_files_are_refused_with_their_place(tmp_path, name, content, place):
    assert place in refusal(read_rows, write(tmp_path / name, content))


@pytest.mark.parametrize(
    "line, part",
    [
        ('["a cat"]', "JSON object"),
        ('{"prompt": "a cat", "Targets": "a.png"}', "the key 'Targets' is nearly target"),
        ('{"promt": "a cat", "' + "k" * 5000 + '": 1}', "'promt' is nearly prompt"),
        ('{"prompt": "  "}', "no prompt"),
        ('{"prompt": 3}', "'prompt': 3"),
        ('{"prompt": "a", "target": ["a.png"]}', "'target'"),
        ('{"prompt": "a", "metadata": "' + "m" * 5000 + '"}', "'metadata'"),
        ('{"prompt": "a", "metadata": {"n": ' + "9" * 5000 + "}}", "JSON"),
    ],
)
def test_bad_json_lines_are_refused_with_their_line(tmp_path, line, part):
    found = refusal(read_rows, write(tmp_path / "bad.jsonl", '{"prompt": "fine"}\n' + line))
    assert "bad.jsonl, line 2:" in found and part in found
    assert len(found) < 1000 and found.encode()


def test_images_behind_broken_links_are_named(tmp_path):
    prompts = write(tmp_path / "prompts.txt", "\n".join(PROMPTS))
    targets = save_images(tmp_path / "targets", ["0.png", "1.png"])
    for goal in ("gone.png", "2.png"):
        (targets / "2.png").symlink_to(goal)
        assert f"2.png leads to {goal}" in refusal(T2IDataset, prompts, targets)
        (targets / "2.png").unlink()


def test_image_names_that_are_not_utf8_are_opened(tmp_path):
    "Only their number counts."
    prompts = write(tmp_path / "prompts.txt", "a red disc")
    targets = save_images(tmp_path / "targets", ["0.png"])
    os.rename(targets / "0.png", os.fsencode(targets) + b"/\xff0.png")
    assert T2IDataset(prompts, targets)[0]["target"].shape == (3, 8, 8)


def test_a_prompt_file_of_the_package_is_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(read_rows("data/t2i/train/prompts.txt")[0]) == 96
    assert "data/t2i/train/prompts.txt" in refusal(read_rows, "data/t2i/prompts.txt")


# tables


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_of_spreadsheets(tmp_path, separator):
    lines = ["Prompt|TARGET|weight|metadata", 'a|0.png|3|"{""k"": [1]}"', '"two\nlines"|1.png||']
    text = "\ufeff" + "\r\n".join(lines).replace("|", separator) + "\r\n\r\n"
    path = write(tmp_path / "table.CSV", text)
    assert read_rows(path)[0] == [
        {"prompt": "a", "target": "0.png", "metadata": {"weight": "3", "k": [1]}},
        {"prompt": "two\nlines", "target": "1.png", "metadata": {"weight": ""}},
    ]
    save_images(tmp_path, ["0.png", "1.png"])
    dataset = T2IDataset(path)
    assert dataset[1]["target"].shape == (3, 8, 8) and dataset.where(1).endswith("CSV, row 2")


def test_sources_of_a_csv_may_be_a_list(tmp_path):
    save_images(tmp_path, ["0.png", "1.png"])
    path = write(tmp_path / "edits.csv", 'caption,source\na,"[""1.png"", ""0.png""]"\nNA,0.png\n')
    dataset = I2IDataset(path, None)
    assert [[p.name for p in row] for row in dataset.sources] == [["1.png", "0.png"], ["0.png"]]
    assert dataset.prompts == ["a", "NA"] and dataset.notes == ["column 'caption' as prompt"]


def png(color):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(file, "png")
    return file.getvalue()


@pytest.fixture
def flowers():
    "A dataset as they are shared: captions, images in cells, and other columns."
    datasets = pytest.importorskip("datasets")
    columns = {
        "text": ["a rose", "a tulip"],
        "image": [{"bytes": png(color), "path": None} for color in COLORS[:2]],
        "label": [3, None],
        "day": [datetime.date(2026, 1, 19)] * 2,
    }
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())


def check_flowers(dataset):
    assert dataset.prompts == ["a rose", "a tulip"]
    assert dataset.where(1).endswith("row 2")
    assert dataset[0]["metadata"] == {"label": 3, "day": "2026-01-19"}
    expected = pil_to_tensor(Image.new("RGB", (8, 8), COLORS[1]))[0]
    assert torch.equal(dataset[1]["target"], expected)
    assert {"column 'text' as prompt", "column 'image' as target"} <= set(dataset.notes)


def test_datasets_saved_in_each_form(tmp_path, flowers):
    from datasets import DatasetDict

    flowers.save_to_disk(tmp_path / "saved")
    check_flowers(T2IDataset(tmp_path / "saved"))
    DatasetDict({"train": flowers, "test": flowers}).save_to_disk(tmp_path / "splits")
    in_splits = T2IDataset(tmp_path / "splits")
    check_flowers(in_splits)
    assert "split 'train'" in in_splits.notes
    check_flowers(T2IDataset(tmp_path / "splits" / "test"))
    (tmp_path / "hub" / "data").mkdir(parents=True)
    flowers.to_parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    flowers.select([0]).to_parquet(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet")
    check_flowers(T2IDataset(tmp_path / "hub"))
    check_flowers(T2IDataset(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet"))


def test_datasets_that_are_none_are_refused(tmp_path, flowers):
    import pyarrow.parquet
    from datasets import DatasetDict

    DatasetDict({"a": flowers, "b": flowers}).save_to_disk(tmp_path / "ab")
    assert "no split 'train'" in refusal(read_rows, tmp_path / "ab")
    flowers.save_to_disk(tmp_path / "torn")
    (tmp_path / "torn" / "data-00000-of-00001.arrow").write_bytes(b"ARROW")
    assert "torn: " in refusal(read_rows, tmp_path / "torn")
    empty = pyarrow.table({"prompt": pyarrow.array([], "string")})
    pyarrow.parquet.write_table(empty, tmp_path / "empty.parquet")
    assert "empty.parquet: " in refusal(read_rows, tmp_path / "empty.parquet")
    write(tmp_path / "text.parquet", "a cat")
    assert "text.parquet: " in refusal(read_rows, tmp_path / "text.parquet")
    flowers.remove_columns("text").to_parquet(tmp_path / "mute.parquet")
    assert "no column 'prompt'" in refusal(read_rows, tmp_path / "mute.parquet")
    (tmp_path / "nothing").mkdir()
    write(tmp_path / "nothing" / "text_prompts.jsonl", '{"prompt": "a"}')
    assert "nothing: no Parquet" in refusal(read_rows, tmp_path / "nothing")
    half = flowers.to_dict()
    half["image"][1]["bytes"] = half["image"][1]["bytes"][:50]
    flowers.from_dict(half).to_parquet(tmp_path / "half.parquet")
    assert "half.parquet, row 2, image: " in refusal(T2IDataset, tmp_path / "half.parquet")


def test_images_in_cells_are_sources_of_edits(tmp_path):
    datasets = pytest.importorskip("datasets")
    cells = [{"bytes": png(color), "path": None} for color in COLORS[:2]]
    columns = {"prompt": ["redder", "greener"], "source": cells, "target": cells[::-1]}
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "edits.parquet")
    item = I2IDataset(tmp_path / "edits.parquet", None, image_size=4)[1]
    assert item["source"][0].getpixel((0, 0)) == COLORS[1]
    assert torch.equal(item["target"][:, 0, 0], torch.tensor(COLORS[0]) / 255)


GENEVAL = [
    {
        "tag": "counting",
        "include": [{"class": "cat", "count": 3}],
        "exclude": [{"class": "cat", "count": 4}],
        "prompt": "a photo of three cats",
    },
    {
        "tag": "colors",
        "include": [{"class": "car", "count": 1, "color": "red"}],
        "prompt": "a photo of a red car",
    },
    {
        "tag": "position",
        "include": [
            {"class": "cat", "count": 1},
            {"class": "dog", "count": 1, "position": ["right of", 0]},
        ],
        "prompt": "a photo of a dog right of a cat",
    },
]


def test_rows_of_geneval_are_the_same_from_each_kind_of_file(tmp_path):
    "Tables give absent keys as None; datasets 5 gives clauses of mixed types as JSON text."
    datasets = pytest.importorskip("datasets")
    lines = write(tmp_path / "g.jsonl", "\n".join(map(json.dumps, GENEVAL)))
    expected = read_rows(lines)[0]
    assert expected[1]["metadata"] == {key: GENEVAL[1][key] for key in ("tag", "include")}
    plain = datasets.Dataset.from_list(GENEVAL[:2])
    assert plain[0]["include"][0]["color"] is None and plain[1]["exclude"] is None
    found = [(plain, expected[:2])]
    if hasattr(datasets, "Json"):
        mixed = datasets.load_dataset("json", data_files=str(lines), cache_dir=tmp_path / "cache")
        found.append((mixed["train"], expected))
    for i, (dataset, records) in enumerate(found):
        dataset.to_parquet(tmp_path / f"{i}.parquet")
        dataset.save_to_disk(tmp_path / f"saved_{i}")
        assert read_rows(tmp_path / f"{i}.parquet")[0] == records
        assert read_rows(tmp_path / f"saved_{i}")[0] == records
    rows = ["prompt,tag,include,exclude"]
    for row in GENEVAL:
        clauses = [json.dumps(row[key]) if key in row else "" for key in ("include", "exclude")]
        cells = [row["prompt"], row["tag"], *clauses]
        rows.append(",".join('"' + cell.replace('"', '""') + '"' for cell in cells))
    records = read_rows(write(tmp_path / "g.csv", "\n".join(rows)))[0]
    for record in records:
        if not record["metadata"]["exclude"]:
            del record["metadata"]["exclude"]
    assert records == expected
    pythons = "prompt,include\na cat,\"[{'class': 'cat', 'count': 1}]\""  # as pandas writes it
    assert "row 1, include: not valid JSON" in refusal(
        read_rows, write(tmp_path / "p.csv", pythons)
    )


def test_a_tsv_has_one_row_per_line(tmp_path):
    lines = ["Prompt\tCategory\tNote", '"G O" in paint\tWords\t', '"open\tWords\t"', "a cat\tA\tb"]
    records = read_rows(write(tmp_path / "parti.tsv", "\n".join(lines) + "\n"))[0]
    assert [record["prompt"] for record in records] == ['"G O" in paint', '"open', "a cat"]
    assert records[1]["metadata"] == {"Category": "Words", "Note": '"'}
    spreadsheet = 'prompt\tn\n"a sign ""GO"" there"\t1\n"STOP"\t2\n'
    records = read_rows(write(tmp_path / "sheet.tsv", spreadsheet))[0]
    assert [record["prompt"] for record in records] == ['a sign "GO" there', '"STOP"']
    all_quoted = '"prompt"\t"n"\n"two\nlines"\t"1"\n'
    assert read_rows(write(tmp_path / "all.tsv", all_quoted))[0][0]["prompt"] == "two\nlines"
    one = read_rows(write(tmp_path / "one.tsv", "prompt\na cat, a dog; a fish\n"))[0]
    assert one == [{"prompt": "a cat, a dog; a fish"}]
    short = write(tmp_path / "short.tsv", 'prompt\tn\na\t1\n"two\nlines"\t2\n')
    assert "row 2: fewer cells" in refusal(read_rows, short)


def test_a_folder_of_txt_files_has_one_prompt_per_file(tmp_path):
    for name in ("10.txt", "2.txt", "whoops9.txt"):
        write(tmp_path / name, f"the prompt of {name}")
    write(tmp_path / "10.png", "")
    dataset = T2IDataset(tmp_path)
    assert dataset.prompts == [
        f"the prompt of {name}" for name in ("2.txt", "10.txt", "whoops9.txt")
    ]
    assert dataset.where(1) == str(tmp_path / "10.txt")
    write(tmp_path / "color_val.txt", "a red cat\na blue dog\n")
    message = refusal(read_rows, tmp_path)
    assert "color_val.txt: several lines" in message and "data.prompts_file" in message
    assert len(read_rows(tmp_path / "color_val.txt")[0]) == 2


def test_other_names_for_our_keys(tmp_path):
    "Without ours, and images only where the value names one. 2_data/04_prompts has the forms."
    edit = {
        "Instruction": "redder",
        "input_image": ["0.png"],
        "edited_image": "https://a.org/1.png",
    }
    rows = [edit, {"prompt": "a", "text": ["GO"], "image": "0.png", "include": None}]
    renamed = {"prompt": "redder", "source": ["0.png"]}
    expected = [renamed | {"metadata": {"edited_image": edit["edited_image"]}}]
    expected.append(
        {"prompt": "a", "metadata": {k: rows[1][k] for k in ("text", "image", "include")}}
    )
    lines = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    for path in (lines, write(tmp_path / "a.json", json.dumps(rows))):
        records, _, notes = read_rows(path)
        assert records == expected
        assert notes == ["key 'Instruction' as prompt", "key 'input_image' as source"]
    table = write(tmp_path / "a.csv", 'prompt,image_path,text\na,0.png,"[""GO""]"\n')
    records, _, notes = read_rows(table)
    assert records[0]["metadata"] == {"image_path": "0.png", "text": ["GO"]} and notes == []


def test_a_json_file_is_a_list(tmp_path):
    def path(value):
        return write(tmp_path / "a.json", json.dumps(value))

    assert read_rows(path({"data": ["a", {"prompt": "b"}]}))[0] == [
        {"prompt": "a"},
        {"prompt": "b"},
    ]
    for value in ({"prompt": "a", "tags": ["b"]}, [], {}, "a", 3):
        assert "a.json: no list of prompts" in refusal(read_rows, path(value))
    for value in (3, ["a"], {"promt": "a"}, ""):
        assert "a.json, entry 2: " in refusal(read_rows, path(["a", value]))


def test_the_training_part_of_a_folder_of_flow_grpo_is_read(tmp_path):
    write(tmp_path / "train.txt", "a train\n")
    write(tmp_path / "test.txt", "a test\n")
    assert len(read_rows(tmp_path)[0]) == 2  # a folder with one prompt per file
    write(tmp_path / "train.txt", "a train\na cat\n")
    records, places, notes = read_rows(tmp_path)
    assert [row["prompt"] for row in records] == ["a train", "a cat"]
    assert places[1] == f"{tmp_path}/train.txt, line 2" and notes == ["split 'train'"]
    assert T2IDataset(tmp_path).prompts_file == tmp_path


@pytest.mark.parametrize(
    "files, read",
    [
        ("default/train/0000 default/train/0001 default/test/0000", [0, 1]),
        ("default/partial-train/0000 default/partial-test/0000", [0]),
        ("data/test-00000-of-00001-0a1b data/train-00000-of-00001-0a1b", [1]),
        ("train/shard1 train/shard2 val/shard1", [0, 1]),
        ("flowers_test flowers_train", [1]),
        ("train2017 val2017", [0]),
        ("data/test-00000-of-00001", [0]),
        ("default/fold1/0000 default/fold1/0001", [0, 1]),
        ("part1 part2", [0, 1]),
        (
            "data/train_sft-00000-of-00001 data/train_gen-00000-of-00001",
            "splits: train_gen, train_sft",
        ),
        ("0000 0001", [0, 1]),
        ("data/test-00000-of-00001 data/validation-00000-of-00001", "splits: test, validation"),
        ("default/fold1/0000 default/fold2/0000", "splits: fold1, fold2"),
        ("default/train/0000 hard/train/0000", "configurations: default, hard"),
        ("easy/train-00000-of-00001 hard/train-00000-of-00001", "configurations: easy, hard"),
        ("train-00000-of-00001 partial-train-00000-of-00001", "splits: partial-train, train"),
    ],
)
def test_one_split_of_one_configuration_is_read(tmp_path, files, read):
    "The hub's folders of Parquet files, of which each has its number as its prompt."
    pytest.importorskip("datasets")
    import pyarrow
    import pyarrow.parquet

    for i, name in enumerate(files.split()):
        file = tmp_path / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"prompt": [f"prompt {i}"]}), file)
    if isinstance(read, str):
        message = refusal(read_rows, tmp_path)
        assert read in message and "data.prompts_file" in message
        if read.startswith("configurations"):
            folder = next(one for one in tmp_path.iterdir() if one.is_dir())
            assert len(read_rows(folder)[0]) == 1
    else:
        assert [row["prompt"] for row in read_rows(tmp_path)[0]] == [f"prompt {i}" for i in read]


def test_an_image_column_with_paths_is_read_by_its_paths(tmp_path):
    pytest.importorskip("datasets")
    import pyarrow
    import pyarrow.parquet

    save_images(tmp_path, ["0.png", "1.png"])
    names, files = ["0.png", "1.png"], [tmp_path / "0.png", tmp_path / "1.png"]
    forms = {
        "objects": [{"bytes": None, "path": name} for name in names],
        "paths": names,
        "binary": [file.read_bytes() for file in files],
        "struct": [{"bytes": file.read_bytes()} for file in files],
        "some": [None, "1.png"],
        "urls": ["https://a.org/0.png", "https://a.org/1.png"],
    }
    for form, cells in forms.items():
        path = tmp_path / f"{form}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "image": cells}), path)
    for form in ("objects", "paths", "binary", "struct"):
        target = T2IDataset(tmp_path / f"{form}.parquet")[1]["target"]
        assert torch.equal(target[:, 0, 0], torch.tensor(COLORS[1]) / 255)
    assert "row 1: no 'target'" in refusal(T2IDataset, tmp_path / "some.parquet")
    urls = T2IDataset(tmp_path / "urls.parquet")
    assert urls.targets is None and urls[0]["metadata"] == {"image": "https://a.org/0.png"}
    assert urls.notes == ["column 'image' as metadata: it names no image files"]
    (tmp_path / "1.png").unlink()
    assert "1.png: no such image" in refusal(T2IDataset, tmp_path / "objects.parquet")


def test_only_the_columns_that_are_needed_are_read(tmp_path):
    pytest.importorskip("datasets")
    import pyarrow
    import pyarrow.parquet

    side = [{"bytes": os.urandom(100_000), "path": None} for _ in range(200)]  # 20 MB
    lists = [[one["bytes"]] for one in side]
    columns = {"prompt": ["a"] * 200, "n": range(200), "jpg_0": side, "jpgs": lists}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "wide.parquet")
    usual = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(usual)
    pyarrow.set_memory_pool(pool)
    try:
        records = read_rows(tmp_path / "wide.parquet")[0]
    finally:
        pyarrow.set_memory_pool(usual)
    assert records[3] == {"prompt": "a", "metadata": {"n": 3}} and pool.max_memory() < 2e6


# which prompts are held out


@pytest.mark.parametrize("number, held", [(9, 0), (10, 2), (30, 3), (1500, 100)])
def test_how_many_are_held_out_and_which(tmp_path, number, held):
    lines = "\n".join(f"flower {i}" for i in range(number))
    training, held_out = split_off(T2IDataset(write(tmp_path / "prompts.txt", lines)))
    if held:
        assert (len(training), len(held_out)) == (number - held, held)
    else:
        assert training is held_out and len(training) == number
    if number == 30:  # a checkpoint of an older version is evaluated on the same ones
        assert held_out.prompts == ["flower 2", "flower 24", "flower 28"]


def coloured(path, colour, size=(64, 64)):
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return str(path)


def test_images_follow_their_prompts_when_some_are_held_out(tmp_path):
    for folder in ("sources", "targets"):
        for i in range(20):
            coloured(tmp_path / folder / f"{i}.png", (i, 90, 60))
    prompts = write(tmp_path / "prompts.txt", "\n".join(["make it red"] * 20))
    edits = I2IDataset(prompts, tmp_path / "sources", tmp_path / "targets")
    for part in split_off(edits):
        for i in range(len(part)):
            number = int(part.where(i).split()[-1]) - 1  # of the image
            assert part.targets[i].name == part.sources[i][0].name == f"{number}.png"
            assert part[i]["source"][0].getpixel((0, 0)) == (number, 90, 60)
    assert len(split_off(edits)[1]) == 2  # one prompt, but twenty edits


def test_edits_are_told_apart_by_the_pixels_of_their_sources(tmp_path):
    red, blue, copied = ("a/1.png", "red"), ("b/1.png", "blue"), ("a/2.png", "red")
    sources = [coloured(tmp_path / name, colour) for name, colour in (red, blue, copied)]
    rows = [json.dumps({"prompt": "make it green", "source": source}) for source in sources]
    first, other, same = I2IDataset(write(tmp_path / "edits.jsonl", "\n".join(rows)), None).keys()
    assert first == same != other


def test_a_note_counts_images_that_lose_much_by_cropping(tmp_path):
    sizes = (64, 64), (70, 64), (72, 64), (64, 128)
    rows = []
    for i, size in enumerate(sizes):
        source = coloured(tmp_path / f"{i}.png", (i, 0, 0), size)
        rows.append(json.dumps({"prompt": "make it green", "source": source}))
    file = write(tmp_path / "edits.jsonl", "\n".join(rows))
    assert I2IDataset(file, None).notes == []
    lost = "2 of 4 source images lose more than a tenth by cropping to 64 x 64, at most 50%"
    assert I2IDataset(file, None, image_size=64).notes == [lost]


@pytest.mark.parametrize(
    "size, fits",
    [((2048, 512), True), ((480, 512), False), ((512, 2080), False), ((1000, 1024), False)],
)
def test_sources_in_sizes_that_the_published_model_does_not_read_are_refused(tmp_path, size, fits):
    source = coloured(tmp_path / "1.png", "red", size)
    row = json.dumps({"prompt": "make it green", "source": source})
    edits = I2IDataset(write(tmp_path / "edits.jsonl", row), None)
    if fits:
        check_source_sizes(edits)
    else:
        message = refusal(check_source_sizes, edits)
        assert "line 1: a source image has" in message and "sides of 512 to 2048" in message


def test_a_row_of_geneval_keeps_its_images(tmp_path):
    source = coloured(tmp_path / "1.png", "red")
    row = {"prompt": "a cat", "include": [{"class": "cat", "count": 1}], "source": source}
    file = write(tmp_path / "rows.jsonl", json.dumps(row | {"target": source}))
    edits = I2IDataset(file, None)
    assert edits[0]["metadata"] == {"include": row["include"]}
    assert edits[0]["source"][0].size == (64, 64) and edits[0]["target"].shape == (3, 64, 64)


# which image belongs to which prompt


@pytest.mark.parametrize(
    "names, message",
    [
        (["0.png", "1.png", "2.png", "3.png"], "4 images for 3 prompts; without a partner: 3.png"),
        (["0.png", "1.png", "2.png", "0.jpg"], "without a partner: 0."),
        (["cat.png", "dog.png", "bird.png"], "without a partner: line 1, line 2, line 3"),
        (["1.png", "2.png"], "line 3"),
    ],
)
def test_images_that_do_not_match_are_refused(tmp_path, names, message):
    assert message in refusal(match_images, save_images(tmp_path / "images", names), PROMPTS)
    assert "nowhere: no such folder" in refusal(match_images, tmp_path / "nowhere", PROMPTS)


def test_other_files_and_hidden_files_are_ignored(tmp_path):
    folder = save_images(tmp_path / "images", ["0.PNG", "1.png", "2.png"])
    for name in ("notes.txt", ".3.png"):
        write(folder / name, "")
    assert [file.name for file in match_images(folder, PROMPTS)] == ["0.PNG", "1.png", "2.png"]


# datasets


def test_dataset_refuses_a_broken_image_before_training(tmp_path):
    prompts = write(tmp_path / "prompts.txt", "\n".join(PROMPTS))
    targets = save_images(tmp_path / "targets", ["0.png", "1.png", "2.png"])
    write(targets / "1.png", (targets / "1.png").read_bytes()[:50])
    assert "1.png: a broken image" in refusal(T2IDataset, prompts, targets)
    assert "1.png: a broken image" in refusal(I2IDataset, prompts, targets)
    Image.new("RGB", (24, 8)).save(targets / "1.png")
    assert "Set data.image_size" in refusal(T2IDataset, prompts, targets)
    assert T2IDataset(prompts, targets, image_size=(4, 6))[1]["target"].shape == (3, 4, 6)


def test_all_lines_have_images_or_none(tmp_path):
    prompts = write(tmp_path / "prompts.txt", "make it green")
    assert "needs source images" in refusal(I2IDataset, prompts, None)
    save_images(tmp_path, ["0.png"])
    for key, value in (("target", None), ("source", None), ("source", [])):
        second = {"prompt": "b"} if value is None else {"prompt": "b", key: value}
        lines = [json.dumps({"prompt": "a", key: "0.png"}), json.dumps(second)]
        path = write(tmp_path / "partly.jsonl", "\n".join(lines))
        assert f"partly.jsonl, line 2: no '{key}'" in refusal(I2IDataset, path, None)
    gone = write(tmp_path / "gone.jsonl", '{"prompt": "a", "source": ["0.png", "9.png"]}')
    assert "9.png: no such image" in refusal(I2IDataset, gone, None)


def test_several_sources_are_loaded_in_their_order_relative_to_the_folder(tmp_path):
    images = save_images(tmp_path / "images", ["0.png", "1.png", "2.png"])
    path = write(tmp_path / "edits.jsonl", '{"prompt": "a", "source": ["2.png", "0.png"]}')
    [item] = I2IDataset(path, images, image_size=4)
    colors = [image.getpixel((0, 0)) for image in item["source"]]
    assert colors == [COLORS[2], COLORS[0]]
    assert [image.size for image in item["source"]] == [(4, 4)] * 2


# images


def test_tensor_to_pil_reads_half_precision_and_gradients():
    tensor = torch.full((3, 2, 2), 0.2, dtype=torch.bfloat16, requires_grad=True)
    assert tensor_to_pil(tensor)[0].getpixel((0, 0)) == (51, 51, 51)


@pytest.mark.parametrize("mode", ["L", "1", "CMYK", "RGBA", "I;16"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    Image.new(mode, (4, 2)).save(tmp_path / "image.tiff")
    image = load_image(tmp_path / "image.tiff")
    assert image.mode == "RGB" and image.size == (4, 2)


LEVELS = np.arange(65536, dtype=np.uint16).reshape(256, 256)


@pytest.mark.parametrize(
    "name, levels, mode",
    [
        ("ramp.png", LEVELS, "I;16"),
        ("big_endian.tiff", LEVELS.astype(">u2"), "I;16B"),
        ("whole.tiff", LEVELS.astype(np.int32), "I"),
        ("unit.tiff", (LEVELS / 65535).astype(np.float32), "F"),
        ("byte.tiff", (LEVELS / 257).astype(np.float32), "F"),
        ("float.tiff", LEVELS.astype(np.float32), "F"),
        ("rotated.png", LEVELS, "I;16"),
    ],
)
def test_grey_levels_above_255_keep_their_brightness(tmp_path, name, levels, mode):
    exif = Image.Exif()
    if name == "rotated.png":
        exif[274] = 6
    Image.fromarray(levels).save(tmp_path / name, exif=exif)
    with Image.open(tmp_path / name) as image:
        assert image.mode == mode
        assert pil_to_tensor(image).mean().item() == pytest.approx(0.5, abs=1e-4)
    pixels = np.asarray(load_image(tmp_path / name))
    assert pixels.shape == (256, 256, 3)
    assert pixels.mean() == pytest.approx(127.5, abs=0.01)
    assert (pixels.min(), pixels.max()) == (0, 255)
    dark = Image.fromarray((levels / 1000).astype(levels.dtype))
    if mode.startswith("I;16"):  # a dark image is not made brighter
        dark.save(tmp_path / name)
        assert np.asarray(load_image(tmp_path / name)).max() == 0


def test_palette_with_a_transparent_colour_becomes_white(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([0, 255, 0, 255, 0, 0])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "palette.png", transparency=0)
    pixels = np.asarray(load_image(tmp_path / "palette.png"))
    assert pixels.tolist() == [[[255, 255, 255], [255, 0, 0]]]


# files


def test_every_file_of_a_folder_is_synced_before_the_rename(tmp_path, monkeypatch):
    calls, real_open, real_replace = [], os.open, os.replace

    def recorded_open(path, *args, **kwargs):
        calls.append(os.path.basename(path))
        return real_open(path, *args, **kwargs)

    with atomic_dir(tmp_path / "step_1") as folder:
        write(folder / "weights", "A")
        (folder / "inner").mkdir()
        write(folder / "inner" / "options", "B")
        monkeypatch.setattr(os, "open", recorded_open)
        renamed = mock.Mock(
            side_effect=lambda *names: calls.append("rename") or real_replace(*names)
        )
        monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.undo()
    assert {*calls[:-2]} == {"weights", "inner", "options", folder.name}
    assert calls[-2:] == ["rename", tmp_path.name]


# scenes and edits


@pytest.mark.parametrize(
    "prompt, part",
    [
        ("a cat in the top left on a red ground, please", "cannot read"),
        ("a cat in the top left on a black ground", "cannot read"),
        ("a cat left of a dragon on a red ground", "'dragon'"),
    ],
)
def test_prompts_outside_the_language_are_refused(prompt, part):
    assert part in refusal(parse_prompt, prompt, OBJECTS)


def test_the_shipped_scenes_and_edits_are_those_of_the_tools(tmp_path, monkeypatch):
    "Prompts byte for byte; images up to the rounding of the palette, which differs with Pillow."
    monkeypatch.syspath_prepend(ROOT / "tools")
    import make_edits
    import scene_sets

    scene_sets.main(tmp_path)
    made = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*.*"))
    assert len(made) == 5 + 2 * (96 + 48)
    for name in made:
        if name.suffix in (".txt", ".jsonl"):
            assert (tmp_path / name).read_bytes() == (ROOT / "data" / name).read_bytes()
        else:
            pair = [pil_to_tensor(load_image(top / name)) for top in (tmp_path, ROOT / "data")]
            assert (pair[0] - pair[1]).abs().mean() < 1 / 255
    objects = Drawings().objects
    for split, number in scene_sets.SIZES.items():
        edits = make_edits.sample_edits(split, number, objects)
        assert {scene_sets.split_of(edit.target) for edit in edits} == {split}
        lines = (ROOT / "data" / "i2i" / split / "prompts.jsonl").read_text().splitlines()
        told = [json.loads(line) for line in lines]
        assert [edit.prompt() for edit in edits] == [line["prompt"] for line in told]
        scenes = [edit.target.prompt() for edit in edits]
        assert scenes == [line["metadata"]["scene"] for line in told]
