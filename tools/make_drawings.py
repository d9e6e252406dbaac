"""Makes data/drawings/: one sheet of 16 objects by 3 hands (64 x 64 RGBA each) from three free
emoji sets.

    npm pack @iconify-json/noto@1.2.9 @iconify-json/fluent-emoji-flat@1.2.6
    npm pack @iconify-json/fxemoji@1.2.2
    for f in *.tgz; do mkdir -p ${f%.tgz} && tar xzf $f -C ${f%.tgz}; done
    pip install resvg-py==0.5.0 && python tools/make_drawings.py . data/drawings
"""

import io
import json
import sys
from pathlib import Path

import resvg_py
from PIL import Image

HANDS = {
    "noto": "iconify-json-noto-1.2.9",
    "fluent-emoji-flat": "iconify-json-fluent-emoji-flat-1.2.6",
    "fxemoji": "iconify-json-fxemoji-1.2.2",
}
ICONS = {
    "cat": "cat",
    "dog": "dog",
    "fish": "fish",
    "banana": "banana",
    "car": "automobile",
    "sunflower": "sunflower",
    "mushroom": "mushroom",
    "cactus": "cactus",
    "rocket": "rocket",
    "umbrella": "umbrella",
    "key": "key",
    "snail": "snail",
    "balloon": "balloon",
    "strawberry": "strawberry",
    "crown": "crown",
    "penguin": "penguin",
}
SIZE, MARGIN = 64, 3  # pixels
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    'viewBox="0 0 {w} {h}" width="{w}" height="{h}">{body}</svg>'
)


def render_icon(icons: dict, name: str) -> Image.Image:
    "An icon of a set, large, cut to what is drawn: every hand leaves another margin."
    icon = icons["icons"][name]
    w = icon.get("width", icons.get("width", 16))
    h = icon.get("height", icons.get("height", 16))
    svg = SVG.format(w=w, h=h, body=icon["body"])
    png = resvg_py.svg_to_bytes(svg_string=svg, width=512, height=512)
    drawing = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
    return drawing.crop(drawing.getbbox())


def paste(sheet: Image.Image, drawing: Image.Image, col: int, row: int) -> None:
    "Fit a drawing into its box, in the middle."
    scale = (SIZE - 2 * MARGIN) / max(drawing.size)
    drawing = drawing.resize([max(1, round(s * scale)) for s in drawing.size], Image.LANCZOS)
    left = col * SIZE + (SIZE - drawing.width) // 2
    top = row * SIZE + (SIZE - drawing.height) // 2
    sheet.alpha_composite(drawing, (left, top))


def source_of(hand: str, package: Path) -> dict:
    "Who made a set, and under which license."
    info = json.loads((package / "info.json").read_text())
    known = {k: info[k] for k in ("name", "author", "license", "version") if k in info}
    return known | {"package": f"@iconify-json/{hand}"}


def main(packages: Path, out: Path) -> None:
    sheet = Image.new("RGBA", (SIZE * len(ICONS), SIZE * len(HANDS)))
    out.mkdir(parents=True, exist_ok=True)
    sources = {}
    for row, (hand, folder) in enumerate(HANDS.items()):
        package = packages / folder / "package"
        sources[hand] = source_of(hand, package)
        icons = json.loads((package / "icons.json").read_text())
        for col, name in enumerate(ICONS.values()):
            paste(sheet, render_icon(icons, name), col, row)
    sheet.save(out / "drawings.png", optimize=True)
    note = {"size": SIZE, "objects": list(ICONS), "hands": list(HANDS), "sources": sources}
    (out / "drawings.json").write_text(json.dumps(note, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
