"Remote rewards: servers that misbehave, strangers at ours, and what is sent to which request."

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from glm_grpo.data.basics import refusal
from glm_grpo.rewards import remote
from glm_grpo.rewards.calling import call_reward
from glm_grpo.rewards.remote import MAX_ANSWER, RemoteError, RemoteReward, serve
from glm_grpo.rewards.weighted import WeightedReward

IMAGES = torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
IMAGES = (IMAGES * 255).round() / 255
PROMPTS = [f"prompt {i}" for i in range(12)]
HEALTH = {"name": "broken", "version": 1, "wants": ["images"]}
TOKEN = "open-sesame"


def answer(value, status=200, length=None, more=b""):
    "The bytes of an answer, which may claim to have another length."
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = b"HTTP/1.1 %d Said\r\n%bContent-Length: %d\r\n\r\n"
    return head % (status, more, length or len(data)) + data


class BrokenServer:
    "Answers /health properly; `act(server, line, head)` sends what it likes to each /score."

    def __init__(self, act=None, health=HEALTH):
        self.act, self.health, self.paths, self.over = act, health, [], threading.Event()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        with contextlib.suppress(OSError):  # closed
            while True:
                line, _ = self.listening.accept()
                threading.Thread(target=self.talk, args=(line,), daemon=True).start()

    def talk(self, line):
        with line, contextlib.suppress(OSError):  # its clients do run away
            head, _, body = line.recv(1 << 16).partition(b"\r\n\r\n")
            if head.startswith(b"GET"):
                return line.sendall(answer(self.health))
            self.paths.append(head.split()[1].decode())
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            while len(body) < length:
                body += line.recv(1 << 16)
            self.body = body
            self.act(self, line, head)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.over.set()
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()


def hang(server, line, head):
    server.over.wait()


def say(*answers):
    "These answers, the last one again and again."
    return lambda server, line, head: line.sendall(
        answers[min(len(server.paths), len(answers)) - 1]
    )


GOOD, NO_MEMORY = answer({"scores": [1, 2]}), answer({"error": "CUDA out of memory"}, 500)
CASES = {  # name -> act, requests that the client makes, text of its error (None: it succeeds)
    "hangs": (hang, 3, "timeout"),
    "500 once": (say(NO_MEMORY, GOOD), 2, None),
    "always 500": (say(NO_MEMORY), 3, "CUDA out of memory"),
    "dies in the middle": (say(answer(b'{"scores": [0', length=500)), 3, "(asked 3 times)"),
    "an HTML page": (say(answer(b"<html>Welcome!</html>")), 1, "Welcome!"),
    "deeply nested": (say(answer(b"[" * 100_000)), 1, "[["),
    "three for two": (say(answer({"scores": [1, 2, 3]})), 1, "2 images"),
    "NaN": (say(answer(b'{"scores": [1, NaN]}')), 1, "nan"),
    "endless": (say(answer(b'{"scores": [1, 2]}' + b" " * 2 * MAX_ANSWER)), 1, "too long"),
    "401": (say(answer({"error": "no"}, 401)), 1, "GLM_GRPO_TOKEN"),
    "a redirect": (say(answer(b"", 302, more=b"Location: /elsewhere\r\n")), 1, "302"),
}


@pytest.mark.parametrize("name", CASES)
def test_broken_server(name):
    "Asked again where that may help, and only there; the error says what happened."
    act, requests, expected = CASES[name]
    start = time.perf_counter()
    with BrokenServer(act) as server:
        client = RemoteReward(server.url)
        client.pause, client.timeout = 0.01, 0.6 if name == "hangs" else 20
        if expected is None:
            assert client(IMAGES[:2], PROMPTS[:2]).tolist() == [1, 2]
        else:
            with pytest.raises(RemoteError) as caught:
                client(IMAGES[:2], PROMPTS[:2])
            message = str(caught.value)
            assert expected in message and server.url in message and message.isprintable()
            assert ("(asked 3 times)" in message) == (requests == 3)
    assert server.paths == ["/score"] * requests
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("status", [200, 400, 500])
def test_what_a_server_says_is_printable_and_has_no_token(status, monkeypatch):
    monkeypatch.setenv("GLM_GRPO_TOKEN", TOKEN)

    def echo(server, line, head):
        line.sendall(
            answer({"error": head.decode() + "\x1b[2J\u202e", "scores": head.decode()}, status)
        )

    with BrokenServer(echo) as server:
        client = RemoteReward(server.url, retries=0)
        with pytest.raises(RemoteError) as caught:
            client(IMAGES[:2], PROMPTS[:2])
    assert TOKEN not in str(caught.value) and str(caught.value).isprintable()
    with BrokenServer(health=HEALTH | {"name": f"\x1b[2J{TOKEN}"}) as server:
        assert RemoteReward(server.url).name.endswith("[2J(token)")


@pytest.mark.parametrize("health", [{"hello": "\x1b[2J"}, HEALTH | {"wants": ["weather"]}])
def test_strange_health(health):
    "Something else than a reward server is refused when the reward is made."
    with BrokenServer(health=health) as server:
        message = refusal(RemoteReward, server.url)
        assert f"{server.url}/health" in message and message.isprintable()


