"""What a reader moves and clicks, in a real browser: sliders of the site, widgets and the live
display of training in JupyterLab, the page of a run.

    pip install -c constraints.txt -e '.[dev,docs]'
    SCREENSHOTS=shots pytest tests/test_browser.py

Needs chromium (or Chrome) and its chromedriver on the PATH. Without them, or without the packages
of the two extras, the tests are skipped. Screenshots go to the folder that SCREENSHOTS names, and
else to the test's own folder.
"""

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from helpers import ROOT

INSTALL = "tests in a browser need: pip install -c constraints.txt -e '.[dev,docs]'"
pytest.importorskip("selenium", reason=INSTALL)
from selenium import webdriver  # noqa: E402
from selenium.common.exceptions import (  # noqa: E402
    ElementNotInteractableException,
    StaleElementReferenceException,
)
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
DRIVER = shutil.which("chromedriver")
WHERE = "no chromium (or Chrome) with its chromedriver on the PATH: apt install chromium-driver"
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=WHERE)

OPTIONS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync"""


@pytest.fixture
def browser(tmp_path):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in OPTIONS.split():
        options.add_argument(option)
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    options.add_argument("--window-size=1280,1000")
    found = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield found
    found.quit()


@pytest.fixture
def shoot(browser, tmp_path):
    "Saves a screenshot by name, and at the end one of what is there: it shows why a test failed."
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    yield lambda name: browser.save_screenshot(str(folder / f"{name}.png"))
    browser.save_screenshot(str(folder / "last.png"))


def wait(browser, condition, what, seconds=60):
    "What the condition answers, as soon as that is true."
    not_yet = [ElementNotInteractableException, StaleElementReferenceException]
    waiting = WebDriverWait(browser, seconds, poll_frequency=0.2, ignored_exceptions=not_yet)
    return waiting.until(lambda _: condition(), what)


def phone(browser):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def width_of_picture(figure):
    return figure.find_element(By.TAG_NAME, "img").get_property("naturalWidth")


def move_and_look(browser, figure):
    "One step to the right on the slider of a replayed figure: value and picture before and after."
    slider = figure.find_element(By.CSS_SELECTOR, "input[type=range]")
    picture = figure.find_element(By.TAG_NAME, "img")
    shown = figure.find_element(By.TAG_NAME, "output")
    before = shown.text, picture.get_attribute("src")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", slider)
    slider.send_keys(Keys.ARROW_RIGHT)
    wait(browser, lambda: picture.get_property("complete"), "the picture")
    return before, (shown.text, picture.get_attribute("src"))


def figure_page(folder):
    "A page with nothing but a replayed figure of three squares."
    from PIL import Image

    from glm_grpo.maths.frames import frames

    def square(color):
        return Image.new("RGB", (400, 200), color)

    page = folder / "figure.html"
    head = '<meta name="viewport" content="width=device-width">'
    page.write_text(head + frames(["red", "green", "blue"], square, "color").html)
    return page


@pytest.mark.parametrize("at_phone_width", [False, True], ids=["desktop", "phone"])
def test_a_replayed_figure_moves_without_a_kernel(browser, shoot, tmp_path, at_phone_width):
    if at_phone_width:
        phone(browser)
    browser.get(figure_page(tmp_path).as_uri())
    figure = browser.find_element(By.CLASS_NAME, "frames")
    before, after = move_and_look(browser, figure)
    shoot(f"figure_{'phone' if at_phone_width else 'desktop'}")
    assert (before[0], after[0]) == ("red", "green") and before[1] != after[1]
    assert width_of_picture(figure) == 400


def test_two_sliders_show_the_picture_of_both_positions(browser, shoot, tmp_path):
    from PIL import Image

    from glm_grpo.maths.frames import sliders

    def rectangle(color, width):
        return Image.new("RGB", (width, 200), color)

    positions = {"color": ["red", "green", "blue"], "width": [200, 300]}
    page = tmp_path / "figure.html"
    page.write_text(sliders(positions, rectangle, (0, 0)).html)
    browser.get(page.as_uri())
    figure = browser.find_element(By.CLASS_NAME, "frames")
    color, width = figure.find_elements(By.CSS_SELECTOR, "input[type=range]")
    before = figure.find_element(By.TAG_NAME, "img").get_attribute("src")
    color.send_keys(Keys.ARROW_RIGHT)
    width.send_keys(Keys.ARROW_RIGHT)
    wait(browser, lambda: width_of_picture(figure) == 300, "the wide picture")
    green = figure.find_element(By.TAG_NAME, "img").get_attribute("src")
    shown = [value.text for value in figure.find_elements(By.TAG_NAME, "output")]
    assert shown == ["green", "300"]
    width.send_keys(Keys.ARROW_LEFT)
    color.send_keys(Keys.ARROW_LEFT)
    wait(browser, lambda: width_of_picture(figure) == 200, "the first picture")
    assert figure.find_element(By.TAG_NAME, "img").get_attribute("src") == before != green


# notebooks with replayed figures
REPLAYED = ("1_maths/02_advantages", "1_maths/03_loss", "1_maths/04_sde", "6_run/22_sample_tree")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "A site of the notebooks with replayed figures."
    for name in ("sphinx", "myst_nb", "furo", "latex2mathml"):
        pytest.importorskip(name, reason=INSTALL)
    out = tmp_path_factory.mktemp("site") / "html"
    command = [sys.executable, ROOT / "tools/site", "--out", out, *REPLAYED]
    subprocess.run(command, check=True, capture_output=True)
    return out


def cut_off(browser, selector):
    "The elements that are higher than the box which shows them."
    script = (
        "return [...document.querySelectorAll(arguments[0])]"
        ".filter(box => box.scrollHeight > box.clientHeight + 1).map(box => box.textContent)"
    )
    return browser.execute_script(script, selector)


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_of_the_site_fit_and_draw_formulas(browser, shoot, site, width):
    if width == 390:
        phone(browser)
    for page in [
        "index.html",
        "api/glm_grpo.maths.loss.html",
        *map("nbs/{}.html".format, REPLAYED),
    ]:
        browser.get((site / page).as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, page
        assert cut_off(browser, "div.math") == [], page
    browser.get((site / "nbs/1_maths/03_loss.html").as_uri())
    shoot(f"site_top_{width}")
    formula = browser.find_element(By.CSS_SELECTOR, "math")
    assert formula.rect["width"] > 20 and formula.rect["height"] > 8  # drawn, not only there


@pytest.mark.parametrize("name", REPLAYED)
def test_each_slider_of_a_notebook_changes_the_picture(browser, shoot, site, name):
    browser.get((site / f"nbs/{name}.html").as_uri())
    figures = css(browser, ".frames")
    stored = (ROOT / f"nbs/{name}.ipynb").read_text(encoding="utf-8").count("<input type=")
    assert sum(len(f.find_elements(By.TAG_NAME, "input")) for f in figures) == stored > 0
    for number, figure in enumerate(figures):
        for slider in figure.find_elements(By.TAG_NAME, "input"):
            start, before = slider.get_property("value"), now(figure, slider)
            slider.send_keys(Keys.END if start == "0" else Keys.HOME)
            moved = now(figure, slider)
            assert moved[0] != before[0] and moved[1] != before[1]
            assert width_of_picture(figure) > 0
            shoot(f"site_{Path(name).name}_{number}")
            browser.execute_script("arguments[0].value = arguments[1]", slider, start)
            browser.execute_script("arguments[0].oninput()", slider)
            assert now(figure, slider) == before


def now(figure, slider):
    "The value beside a slider, and the picture of its figure."
    value = slider.find_element(By.XPATH, "following-sibling::output").text
    return value, figure.find_element(By.TAG_NAME, "img").get_attribute("src")


# --- the page of a run


@pytest.fixture(scope="module")
def run_page(tmp_path_factory):
    "The page of a made-up run: warnings, a plot of three evaluations, cards with images."
    from PIL import Image

    from glm_grpo.run.report import write_page
    from glm_grpo.training.metrics import Agreement, PolicyGap

    def evaluation(step, color):
        rewards = [[0.5 + 0.01 * step * i] for i in range(6)]
        names = ["scene", "sign", "text", "detail"]
        return {
            "step": step,
            "reward_mean": sum(reward for (reward,) in rewards) / 6,
            "rewards": rewards,
            "prompts": [f"picture {i}" for i in range(6)],
            "seeds": [0],
            "images": [Image.new("RGB", (128, 128), color)] * 6,
            "metrics": dict.fromkeys(names, 0.5 - 0.01 * step),
            "values": {name: [[0.5 - 0.01 * step]] * 6 for name in names},
        }

    history = [evaluation(0, "red"), evaluation(10, "purple"), evaluation(20, "blue")]
    lines = [{"step": i, "reward_mean": i / 40, "kl": i / 1000} for i in range(1, 41)]
    page = tmp_path_factory.mktemp("page") / "page.html"
    gaps = Agreement({"dit": PolicyGap(0.5, 0.1, 0.01, 1e-4)}, "bfloat16", 4)
    given = {"history": history, "lines": lines, "agreement": gaps}
    write_page(page, history[0], history[-1], **given)
    return page


def emulate_dark(browser):
    feature = {"name": "prefers-color-scheme", "value": "dark"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def brightness(browser, element):
    "Mean brightness of an element as it is drawn, from 0 to 255."
    from PIL import Image, ImageStat

    return ImageStat.Stat(Image.open(io.BytesIO(element.screenshot_as_png)).convert("L")).mean[0]


def test_the_slider_of_a_card_moves_by_key_and_by_mouse(browser, shoot, run_page):
    browser.get(run_page.as_uri())
    pair = css(browser, ".compare")[0]
    slider = pair.find_element(By.TAG_NAME, "input")
    upper = pair.find_element(By.CSS_SELECTOR, ".before img")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", slider)
    clip = "return getComputedStyle(arguments[0]).clipPath"
    assert browser.execute_script(clip, upper) == "inset(0px 50% 0px 0px)"
    slider.send_keys(*[Keys.ARROW_RIGHT] * 10)
    assert browser.execute_script(clip, upper) == "inset(0px 40% 0px 0px)"
    aside = slider.size["width"] // 4
    ActionChains(browser).move_to_element_with_offset(slider, -aside, 0).click().perform()
    shoot("page_card")
    left = float(browser.execute_script(clip, upper).split()[1].rstrip("%"))
    assert 70 < left < 80  # a click at a quarter of the slider
    assert brightness(browser, upper) > 0
    summary = css(browser, "details summary")[0]
    summary.click()
    assert "scene 0.5 → 0.3" in css(browser, "details")[0].text


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_a_run_fits_and_follows_the_theme(browser, shoot, run_page, width, dark):
    if width == 390:
        phone(browser)
    if dark:
        emulate_dark(browser)
    browser.get(run_page.as_uri())
    shoot(f"page_top_{width}_{'dark' if dark else 'light'}")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert len(css(browser, ".alarm")) == 2 and css(browser, ".agreement table")
    for selector in (".curve", ".charts svg", "table"):
        shown = css(browser, selector)[0]
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", shown)
        assert (brightness(browser, shown) < 100) == dark, selector
    shoot(f"page_curves_{width}_{'dark' if dark else 'light'}")


# --- JupyterLab

IMPORTS = """
import torch
from glm_grpo.run.explore import explore_clip
from glm_grpo.run.sample_tree import explore_samples, sample_tree
from glm_grpo.training.toy import ToyPainter, icon_images, nearness
from glm_grpo.training.trainer import MinimalGRPOTrainer
"""
WIDGETS = [
    IMPORTS,
    """
