"The client of remote rewards against servers that misbehave, and what it sends to which request."

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from glm_grpo.data.basics import refusal
from glm_grpo.data.images import pil_to_tensor
from glm_grpo.rewards.calling import call_reward
from glm_grpo.rewards.remote import Endpoint, RemoteError, RemoteReward
from glm_grpo.rewards.reward_server import serve

IMAGES = torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
IMAGES = (IMAGES * 255).round() / 255
PROMPTS = [f"prompt {i}" for i in range(12)]


class BrokenHandler(BaseHTTPRequestHandler):
    def answer(self, value, status=200):
        self.raw(json.dumps(value).encode(), status)

    def raw(self, data, status=200, length=None, **headers):
        "Send bytes, and claim that they have some other length."
        self.send_response(status)
        self.send_header("Content-Length", str(length or len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer(self.server.health)

    def do_POST(self):
        self.server.paths.append(self.path)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.act(self, len(self.server.paths))

    def log_message(self, *args):
        pass


class BrokenServer(ThreadingHTTPServer):
    "Answers /health properly; `act(handler, n)` decides about the n-th /score."

    daemon_threads = True
    health = {"name": "broken", "version": 1, "wants": ["images"]}

    def __init__(self, act=None):
        self.act, self.paths, self.over = act, [], threading.Event()
        super().__init__(("127.0.0.1", 0), BrokenHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *args):
        pass  # its clients do run away

    def __exit__(self, *args):
        self.over.set()
        self.shutdown()
        self.server_close()


def hang(handler, n):
    handler.server.over.wait()


def drip(handler, n):
    handler.raw(b"{", length=1000)
    while not handler.server.over.wait(0.05):
        handler.wfile.write(b" ")


def redirect(handler, n):
    handler.raw(b"{}", 302, Location=handler.server.url + "/elsewhere")


def always(value, status=200):
    return lambda handler, n: handler.answer(value, status)


def bytes_of(data, length=None):
    return lambda handler, n: handler.raw(data, length=length)


def once(status):
    "An error the first time, then the right answer."

    def act(handler, n):
        if n == 1:
            handler.answer({"error": "busy"}, status)
        else:
            handler.answer({"scores": [1, 2]})

    return act


NO_MEMORY = {"error": "CUDA out of memory"}
CASES = {  # name -> act, requests that the client makes, text of its error (None: it succeeds)
    "hangs": (hang, 3, "did not answer within 0.3 s"),
    "drips": (drip, 3, "did not answer within 0.3 s"),
    "500 once": (once(500), 2, None),
    "429 once": (once(429), 2, None),
    "408 once": (once(408), 2, None),
    "always 500": (always(NO_MEMORY, 500), 3, "CUDA out of memory"),
    "dies in the middle": (bytes_of(b'{"scores": [0', 500), 3, "closed the connection"),
    "dies before": (lambda handler, n: None, 3, "closed the connection"),
    "an HTML page": (bytes_of(b"<html>Welcome!</html>"), 1, "not a JSON object"),
    "a list": (always([1, 2]), 1, "not a JSON object"),
    "deeply nested": (bytes_of(b"[" * 100_000), 1, "not a JSON object"),
    "no scores": (always({}), 1, "no scores for 2 images"),
    "three for two": (always({"scores": [1, 2, 3]}), 1, "3 scores for 2 images"),
    "a word": (always({"scores": [1, "good"]}), 1, "the score 'good'"),
    "true": (always({"scores": [1, True]}), 1, "the score 'True'"),
    "NaN": (bytes_of(b'{"scores": [1, NaN]}'), 1, "the score 'nan'"),
    "infinity": (bytes_of(b'{"scores": [1, 1e400]}'), 1, "the score 'inf'"),
    "endless": (bytes_of(b'"' + b" " * 2_000_000), 1, "sent more than 1048576 bytes"),
    "400": (always({"error": "no letters"}, 400), 1, "no letters"),
    "401": (always({"error": "no"}, 401), 1, "GLM_GRPO_TOKEN"),
    "404": (always({"error": "not here"}, 404), 1, "the address of a reward server?"),
    "413": (always({"error": "large"}, 413), 1, "Lower batch_size (now 16)"),
    "a redirect": (redirect, 1, "status 302"),
}


@pytest.mark.parametrize("name", CASES)
def test_broken_server(name):
    "Asked again where that may help, and only there; the error says what happened."
    act, requests, expected = CASES[name]
    start = time.perf_counter()
    with BrokenServer(act) as server:
        client = RemoteReward(server.url)
        client.pause, client.timeout = 0.01, 0.3 if act in (hang, drip) else 20
        if expected is None:
            assert client(IMAGES[:2], PROMPTS[:2]).tolist() == [1, 2]
        else:
            with pytest.raises(RemoteError) as caught:
                client(IMAGES[:2], PROMPTS[:2])
            message = str(caught.value)
            assert expected in message and server.url in message
            assert ("(asked 3 times)" in message) == (requests == 3)
    assert server.paths == ["/score"] * requests
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        ({"hello": "world"}, "hello"),
        ({"name": "x", "version": 2, "wants": []}, "reward server of version 1"),
        ({"name": 3, "version": 1, "wants": []}, "reward server of version 1"),
        ({"name": "x", "version": 1}, "reward server of version 1"),
        ({"name": "x", "version": 1, "wants": ["weather"]}, "asks for 'weather'"),
    ],
)
def test_strange_health(health, expected):
    "Something else than a reward server is refused when the reward is made."
    with BrokenServer() as server:
        server.health = health
        assert expected in refusal(RemoteReward, server.url)


