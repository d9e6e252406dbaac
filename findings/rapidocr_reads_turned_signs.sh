#!/usr/bin/env bash
# rapidocr 3.10.0, onnxruntime 1.31.1, Pillow 13.0.0
# Expected: use_cls=False turns off the correction of the direction of text, so only an upright
#   sign is read with full confidence.
# Seen: boxes taller than 1.5 times their width are turned before recognition whatever use_cls is.
#   A sign turned 90 degrees clockwise scores as high as the upright one. By default (use_cls=True)
#   signs in all four directions do, and nothing in the result tells them apart but the boxes.
# Output:
#   rapidocr 3.10.0 onnxruntime 1.31.1
#   use_cls=False, turned by 0: 'OPEN TODAY' 0.993
#   use_cls=False, turned by 90: 'OPEN TODAY' 0.999
#   use_cls=False, turned by 180: 'OPN AY' 0.767
#   use_cls=False, turned by 270: 'OPN TDAY' 0.777
#   use_cls=True, turned by 0: 'OPEN TODAY' 0.993
#   use_cls=True, turned by 90: 'OPEN TODAY' 0.999
# For GRPO on GLM-Image: an OCR reward pays the same for a sideways sign, whatever option is set.
#   If that matters, compare the width and height of result.boxes in the reward.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q rapidocr==3.10.0 onnxruntime==1.31.1 pillow==13.0.0
"$folder/venv/bin/python" - <<'PY'
import logging
from importlib.metadata import version
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rapidocr import RapidOCR

logging.disable(logging.CRITICAL)
sign, font = Image.new("RGB", (480, 480), "white"), ImageFont.load_default(size=52)
ImageDraw.Draw(sign).text((90, 200), "OPEN TODAY", fill="black", font=font)
engine, seen = RapidOCR(), {}
print("rapidocr", version("rapidocr"), "onnxruntime", version("onnxruntime"))
for use_cls in (False, True):
    for degrees in (0, 90, 180, 270):  # clockwise
        result = engine(np.array(sign.rotate(-degrees)), use_cls=use_cls)
        text, score = " ".join(result.txts or ()), round(max(result.scores or (0,)), 3)
        print(f"use_cls={use_cls}, turned by {degrees}: {text!r} {score}")
        seen[use_cls, degrees] = text == "OPEN TODAY" and score > 0.95
assert seen[False, 0] and seen[False, 90] and not seen[False, 180] and not seen[False, 270]
assert all(seen[True, degrees] for degrees in (0, 90, 180, 270))
PY
