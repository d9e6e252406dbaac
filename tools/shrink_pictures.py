"""Reduce the pictures in notebooks to 256 colours: about a third of their size.

python tools/shrink_pictures.py nbs/6_run/20_results.ipynb ...   (without names: all notebooks)

Run it after a notebook was run. Pictures that have a palette already stay as they are.
"""

import base64
import io
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
METHODS = (Image.Quantize.MEDIANCUT, Image.Quantize.FASTOCTREE)


def with_palette(image: Image.Image) -> Image.Image:
    "The image in 256 colours, by the method that changes it least."
    image = image.convert("RGB")
    pixels = np.asarray(image, dtype=float)
    reduced = [image.quantize(256, method=m, dither=Image.Dither.NONE) for m in METHODS]
    errors = [np.square(np.asarray(r.convert("RGB")) - pixels).mean() for r in reduced]
    return reduced[int(np.argmin(errors))]


def shrink_png(data: bytes) -> bytes:
    "A PNG in 256 colours, or the same bytes where that is not smaller."
    image = Image.open(io.BytesIO(data))
    if image.mode == "P":
        return data
    out = io.BytesIO()
    with_palette(image).save(out, "PNG", optimize=True)
    return min(data, out.getvalue(), key=len)


def shrink_notebook(path: Path) -> tuple[int, int]:
    "Shrink the pictures of one notebook; its size in bytes before and after."
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                data = base64.b64decode("".join(png))
                small = shrink_png(data)
                if small != data:
                    output["data"]["image/png"] = base64.b64encode(small).decode()
    new = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    path.write_text(new, encoding="utf-8")
    return len(text.encode()), len(new.encode())


def main(names: list[str]) -> None:
    "Shrink the named notebooks, or all, and print the sizes."
    paths = [Path(name) for name in names] or sorted((ROOT / "nbs").rglob("*.ipynb"))
    sizes = [shrink_notebook(path) for path in paths]
    before, after = (sum(column) / 1e6 for column in zip(*sizes))
    print(f"{len(paths)} notebooks: {before:.2f} MB -> {after:.2f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
