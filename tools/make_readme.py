"""Make README.md from nbs/index.ipynb:  python tools/make_readme.py [--check]

`nbdev_readme` needs Quarto; this does the same with nbconvert. Links in the notebook are relative to nbs/, in the README to the
root. Pictures a cell draws go to data/readme/. With --check nothing is written; the exit status is 1 if something would change."""
import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
PICTURES = 'data/readme'


def from_root(link):
    "A link as seen from nbs/ -> the same link as seen from the root."
    if re.match(r'[a-z]+:|#|/', link) or link.startswith(PICTURES): return link
    return link[3:] if link.startswith('../') else 'nbs/' + link


def make():
    "-> dict of path: bytes, everything that is made from the notebook."
    nb = nbformat.read(ROOT / 'nbs/index.ipynb', as_version=4)
    nb.metadata['language_info'] = {'name': 'python'}   # nbdev_clean drops it, and the code fences would lose their language
    nb.cells = [c for c in nb.cells if not re.match(r'#\|\s*hide\b', c.source)]
    for c in nb.cells:
        if c.cell_type == 'code': c.source = re.sub(r'^#\|.*\n', '', c.source, flags=re.M)
    text, extra = MarkdownExporter().from_notebook_node(nb, resources={'output_files_dir': PICTURES, 'unique_key': 'index'})
    text = re.sub(r'(\]\()([^)\s]+)', lambda m: m[1] + from_root(m[2]), text)
    text = re.sub(r'((?:src|href)=")([^"]+)', lambda m: m[1] + from_root(m[2]), text)
    text = re.sub(r'\n{3,}', '\n\n', text).strip() + '\n'
    note = '<!-- Made from nbs/index.ipynb by tools/make_readme.py: edit the notebook. -->\n\n'
    return {'README.md': (note + text).encode(), **{name: bytes(data) for name, data in extra['outputs'].items()}}


def main():
    files = make()
    have = {'README.md', *(f'{PICTURES}/{p.name}' for p in (ROOT / PICTURES).glob('*'))}
    old = {name: (ROOT / name).read_bytes() for name in have if (ROOT / name).exists()}
    changed = sorted(name for name in {*files, *old} if files.get(name) != old.get(name))
    if '--check' in sys.argv[1:]:
        if changed: sys.exit(f"not in step with nbs/index.ipynb: {', '.join(changed)}; run: python tools/make_readme.py")
        return
    for name in changed:
        if name not in files: (ROOT / name).unlink(); continue
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_bytes(files[name])
    print('README.md:', ', '.join(changed) or 'nothing to change')


if __name__ == '__main__': main()