def nosy(images, prompts, targets=None, sources=None, metadata=None):
    return [len(prompt) if '"' in prompt else float("nan") for prompt in prompts]


def redness(images):
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


def test_all_inputs_of_a_reward_arrive_and_no_others(monkeypatch):
    "Prompts of any script, targets, several sources and metadata; NaN comes back."
    sent, read_request = [], remote.read_request
    monkeypatch.setattr(remote, "read_request", lambda *x: sent.append(x[0]) or read_request(*x))
    red, grey = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "grey")
    words = ["кот на стене", '一只猫，写着 "你好"', 'tab\tnew\n"quote"\\ \0']
    given = words, IMAGES[6:9], [[red, grey]] * 3, [{"word": "猫", "none": None}] * 3
    for reward in (nosy, redness):
        with serve(reward) as server:
            scores = RemoteReward(server.url)(IMAGES[:3], *given)
            assert scores.isnan().tolist() == [reward is nosy, False, False]
            assert scores.dtype == torch.float32
    few = {"version", "images", "prompts"}
    assert [{*json.loads(body)} for body in sent] == [few | {*remote.INPUTS}, few]
    heard = read_request(sent[0], remote.INPUTS)
    assert heard["prompts"] == words and heard["metadata"] == given[3]
    assert torch.equal(heard["targets"], IMAGES[6:9])
    assert [len(row) for row in heard["sources"]] == [2] * 3
    assert np.array_equal(heard["sources"][0][1], grey)


def test_metadata_that_json_cannot_hold():
    with serve(nosy) as server:
        client = RemoteReward(server.url)
        message = refusal(call_reward, client, IMAGES[:1], ["a"], metadata=[{"x": time}])
    assert "nosy raised TypeError" in message and "JSON" in message


def test_a_token_over_http_to_another_machine_is_warned_of(monkeypatch, recwarn):
    monkeypatch.setattr(RemoteReward, "ask", lambda *arguments: HEALTH)
    RemoteReward("http://far.example:8000")  # without a token
    monkeypatch.setenv("GLM_GRPO_TOKEN", TOKEN)
    for url in ("http://localhost:1", "http://127.1.2.3", "http://[::1]:1", "https://far.example"):
        RemoteReward(url)
    assert not recwarn
    for host in ("far.example:8000", "10.0.0.2", "localhost.far.example"):
        RemoteReward(f"http://{host}")
        warning = str(recwarn.pop().message)
        assert f"http://{host}" in warning and TOKEN not in warning


def connect(server):
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 30)


def test_idle_connections_do_no_harm_and_have_a_limit(monkeypatch):
    with serve(redness) as server, contextlib.ExitStack() as lines:
        for _ in range(100):
            lines.enter_context(connect(server))
        client = RemoteReward(server.url, parallel=1, retries=0)
        assert client(IMAGES, PROMPTS).shape == (12,)
        monkeypatch.setattr(remote, "MAX_THREADS", 1)
        with connect(server) as line:
            assert line.recv(1) == b""


def test_a_request_whose_client_has_gone_is_not_scored():
    "It waits for its turn behind a slow one. Of an impatient client nothing is scored."
    scored, lines = [], []

    def slow(images, prompts):
        scored.append(prompts[0])
        time.sleep(2)
        return redness(images)

    with serve(slow, log=lines.append) as server:
        patient, impatient = RemoteReward(server.url), RemoteReward(server.url, 0.3, retries=0)
        first = threading.Thread(target=patient, args=(IMAGES[:1], ["first"]))
        first.start()
        time.sleep(0.2)
        for _ in range(2):
            with pytest.raises(RemoteError, match="TimeoutError.*reward.time_limit"):
                impatient(IMAGES[:1], ["gone"])
        first.join()
        assert patient(IMAGES[:1], ["last"]).shape == (1,)
    assert scored == ["first", "last"]
    assert sum("the client has gone" in line for line in lines) == 2


class Restarts(BrokenServer):
    "Stops to listen in the middle of a request, and is back after some seconds."

    def __init__(self, seconds, request=1):
        self.seconds, self.request, self.away = seconds, request, None
        super().__init__(self.score)

    def score(self, server, line, head):
        if not self.away and len(self.paths) >= self.request:  # two may come at once
            self.away = threading.Timer(self.seconds, self.again)
            self.health = HEALTH | {"wants": None}
            self.listening.shutdown(socket.SHUT_RDWR)  # `close` alone lets one more come in
            self.listening.close()
            return self.away.start()
        line.sendall(answer({"scores": [*range(1, len(json.loads(self.body)["images"]) + 1)]}))

    def again(self):
        address = ("127.0.0.1", int(self.url.rpartition(":")[2]))
        self.listening = socket.create_server(address)
        threading.Thread(target=self.run, daemon=True).start()

    def __exit__(self, *args):
        if self.away.is_alive():
            self.away.cancel()
        else:
            super().__exit__(*args)


