"""Makes data/drawings/: one sheet of 16 objects by 3 hands (64 x 64 RGBA each) from three free emoji sets.

    npm pack @iconify-json/noto@1.2.9 @iconify-json/fluent-emoji-flat@1.2.6 @iconify-json/fxemoji@1.2.2
    for f in *.tgz; do mkdir -p ${f%.tgz} && tar xzf $f -C ${f%.tgz}; done
    pip install resvg-py==0.5.0 && python tools/make_drawings.py . data/drawings
"""
import io, json, sys
from pathlib import Path
import resvg_py
from PIL import Image

HANDS = {'noto': 'iconify-json-noto-1.2.9', 'fluent-emoji-flat': 'iconify-json-fluent-emoji-flat-1.2.6', 'fxemoji': 'iconify-json-fxemoji-1.2.2'}
ICONS = dict(cat='cat', dog='dog', fish='fish', banana='banana', car='automobile', sunflower='sunflower', mushroom='mushroom', cactus='cactus',
             rocket='rocket', umbrella='umbrella', key='key', snail='snail', balloon='balloon', strawberry='strawberry', crown='crown', penguin='penguin')
SIZE, MARGIN = 64, 3

def main(packages: Path, out: Path):
    sheet = Image.new('RGBA', (SIZE * len(ICONS), SIZE * len(HANDS)))
    out.mkdir(parents=True, exist_ok=True)
    sources = {}
    for row, (hand, folder) in enumerate(HANDS.items()):
        icons = json.loads((packages / folder / 'package/icons.json').read_text())
        info = json.loads((packages / folder / 'package/info.json').read_text())
        sources[hand] = {k: info[k] for k in ('name', 'author', 'license', 'version') if k in info} | {'package': f'@iconify-json/{hand}'}
        for col, icon in enumerate(ICONS.values()):
            d = icons['icons'][icon]
            w, h = d.get('width', icons.get('width', 16)), d.get('height', icons.get('height', 16))
            svg = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {w} {h}" width="{w}" height="{h}">{d["body"]}</svg>'
            png = resvg_py.svg_to_bytes(svg_string=svg, width=512, height=512)
            drawing = Image.open(io.BytesIO(bytes(png))).convert('RGBA')
            drawing = drawing.crop(drawing.getbbox())               # every hand leaves another margin: crop, then centre in the same box
            scale = (SIZE - 2 * MARGIN) / max(drawing.size)
            drawing = drawing.resize([max(1, round(s * scale)) for s in drawing.size], Image.LANCZOS)
            sheet.alpha_composite(drawing, (col * SIZE + (SIZE - drawing.width) // 2, row * SIZE + (SIZE - drawing.height) // 2))
    sheet.save(out / 'drawings.png', optimize=True)
    (out / 'drawings.json').write_text(json.dumps(dict(size=SIZE, objects=list(ICONS), hands=list(HANDS), sources=sources), indent=1) + '\n')

if __name__ == '__main__': main(Path(sys.argv[1]), Path(sys.argv[2]))
