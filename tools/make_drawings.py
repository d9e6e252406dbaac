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
OBJECTS = "cat dog fish banana car sunflower mushroom cactus rocket umbrella key snail balloon"
OBJECTS = [*OBJECTS.split(), "strawberry", "crown", "penguin"]
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


def main(packages: Path, out: Path) -> None:
    sheet = Image.new("RGBA", (SIZE * len(OBJECTS), SIZE * len(HANDS)))
    out.mkdir(parents=True, exist_ok=True)
    sources = {}
    for row, (hand, folder) in enumerate(HANDS.items()):
        package = packages / folder / "package"
        info = json.loads((package / "info.json").read_text())
        known = {k: info[k] for k in ("name", "author", "license", "version") if k in info}
        sources[hand] = known | {"package": f"@iconify-json/{hand}"}
        icons = json.loads((package / "icons.json").read_text())
        for col, name in enumerate(OBJECTS):
            drawing = render_icon(icons, "automobile" if name == "car" else name)
            scale = (SIZE - 2 * MARGIN) / max(drawing.size)
            drawing = drawing.resize(
                [max(1, round(s * scale)) for s in drawing.size], Image.LANCZOS
            )
            left = col * SIZE + (SIZE - drawing.width) // 2  # in the middle of its box
            sheet.alpha_composite(drawing, (left, row * SIZE + (SIZE - drawing.height) // 2))
    sheet.save(out / "drawings.png", optimize=True)
    note = {"size": SIZE, "objects": OBJECTS, "hands": list(HANDS), "sources": sources}
    (out / "drawings.json").write_text(json.dumps(note, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
