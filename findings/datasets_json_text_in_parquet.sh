#!/usr/bin/env bash
# datasets 5.2.0, pyarrow 26.0.1
# Expected: to_parquet() writes a column of objects as Arrow structs; one more row changes no other.
# Seen: as soon as one object has another key or a value of another type than the rest (GenEval's
#   "position": ["right of", 0]), the column of ALL rows becomes JSON text in Parquet and Arrow.
#   load_dataset() decodes it, so a round trip within datasets hides it. pyarrow gets strings.
# Output:
#   datasets 5.2.0 pyarrow 26.0.1
#   same: JSONL [{'class': 'dog', 'count': 2}]
#     pyarrow from Parquet [{'class': 'dog', 'count': 2}]
#   mixed: JSONL [{'class': 'dog', 'count': 2}]
#     pyarrow from Parquet ['{"class":"dog","count":2}']
# For GRPO on GLM-Image: a reward that reads row["include"] gets dicts from the JSONL, and strings
#   from a Parquet of the same rows, which depends on the other rows. Decode strings with json.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1
export HF_HOME=$folder/cache HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 FOLDER=$folder
"$folder/venv/bin/python" - <<'PY'
import json, os
import datasets, pyarrow
import pyarrow.parquet as pq

same = [{"prompt": "two dogs", "include": [{"class": "dog", "count": 2}]},
        {"prompt": "a cup", "include": [{"class": "cup", "count": 1}]}]
cup = {"class": "cup", "count": 1, "position": ["right of", 0]}
mixed = same + [{"prompt": "a cup right of a dog",
                 "include": [{"class": "dog", "count": 1}, cup]}]
print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
first = {}
for name, rows in {"same": same, "mixed": mixed}.items():
    path = os.path.join(os.environ["FOLDER"], name)
    with open(path + ".jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    data = datasets.load_dataset("json", data_files=path + ".jsonl", split="train")
    data.to_parquet(path + ".parquet")
    parquet = datasets.load_dataset("parquet", data_files=path + ".parquet", split="train")
    assert data[0] == parquet[0] == rows[0]
    first[name] = pq.read_table(path + ".parquet").to_pylist()[0]["include"]
    print(f"{name}: JSONL {rows[0]['include']}")
    print(f"  pyarrow from Parquet {first[name]}")
assert first["same"] == same[0]["include"]
assert first["mixed"] == ['{"class":"dog","count":2}']
PY
