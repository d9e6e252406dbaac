"""What a reader moves and clicks in a real browser: in JupyterLab widgets and the live display of
training, and the page of a run's decisions.

    pip install -c constraints.txt -e '.[dev,docs]'
    SCREENSHOTS=shots pytest tests/test_browser.py

Needs chromium (or Chrome) and its chromedriver on the PATH. Without them, or without the packages
of the two extras, the tests are skipped. Screenshots go to the folder that SCREENSHOTS names, and
else to the test's own folder.
"""

import base64
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
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
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
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


IMPORTS = """
from ipywidgets import interactive
from glm_grpo.toy import ToyPainter, icon_images, nearness
from glm_grpo.training.trainer import MinimalGRPOTrainer
"""
WIDGETS = [
    IMPORTS,
    """
toy = ToyPainter(["a red heart"])
batch = {"prompts": ["a red heart"], "target_images": icon_images(["a red heart"])}
trainer = MinimalGRPOTrainer(toy, [batch], nearness, height=32, width=32, callbacks=())
trainer.train(num_steps=1)
images = [image for image, _ in trainer.last_experience.blocks()[0][1]]
show = lambda sample: display(images[sample])
interactive(show, sample=(0, 3))
""",
    f"""
import sys
from matplotlib.figure import Figure
sys.path.append("{ROOT}/tools")
from frames import frames
frames(["red", "green"], lambda color: Figure((3, 1), facecolor=color), "color")
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


def write_settings(folder):
    "JupyterLab fetches no news."
    file = folder / "@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))


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

    def address(sources):
        write_notebook(folder / "cells.ipynb", sources)
        write_settings(tmp_path / "settings")
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


def test_widgets_in_jupyterlab(browser, shoot, lab):
    "Runs a notebook cell by cell, moves its sliders, and sees new images."
    open_notebook(browser, lab(WIDGETS))
    run_cells(browser, WIDGETS)
    wait(browser, lambda: css(browser, PICTURE), "the widget's image", 120)
    wait(browser, lambda: css(browser, ".frames img"), "the replayed figure")
    (before,) = sources(browser)
    shoot("lab_before")

    css(browser, ".noUi-handle")[0].send_keys(Keys.ARROW_RIGHT)
    wait(browser, lambda: before not in sources(browser), "the image of another sample")
    shoot("lab_sample_moved")

    figure = css(browser, ".frames")[0]
    slider = figure.find_element(By.CSS_SELECTOR, "input[type=range]")
    shown = figure.find_element(By.TAG_NAME, "output")
    image = figure.find_element(By.TAG_NAME, "img")
    before = image.get_attribute("src")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", slider)
    slider.send_keys(Keys.ARROW_RIGHT)
    assert shown.text == "green" and image.get_attribute("src") != before


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


def text_of(browser, selector):
    return css(browser, selector)[0].text


def percents(text):
    "The numbers of a text such as 62.6 % -> 0.0132 %, as probabilities."
    return [float(number) / 100 for number in re.findall(r"([\d.]+)\s%", text)]


@pytest.mark.parametrize("width", [390, 1280])
def test_the_microscope_shows_the_numbers_of_what_is_clicked(browser, shoot, width):
    "Clicks patches and images and moves the slider, with mouse and keys; nothing jumps."
    page = ROOT / "results/example_run/microscope.html"
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    steps = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])["steps"]
    height = browser.execute_script("return document.documentElement.scrollHeight")

    def table(step, prompt, name):
        of_prompt = steps[step]["prompts"][prompt]["policies"]["ar"]
        values = np.frombuffer(base64.b64decode(of_prompt[name]["data"]), "<f4")
        return np.broadcast_to(values.reshape(of_prompt[name]["shape"]), (8, 272))

    def check(step, prompt, image, token):
        assert text_of(browser, "#step") == f"Step {steps[step]['step']}"
        assert text_of(browser, "#name") == f"Token {token + 1} of 272"
        (chosen,) = css(browser, "#images button[aria-pressed=true]")
        assert chosen == css(browser, "#images button")[image]
        old, new = (np.exp(table(step, prompt, name)[image, token]) for name in ("old", "after"))
        assert percents(text_of(browser, "#change")) == pytest.approx([old, new], rel=6e-3)
        facts = [number.text.replace("\u2212", "-") for number in css(browser, "#facts dd")]
        assert float(facts[1]) == pytest.approx(new / old, abs=1e-4)
        assert float(facts[3]) == pytest.approx(
            table(step, prompt, "advantages")[image, 0], abs=0.01
        )
        shape = "document.documentElement.scrollHeight, document.documentElement.scrollWidth"
        assert browser.execute_script(f"return [{shape}]") == [height, browser_width(browser)]

    def press(selector, *keys):
        css(browser, selector)[0].send_keys(*keys)

    css(browser, "#images button")[1].click()
    browser.execute_script("document.querySelectorAll('#kinds input')[1].click()")  # large grid
    css(browser, "#cells .cell")[5].click()
    check(0, 0, 1, 256 + 5)
    press("#cells .cell[aria-selected=true]", Keys.ARROW_DOWN)
    check(0, 0, 1, 256 + 9)
    press("#slider", Keys.END)
    check(len(steps) - 1, 0, 1, 256 + 9)
    press("#slider", Keys.ARROW_LEFT)
    css(browser, "#prompts label")[1].click()
    check(len(steps) - 2, 1, 1, 256 + 9)
    css(browser, "#images button")[6].click()
    check(len(steps) - 2, 1, 6, 256 + 9)
    shoot(f"microscope_{width}")
    wait(browser, lambda: "image=7" in browser.current_url, "the address, which names the decision")
    address = browser.current_url
    browser.get("about:blank")
    browser.get(address)
    check(len(steps) - 2, 1, 6, 256 + 9)
    # pasted into the open page; what is no whole number in range does not count
    for decision, name in (("17", "Token 17 of"), ("1.5", "Token "), ("999", "Token ")):
        link = f"#step={steps[1]['step']}&prompt=2&image=3&decision={decision}"
        browser.execute_script("location.hash = arguments[0]", link)
        wait(browser, lambda: text_of(browser, "#step") == f"Step {steps[1]['step']}", "the link")
        shown = text_of(browser, "#name")
        assert shown.startswith(name) and 1 <= int(shown.split()[1]) <= 272
    assert browser.get_log("browser") == []


def browser_width(browser):
    return browser.execute_script("return document.documentElement.clientWidth")


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


def test_training_is_shown_live_and_stays_in_the_saved_notebook(browser, shoot, lab, tmp_path):
    "Bar, curve and images while it trains; the same in the saved notebook, opened again."
    address = lab(TRAINING)
    open_notebook(browser, address)
    browser.execute_script(WATCH)
    run_cells(browser, TRAINING)
    wait(browser, lambda: css(browser, "progress"), "the live display", 120)
    wait(browser, lambda: bar_value(browser) == 2, "step 2")
    shoot("lab_training_live")
    wait(browser, lambda: bar_value(browser) == 3, "step 3")
    wait(browser, lambda: len(css(browser, ".jp-OutputArea-executeResult")) == 4, "all results")
    seen = browser.execute_script("return window.seen")
    assert seen == sorted(seen) and seen[-1][1] == 9, seen  # nothing flickers: it only grows
    outputs = css(browser, ".jp-OutputArea-child")
    for i, output in enumerate(outputs):
        browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", output)
        shoot(f"lab_training_{i}")
    shown = [output.get_attribute("innerHTML").count("<img") for output in outputs]
    assert shown == [9, 1, 8, 8, 0]  # a curve, and two prompts with four images each

    save = ActionChains(browser).key_down(Keys.CONTROL).send_keys("s").key_up(Keys.CONTROL)
    save.perform()
    saved = tmp_path / "lab/cells.ipynb"
    wait(browser, lambda: "<progress" in saved.read_text(), "the saved notebook")
    assert "widget" not in saved.read_text().lower()
    open_notebook(browser, address)
    wait(browser, lambda: css(browser, "progress"), "the display of the saved notebook")
    shoot("lab_training_again")
    assert bar_value(browser) == 3 and len(css(browser, ".jp-OutputArea-child img")) == 26
