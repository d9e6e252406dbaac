"A figure with a slider for notebooks: its images are drawn beforehand, so it needs no kernel."

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any

from IPython.display import HTML
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image

_FRAMES = """<div class="frames" data-frames="{frames}" data-names="{names}"
 style="max-width: 760px"><img src="data:image/png;base64,{first}" alt="{label}: a figure"
 style="width: 100%; height: auto; background: white">
<label style="display: flex; gap: 0.8em; align-items: center"><span>{label}</span>
<input type="range" min="0" max="{last}" value="{start}" style="flex: 1"
 data-lm-suppress-shortcuts="true" aria-valuetext="{name}" oninput="
 const box = this.closest('.frames'), name = box.dataset.names.split('|')[this.value];
 const image = box.dataset.frames.split(' ')[this.value];
 box.querySelector('img').src = 'data:image/png;base64,' + image;
 this.nextElementSibling.value = name; this.setAttribute('aria-valuetext', name);">
<output style="min-width: 4em">{name}</output></label></div>"""


def frames(
    values: Sequence,  # positions of the slider
    draw: Callable[[Any], Figure],
    label: str,  # what the slider moves
    start: int = 0,  # number of the position that is shown first
) -> HTML:
    "A figure with a slider over images that are drawn beforehand: it needs no kernel."
    images, names = [], [str(value) for value in values]
    for value in values:
        figure, drawn, small = draw(value), io.BytesIO(), io.BytesIO()
        figure.savefig(drawn, format="png", dpi=100)
        pyplot.close(figure)  # otherwise Jupyter shows it as well
        Image.open(drawn).convert("RGB").quantize(64).save(small, "PNG", optimize=True)
        images.append(base64.b64encode(small.getvalue()).decode())
    known = {"first": images[start], "name": names[start], "last": len(names) - 1}
    lists = {"frames": " ".join(images), "names": "|".join(names)}
    return HTML(_FRAMES.format(label=label, start=start, **known, **lists))
