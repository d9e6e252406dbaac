"""Reduce the images in notebooks to 256 colours: about a third of their size.

python tools/shrink_pictures.py nbs/6_run/14_results.ipynb ...   (without names: all notebooks)

Run it after a notebook was run. Images that have a palette already stay as they are.
"""

import base64
import io
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

NBS = Path(__file__).resolve().parent.parent / "nbs"
METHODS = (Image.Quantize.MEDIANCUT, Image.Quantize.FASTOCTREE)


def shrink_png(data: bytes) -> bytes:
    "By the method that changes it least; the same bytes where that is not smaller."
    image = Image.open(io.BytesIO(data))
    if image.mode == "P":
        return data
    image = image.convert("RGB")
    reduced = [image.quantize(256, method=m, dither=Image.Dither.NONE) for m in METHODS]
    pixels = np.asarray(image, dtype=float)
    errors = [np.square(np.asarray(r.convert("RGB")) - pixels).mean() for r in reduced]
    out = io.BytesIO()
    reduced[int(np.argmin(errors))].save(out, "PNG", optimize=True)
    return min(data, out.getvalue(), key=len)


def shrink_notebook(path: Path) -> tuple[int, int]:
    "Its size in bytes before and after."
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


if __name__ == "__main__":
    paths = [Path(name) for name in sys.argv[1:]] or sorted(NBS.rglob("*.ipynb"))
    before, after = (sum(sizes) / 1e6 for sizes in zip(*map(shrink_notebook, paths)))
    print(f"{len(paths)} notebooks: {before:.2f} MB -> {after:.2f} MB")