def test_two_requests_wait_for_a_server_that_restarts_with_one_line(capsys):
    "The time limit of the sum does not count meanwhile."
    with Restarts(3) as server:
        client = RemoteReward(server.url, batch_size=2, patience=20)
        reward = WeightedReward({"far": client}, {"far": 1.0}, time_limit=2)
        assert reward(IMAGES[:4], PROMPTS[:4]).tolist() == [1, 2, 1, 2]
    said = capsys.readouterr().out
    assert said.count("(reward.remote_patience)") == said.count("goes on") == 1


def test_a_program_does_not_wait_for_a_server_that_hangs():
    "The time limit ends the call; the end of the program used to wait for all retries."
    program = """if True:
        import sys, torch
        from glm_grpo.rewards.calling import RewardError
        from glm_grpo.rewards.remote import RemoteReward
        from glm_grpo.rewards.weighted import WeightedReward

        parts = {"far": RemoteReward(sys.argv[1], timeout=30)}
        try:
            WeightedReward(parts, {"far": 1.0}, time_limit=1)(torch.zeros(2, 3, 8, 8), ["a", "b"])
        except RewardError as error:
            sys.exit(f"error: {error}")
    """
    with BrokenServer(hang) as server:
        words = [sys.executable, "-c", program, server.url]
        done = subprocess.run(words, capture_output=True, text=True, timeout=25)
    assert done.returncode == 1 and done.stderr.startswith("error: The reward far has not"), done


def test_a_body_that_is_too_large_is_told(monkeypatch):
    monkeypatch.setattr(remote, "MAX_BYTES", 1000)
    with serve(redness) as server, pytest.raises(RemoteError, match="413: more than 1000 bytes"):
        RemoteReward(server.url)(IMAGES, PROMPTS)


def test_the_body_of_a_stranger_is_read_and_the_reason_told(monkeypatch):
    "A client that is still sending when it is refused hears why."
    monkeypatch.setenv("GLM_GRPO_TOKEN", TOKEN)
    with serve(redness) as server, connect(server) as line:
        line.sendall(b"POST /score HTTP/1.1\r\nContent-Length: 3000000\r\n\r\n")
        for _ in range(3):
            line.sendall(bytes(1_000_000))
        assert line.recv(1 << 16).startswith(b"HTTP/1.0 401 ")


def test_a_silent_connection_is_closed(monkeypatch):
    monkeypatch.setattr(remote.Request, "timeout", 0.5)
    with serve(redness) as server, connect(server) as line:
        line.sendall(b"POST /score HTTP/1.1\r\n")
        assert line.recv(1) == b""


def test_one_request_at_a_time_is_decoded_and_scored(monkeypatch):
    working, most, decode_images = [], [], remote.decode_images

    def watched(texts):
        working.append(1)
        most.append(len(working))
        time.sleep(0.02)
        return decode_images(texts)

    def slow(images):
        time.sleep(0.02)
        working.pop()
        return redness(images)

    monkeypatch.setattr(remote, "decode_images", watched)
    with serve(slow) as server:
        RemoteReward(server.url, batch_size=1, parallel=6)(IMAGES, PROMPTS)
    assert most == [1] * 12


def test_the_log_has_no_control_characters(monkeypatch):
    "Of an address, of a prompt in an error, and without the token."
    monkeypatch.setenv("GLM_GRPO_TOKEN", TOKEN)
    lines = []

    def wordy(images, prompts):
        raise RuntimeError(prompts[0])

    with serve(wordy, log=lines.append) as server:
        with connect(server) as line:
            line.sendall(b"GET /%1b[2J HTTP/1.1\r\nAuthorization: Bearer open-sesame\r\n\r\n")
            assert b"404" in line.recv(100)
        with pytest.raises(RemoteError) as caught:
            RemoteReward(server.url, retries=0)(IMAGES[:1], [f"\x1b[2J{TOKEN}"])
    assert "(token)" in str(caught.value) and str(caught.value).isprintable()
    log = "\n".join(lines)
    assert "Traceback" in log and "404" in log and TOKEN not in log
    assert all(line.isprintable() for line in lines)


def test_a_request_holds_whole_groups_where_the_reward_wants_them():
    "Of 12 images, in groups of 3 and batches of 2; the answers stay in order."
    calls = []

    def comparing(images, prompts):
        calls.append(prompts)
        return images.mean((1, 2, 3))

    groups = [f"prompt {i // 3}" for i in range(12)]
    for whole in (True, False):
        comparing.whole_groups = whole
        calls.clear()
        with serve(comparing) as server:
            reward = RemoteReward(server.url, batch_size=2)
            scores = call_reward(reward, IMAGES, groups)
        assert reward.whole_groups == whole
        assert sorted(calls) == sorted([groups[i : i + 3] for i in range(0, 12, 3)]) or not whole
        assert max(map(len, calls)) == (3 if whole else 2)
        assert torch.allclose(scores, IMAGES.mean((1, 2, 3)), atol=1e-6)
