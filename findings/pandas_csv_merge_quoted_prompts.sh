#!/usr/bin/env bash
# pandas 3.1.1, csv of Python's standard library (3.11)
# Expected: a TSV without quoting, one prompt a line, gives one row a line, or an error.
# Seen: a cell that begins with a double quote opens a quoted cell, across tabs and line ends, up
#   to the next double quote. Lines become one prompt, and quotes around a word vanish. No warning.
# Output:
#   pandas 3.1.1 lines 5
#   csv: 3 rows ['OPEN on a sign', 'a cat\tAnimals\na dog\tAnimals\na house', 'the moon']
#   pandas: 3 rows ['OPEN on a sign', 'a cat\tAnimals\na dog\tAnimals\na house', 'the moon']
#   QUOTE_NONE: 5 rows ['"OPEN" on a sign', '"a cat', 'a dog', 'a house"', 'the moon']
# For GRPO on GLM-Image: prompt lists in the form of PartiPrompts begin some prompts with a quote.
#   Prompts are lost or merged, and '"OPEN" on a sign' loses the quotes that mark text to draw.
#   Read such files with quoting=csv.QUOTE_NONE and compare the number of rows with the lines.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pandas==3.1.1
FILE=$folder/prompts.tsv "$folder/venv/bin/python" - <<'PY'
import csv, os
import pandas

path = os.environ["FILE"]
lines = ['"OPEN" on a sign\tText', '"a cat\tAnimals', "a dog\tAnimals", 'a house"\tPlaces',
         "the moon\tSky"]
with open(path, "w") as file:
    file.write("\n".join(["Prompt\tCategory", *lines]) + "\n")
with open(path, newline="") as file:
    standard = [row["Prompt"] for row in csv.DictReader(file, delimiter="\t")]
default = pandas.read_csv(path, sep="\t")["Prompt"].tolist()
unquoted = pandas.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE)["Prompt"].tolist()
print("pandas", pandas.__version__, "lines", len(lines))
for name, prompts in {"csv": standard, "pandas": default, "QUOTE_NONE": unquoted}.items():
    print(f"{name}: {len(prompts)} rows {prompts}")
assert standard == default
assert default == ["OPEN on a sign", "a cat\tAnimals\na dog\tAnimals\na house", "the moon"]
assert unquoted == [line.split("\t")[0] for line in lines]
PY