old = torch.randn(4, 80, generator=torch.Generator().manual_seed(0)) - 3
new = old + 0.1 * torch.randn(4, 80, generator=torch.Generator().manual_seed(1))
explore_clip(new, old, torch.tensor([1.0, 0.5, -0.5, -1.0]))
""",
    """
toy = ToyPainter(["a red heart"])
batch = {"prompts": ["a red heart"], "target_images": icon_images(["a red heart"])}
trainer = MinimalGRPOTrainer(toy, [batch], nearness, height=32, width=32, callbacks=())
trainer.train(num_steps=1)
explore_samples(sample_tree(trainer.last_experience, toy.policies))
""",
    """
from PIL import Image
from glm_grpo.maths.frames import frames
frames(["red", "green"], lambda color: Image.new("RGB", (300, 100), color), "color")
""",
]
TRAINING = [
    IMPORTS,
    """
import time

def slow_nearness(images, targets):
    time.sleep(0.5)
    return nearness(images, targets)

prompts = ["a red heart", "a blue cross"]
batch = {"prompts": prompts, "target_images": icon_images(prompts)}
trainer = MinimalGRPOTrainer(ToyPainter(prompts), [batch], slow_nearness, height=32, width=32)
trainer.train(num_steps=3);
""",
    "trainer",
    "trainer.last_experience",
    "trainer.last_experience.rollout",
    "trainer.agreement",
]


def write_notebook(path, sources):
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
    kernel = {"name": "python3", "display_name": "python3", "language": "python"}
    book = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(book, path)


def write_settings(folder, dark):
    "JupyterLab fetches no news, and has the wanted theme."
    for name, settings in (
        ("notification", {"fetchNews": "false", "checkForUpdates": False}),
        ("themes", {"theme": "JupyterLab Dark" if dark else "JupyterLab Light"}),
    ):
        file = folder / f"@jupyterlab/apputils-extension/{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))


@pytest.fixture
def lab(tmp_path):
    "JupyterLab on a free port; called with the cells of a notebook, gives its address."
    pytest.importorskip("jupyterlab", reason=INSTALL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder, log = tmp_path / "lab", tmp_path / "lab.log"
    folder.mkdir()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=made-up"]
    command += [f"--ServerApp.root_dir={folder}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    env["JUPYTERLAB_SETTINGS_DIR"] = str(tmp_path / "settings")
    env["JUPYTERLAB_WORKSPACES_DIR"] = str(tmp_path / "workspaces")

    def address(sources, dark=False):
        write_notebook(folder / "cells.ipynb", sources)
        write_settings(tmp_path / "settings", dark)
        return f"http://127.0.0.1:{port}/lab/tree/cells.ipynb?token=made-up"

    with open(log, "w") as output:
        server = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        try:
            wait_for_port(port, server, log)
            yield address
        finally:
            server.terminate()
            server.wait(timeout=30)


def wait_for_port(port, server, log, seconds=90):
    for _ in range(seconds * 5):
        assert server.poll() is None, log.read_text()
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab does not answer: {log.read_text()}")


PICTURE = ".widget-output img[src^='data:image/png']"


def open_notebook(browser, address):
    "Opens a notebook and waits for its kernel."
    browser.get(address)
    wait(browser, lambda: css(browser, ".jp-CodeCell .cm-content"), "the notebook", 120)
    wait(browser, lambda: "| Idle" in status_bar(browser), "the kernel", 120)


def run_cells(browser, sources):
    "Each cell of the notebook with Shift+Enter, from the first one on."
    wait(browser, lambda: click_first_cell(browser), "the first cell")
    for _ in sources:
        keys = ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT)
        keys.perform()


def after_change(browser, before, what):
    "The pictures of the widgets' outputs, as soon as they are others and the kernel is idle."
    wait(browser, lambda: sources(browser) != before and len(sources(browser)) == 3, what)
    wait(browser, lambda: "| Idle" in status_bar(browser), "the last of the figures")
    return sources(browser)


def test_widgets_in_jupyterlab(browser, shoot, lab):
    "Runs a notebook cell by cell, moves its sliders, clicks a sample, and sees new pictures."
    open_notebook(browser, lab(WIDGETS))
    run_cells(browser, WIDGETS)
    wait(browser, lambda: len(css(browser, PICTURE)) == 3, "the widgets' figures", 120)
    wait(browser, lambda: css(browser, ".frames img"), "the replayed figure")
    clip, tree, maps = sources(browser)
    shoot("lab_before")

    handle = css(browser, ".noUi-handle")[0]
    readout = css(browser, ".widget-readout")[0].text
    handle.send_keys(*[Keys.ARROW_RIGHT] * 20)  # 0.05 + 20 * 0.005
    moved = after_change(browser, [clip, tree, maps], "the slider's new figure")
    shoot("lab_widget_moved")
    assert (readout, css(browser, ".widget-readout")[0].text) == ("0.050", "0.150")
    assert moved[0] != clip and moved[1:] == [tree, maps]

    buttons = css(browser, ".widget-toggle-button")
    assert [b.text for b in buttons] == ["sample 1", "sample 2", "sample 3", "sample 4"]
    browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", buttons[2])
    buttons[2].click()
    clicked = after_change(browser, moved, "the tree with another sample")
    shoot("lab_sample_clicked")
    assert clicked[0] == moved[0] and clicked[1] != tree and clicked[2] != maps

    replayed = css(browser, ".frames")[0]
    before, after = move_and_look(browser, replayed)
    shoot("lab_replayed_moved")
    assert (before[0], after[0]) == ("red", "green") and before[1] != after[1]


def css(browser, selector):
    return browser.find_elements(By.CSS_SELECTOR, selector)


def sources(browser):
    "The pictures in the outputs of widgets now, from top to bottom."
    script = "return [...document.querySelectorAll(arguments[0])].map(image => image.src)"
    return browser.execute_script(script, PICTURE)


def status_bar(browser):
    return css(browser, "#jp-main-statusbar")[0].text


def click_first_cell(browser):
    css(browser, ".jp-CodeCell .cm-content")[0].click()
    return css(browser, ".jp-CodeCell.jp-mod-selected")


# at each frame that the browser draws: how high the live display is, and how many pictures it has
WATCH = """
window.seen = [];
(function look() {
  const bar = document.querySelector("progress");
  const area = bar && bar.closest(".jp-OutputArea-output");
  const now = area ? [area.clientHeight, area.querySelectorAll("img").length] : [0, 0];
  if (String(now) !== String(window.seen.at(-1))) window.seen.push(now);
  requestAnimationFrame(look);
})();
"""


def bar_value(browser):
    return browser.execute_script("return document.querySelector('progress').value")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_training_is_shown_live_and_stays_in_the_saved_notebook(
    browser, shoot, lab, dark, tmp_path
):
    "Bar, curve and images while it trains; the same in the saved notebook, opened again."
    theme = "dark" if dark else "light"
    address = lab(TRAINING, dark)
    open_notebook(browser, address)
    browser.execute_script(WATCH)
    run_cells(browser, TRAINING)
    wait(browser, lambda: css(browser, "progress"), "the live display", 120)
    wait(browser, lambda: bar_value(browser) == 2, "step 2")
    shoot(f"lab_training_{theme}_live")
    wait(browser, lambda: bar_value(browser) == 3, "step 3")
    wait(browser, lambda: len(css(browser, ".jp-OutputArea-executeResult")) == 4, "all results")
    seen = browser.execute_script("return window.seen")
    assert seen == sorted(seen) and seen[-1][1] == 8, seen  # nothing flickers: it only grows
    is_light = browser.execute_script("return document.body.dataset.jpThemeLight")
    assert is_light == ("false" if dark else "true")

    outputs = css(browser, ".jp-OutputArea-child")
    for i, output in enumerate(outputs):
        browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", output)
        shoot(f"lab_training_{theme}_{i}")
    shown = [output.get_attribute("innerHTML").count("<img") for output in outputs]
    assert shown == [8, 0, 8, 8, 0]  # two prompts with four images each
    assert [len(output.find_elements(By.TAG_NAME, "svg")) for output in outputs] == [1, 1, 0, 0, 0]

    save = ActionChains(browser).key_down(Keys.CONTROL).send_keys("s").key_up(Keys.CONTROL)
    save.perform()
    saved = tmp_path / "lab/cells.ipynb"
    wait(browser, lambda: "<progress" in saved.read_text(), "the saved notebook")
    assert "widget" not in saved.read_text().lower()
    open_notebook(browser, address)
    wait(browser, lambda: css(browser, "progress"), "the display of the saved notebook")
    shoot(f"lab_training_{theme}_again")
    assert bar_value(browser) == 3 and len(css(browser, ".jp-OutputArea-child img")) == 24