def test_another_address():
    "A path that is not the server's is refused when the reward is made."
    with serve(redness) as server:
        assert "status 404" in refusal(RemoteReward, server.url + "/deep")


def test_a_dead_server_is_asked_three_times():
    "`call_reward` does not go through the images one by one when a server fails."
    with BrokenServer(always(NO_MEMORY, 500)) as server:
        client = RemoteReward(server.url)
        client.pause = 0.01
        assert "out of memory" in refusal(call_reward, client, IMAGES[:8], PROMPTS[:8])
        assert len(server.paths) == 3


HEARD = {}


def nosy(images, prompts, targets=None, sources=None, metadata=None):
    HEARD.update(prompts=prompts, targets=targets, sources=sources, metadata=metadata)
    return [0.0] * len(images)


def redness(images):
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


@pytest.mark.parametrize(
    ("reward", "given", "expected"),
    [
        (redness, True, {"version", "images", "prompts"}),
        (nosy, False, {"version", "images", "prompts"}),
        (nosy, True, {"version", "images", "prompts", "targets", "sources", "metadata"}),
    ],
)
def test_what_is_not_wanted_is_not_sent(reward, given, expected):
    options = {}
    if given:
        red = Image.new("RGB", (8, 8), "red")
        options = {"targets": IMAGES[:4], "sources": [[red]] * 4, "metadata": [{}] * 4}
    exchange = Endpoint.exchange
    with serve(reward) as server, patch.object(Endpoint, "exchange", autospec=True) as recorded:
        recorded.side_effect = exchange
        RemoteReward(server.url)(IMAGES[:4], PROMPTS[:4], **options)
    assert set(json.loads(recorded.call_args.args[3])) == expected


def test_all_inputs_of_a_reward_arrive():
    "NaN, prompts of any script, targets, several sources and metadata."
    heard = {}

    def nosy(images, prompts, targets=None, sources=None, metadata=None):
        heard.update(prompts=prompts, targets=targets, sources=sources, metadata=metadata)
        return [len(prompt) if '"' in prompt else float("nan") for prompt in prompts]

    red, grey = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "grey")
    quotes, control = '一只猫，写着 "你好"', 'tab\tnew\n"quote"\\ \0'
    words = ["кот на стене", quotes, 'قطة "مرحبا"', control, "🐱 kein Schild", ""]
    notes = [{"word": "猫", "box": [0, 1.5], "none": None, "n": n} for n in range(6)]
    sources = [[red, grey]] * 5 + [[red]]
    with serve(nosy) as server:
        scores = RemoteReward(server.url)(IMAGES[:6], words, IMAGES[6:], sources, notes)
    assert scores.isnan().tolist() == [True, False, False, False, True, True]
    assert scores[1] == len(words[1])
    assert heard["prompts"] == words and heard["metadata"] == notes
    assert torch.equal(heard["targets"], IMAGES[6:])
    assert [len(own) for own in heard["sources"]] == [2] * 5 + [1]
    assert np.array_equal(heard["sources"][0][1], grey)


def test_each_request_has_its_own_rows():
    "With a batch of 4, the last of two requests has the rows 4 and 5 of everything."
    red, grey = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "grey")
    sources = [[red]] * 4 + [[grey], [red, grey]]
    metadata = [{"n": n} for n in range(6)]
    with serve(nosy) as server:
        client = RemoteReward(server.url, batch_size=4, parallel=1)
        client(IMAGES[:6], PROMPTS[:6], IMAGES[6:], sources, metadata)
    assert HEARD["prompts"] == PROMPTS[4:6] and HEARD["metadata"] == metadata[4:]
    assert torch.equal(HEARD["targets"], IMAGES[10:])
    assert [len(own) for own in HEARD["sources"]] == [1, 2]
    assert np.array_equal(HEARD["sources"][0][0], grey)


def test_sources_may_be_one_tensor():
    "One source for each image."
    with serve(nosy) as server:
        RemoteReward(server.url)(IMAGES[:2], PROMPTS[:2], sources=IMAGES[6:8])
    assert HEARD["targets"] is None and HEARD["metadata"] is None
    assert torch.equal(pil_to_tensor(HEARD["sources"][1]), IMAGES[7:8])


@pytest.mark.parametrize("value", [time, float("nan"), {1}])
def test_metadata_that_json_cannot_hold(value):
    with serve(nosy) as server:
        client = RemoteReward(server.url)
        message = refusal(call_reward, client, IMAGES[:1], ["a"], metadata=[{"x": value}])
    assert "cannot be written as JSON" in message


THIS_MACHINE = ["http://localhost:1", "http://127.0.0.1:1", "http://127.1.2.3", "http://[::1]:1"]


@pytest.mark.parametrize("url", [*THIS_MACHINE, "https://far.example"])
def test_a_token_over_https_or_on_this_machine_needs_no_warning(monkeypatch, recwarn, url):
    monkeypatch.setenv("GLM_GRPO_TOKEN", "open-sesame")
    Endpoint(url)
    assert not recwarn


@pytest.mark.parametrize("host", ["far.example:8000", "10.0.0.2", "localhost.far.example"])
def test_a_token_over_http_to_another_machine_is_warned_of(monkeypatch, recwarn, host):
    Endpoint(f"http://{host}")  # without a token
    assert not recwarn
    monkeypatch.setenv("GLM_GRPO_TOKEN", "open-sesame")
    Endpoint(f"http://{host}")
    (warning,) = recwarn
    assert f"sent to http://{host} over http" in str(warning.message)
    assert "sesame" not in str(warning.message)
