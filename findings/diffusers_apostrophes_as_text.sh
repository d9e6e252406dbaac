#!/usr/bin/env bash
# diffusers 0.42.1 (GlmImagePipeline), torch 2.13.0
# Expected: only quoted text is taken as text to draw; an apostrophe inside a word is no quote.
# Seen: everything between any two apostrophes is taken as text to draw, with no word about it.
# Output:
#   diffusers 0.42.1
#   a sign that says "OPEN" -> ['OPEN']
#   The cat’s bed is next to the dog’s ball -> []
#   The cat's bed is next to the dog's ball -> ['s bed is next to the dog']
#   the two dogs' bowls and the cat's bed -> [' bowls and the cat']
# For GRPO on GLM-Image: such a prompt conditions the DiT on glyphs of "s bed is next to the dog",
#   so its images and rewards are those of another task. Write ’ (U+2019) for an apostrophe, and
#   double quotes around text to draw, in training prompts and when you serve the model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 transformers==5.23.0
"$folder/venv/bin/python" - <<'PY'
import diffusers
from diffusers import GlmImagePipeline

print("diffusers", diffusers.__version__)
right = {'a sign that says "OPEN"': ["OPEN"], "The cat’s bed is next to the dog’s ball": []}
wrong = {"The cat's bed is next to the dog's ball": ["s bed is next to the dog"],
         "the two dogs' bowls and the cat's bed": [" bowls and the cat"]}
for prompt, texts in (right | wrong).items():
    found = GlmImagePipeline.get_glyph_texts(None, prompt)[0]  # uses nothing of the pipeline
    print(f"{prompt} -> {found}")
    assert found == texts
PY
