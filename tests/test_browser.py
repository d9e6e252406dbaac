"""The sliders in a real browser: a page with a replayed figure, and JupyterLab with a widget.

Skipped where selenium, chromium or JupyterLab is missing. Screenshots go to the folder that the
environment variable SCREENSHOTS names, and else to the test's own folder.
"""

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

pytest.importorskip("selenium")
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

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium or chromedriver")

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


@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_of_the_site_fits_and_its_figure_moves(browser, shoot, tmp_path, width):
    for name in ("sphinx", "myst_nb", "furo", "latex2mathml"):
        pytest.importorskip(name)
    out = tmp_path / "site"
    command = [sys.executable, ROOT / "tools/site", "--out", out, "1_maths/03_loss"]
    subprocess.run(command, check=True, capture_output=True)
    if width == 390:
        phone(browser)
    browser.get((out / "nbs/1_maths/03_loss.html").as_uri())
    shoot(f"site_top_{width}")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    formula = browser.find_element(By.CSS_SELECTOR, "math")
    assert formula.rect["width"] > 20 and formula.rect["height"] > 8  # drawn, not only there
    figure = browser.find_element(By.CLASS_NAME, "frames")
    before, after = move_and_look(browser, figure)
    shoot(f"site_figure_{width}")
    assert (before[0], after[0]) == ("0.2", "0.3") and before[1] != after[1]
    assert width_of_picture(figure) > 600


# --- JupyterLab

CELLS = {
    "imports": """
import torch
from glm_grpo.run.explore import explore_clip
from glm_grpo.run.sample_tree import explore_samples, sample_tree
from glm_grpo.training.toy import ToyPainter, icon_images, nearness
from glm_grpo.training.trainer import MinimalGRPOTrainer
""",
    "widget": """
old = torch.randn(4, 80, generator=torch.Generator().manual_seed(0)) - 3
new = old + 0.1 * torch.randn(4, 80, generator=torch.Generator().manual_seed(1))
explore_clip(new, old, torch.tensor([1.0, 0.5, -0.5, -1.0]))
""",
    "tree": """
toy = ToyPainter(["a red heart"])
batch = {"prompts": ["a red heart"], "target_images": icon_images(["a red heart"])}
trainer = MinimalGRPOTrainer(toy, [batch], nearness, height=32, width=32, callbacks=())
trainer.train(num_steps=1)
explore_samples(sample_tree(trainer.last_experience, toy.policies))
""",
    "replayed": """
from PIL import Image
from glm_grpo.maths.frames import frames
frames(["red", "green"], lambda color: Image.new("RGB", (300, 100), color), "color")
""",
}


def write_notebook(path):
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in CELLS.values()]
    kernel = {"name": "python3", "display_name": "python3", "language": "python"}
    book = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(book, path)


@pytest.fixture
def lab(tmp_path):
    "JupyterLab on a free port, in a folder with a small notebook; gives its address."
    pytest.importorskip("jupyterlab")
    folder = tmp_path / "lab"
    folder.mkdir()
    write_notebook(folder / "widgets.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=made-up"]
    command += [f"--ServerApp.root_dir={folder}"]
    settings = tmp_path / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"fetchNews": "false", "checkForUpdates": false}')  # asks nobody
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    env["JUPYTERLAB_SETTINGS_DIR"] = str(tmp_path / "settings")
    env["JUPYTERLAB_WORKSPACES_DIR"] = str(tmp_path / "workspaces")
    log = open(tmp_path / "lab.log", "w")
    server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        wait_for_port(port, server, tmp_path / "lab.log")
        yield f"http://127.0.0.1:{port}/lab/tree/widgets.ipynb?token=made-up"
    finally:
        server.terminate()
        server.wait(timeout=30)
        log.close()


def wait_for_port(port, server, log, seconds=90):
    for _ in range(seconds * 5):
        assert server.poll() is None, log.read_text()
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab does not answer: {log.read_text()}")


PICTURE = ".widget-output img[src^='data:image/png']"


def run_cells(browser):
    "Each cell of the notebook with Shift+Enter, from the first one on."
    wait(browser, lambda: css(browser, ".jp-CodeCell .cm-content"), "the notebook", 120)
    wait(browser, lambda: "| Idle" in status_bar(browser), "the kernel", 120)
    wait(browser, lambda: click_first_cell(browser), "the first cell")
    for _ in CELLS:
        keys = ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT)
        keys.perform()


def after_change(browser, before, what):
    "The pictures of the widgets' outputs, as soon as they are others and the kernel is idle."
    wait(browser, lambda: sources(browser) != before and len(sources(browser)) == 3, what)
    wait(browser, lambda: "| Idle" in status_bar(browser), "the last of the figures")
    return sources(browser)


def test_widgets_in_jupyterlab(browser, shoot, lab):
    "Runs a notebook cell by cell, moves its sliders, clicks a sample, and sees new pictures."
    browser.get(lab)
    run_cells(browser)
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
