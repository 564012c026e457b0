"""Attacks on ``dschat-lora serve``: each is answered in OpenAI's form, and the server goes on."""

import asyncio
import gzip
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from helpers.chromium import Page, find_chromium
from helpers.served import check_answers, on_endless, refused, running_server, send
from helpers.spread import ALL

pytest.importorskip("uvicorn", reason="the extra [serving] is not installed")

from dschat_lora.addons.serving.decoder import AnswerDecoder
from dschat_lora.addons.serving.endpoint import sockets as places
from dschat_lora.addons.serving.endpoint.requests import AnswerOptions

ROOT = Path(__file__).resolve().parents[3]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
PLAIN = {"model": "a", "messages": HI, "max_tokens": 1}


def raw(address, content):
    """All that the server sends on a connection on which these bytes are sent."""
    url = urlsplit(address)
    with socket.create_connection((url.hostname, url.port)) as connection:
        received = b""
        try:
            connection.sendall(content)
            # A server that waits for more says nothing.
            connection.settimeout(10 if b"Connection: close" in content else 0.1)
            while chunk := connection.recv(65536):
                received += chunk
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            pass
        return received


# ---------------------------------------------------------------------------- HTTP itself

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ZIPPED = gzip.compress(bytes(10**6))
HTTP = {
    "nothing": b"",
    "bytes": bytes(range(256)) * 4,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    **{
        name: line + b"\r\nHost: localhost\r\n\r\n"
        for name, line in {
            "HTTP/9.9": b"GET / HTTP/9.9",
            "unknown method": b"BREW /v1/models HTTP/1.1",
            "long method": b"A" * 70_000 + b" / HTTP/1.1",
            "CONNECT": b"CONNECT localhost:22 HTTP/1.1",
            "TRACE": b"TRACE /v1/models HTTP/1.1",
            "OPTIONS *": b"OPTIONS * HTTP/1.1",
            "proxy": b"GET http://example.org/v1/models HTTP/1.1",
            "NUL in path": b"GET /v1/mod\x00els HTTP/1.1",
            "Latin-1 in path": b"GET /v1/mod\xe9ls HTTP/1.1",
            "blank in path": b"GET /v1/mod els HTTP/1.1",
            "long path": b"GET /" + b"a" * 70_000 + b" HTTP/1.1",
            "invalid escapes": b"GET /%zz%ff%00%ed%a0%bd HTTP/1.1",
        }.items()
    },
    "10,000 headers": GET + b"".join(b"X-%d: 1\r\n" % n for n in range(10_000)) + b"\r\n",
    "long header": GET + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    "no colon": GET + b"X\r\n\r\n",
    "NUL in header": GET + b"X: a\x00b\r\n\r\n",
    "folded header": GET + b"X: a\r\n b\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"Host: localhost\r\n\r\n",
    "two hosts, one other": GET + b"Host: example.org\r\n\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 5\r\n\r\n{}abc",
    "negative length": POST + b"Content-Length: -1\r\n\r\n{}",
    "signed length": POST + b"Content-Length: +2\r\n\r\n{}",
    "huge length": POST + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    "coding": POST + b"Transfer-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    **{
        name: POST + b"Transfer-Encoding: chunked\r\n" + rest
        for name, rest in {
            "length and chunks": b"Content-Length: 2\r\n\r\n0\r\n\r\n{}",
            "chunk size": b"\r\nffffffffffffffffff\r\n{}",
            "negative chunk": b"\r\n-1\r\n{}",
            "no chunk": b"\r\n",
            "chunk extension": b"\r\n2;" + b"a" * 70_000 + b"\r\n{}\r\n0\r\n\r\n",
            "trailers": b"\r\n2\r\n{}\r\n0\r\nHost: x\r\n\r\n",
        }.items()
    },
    "short body": POST + b"Content-Length: 50\r\n\r\n{}",
    "gzip": POST + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(ZIPPED) + ZIPPED,
    "web socket": GET
    + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    "h2c": GET
    + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n",
    "expectation": POST + b"Expect: 200-ok\r\nContent-Length: 2\r\n\r\n{}",
    "carriage returns": b"GET / HTTP/1.1\rHost: localhost\r\r",
    "begun": b"GET /v1/mod",
    "length of a GET": GET + b"Content-Length: 5\r\n\r\n",
    "range of the page": b"GET / HTTP/1.1\r\nHost: localhost\r\nRange: bytes=0-0,"
    + b",".join(b"%d-" % n for n in range(500))
    + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", list(HTTP)[:: 1 if ALL else 4])
def test_what_is_hardly_http_is_refused_or_answered(address, name):
    received = raw(address, HTTP[name])
    status = int(received.split()[1]) if received else 400
    assert status < 500, received[:300]
    assert b"Traceback" not in received
    check_answers(address)


def test_requests_behind_each_other_are_answered_in_order(address):
    one = b'{"model": "a", "prompt": "Hi", "max_tokens": 1}'
    post = POST + b"Content-Length: %d\r\n\r\n" % len(one) + one
    last = GET + b"Connection: close\r\n\r\n"
    received = raw(address, (post + GET + b"\r\n") * 3 + last)
    kinds = re.findall(rb'"object":"(text_completion|list)"', received)
    assert kinds == [b"text_completion", b"list"] * 3 + [b"list"]


# ---------------------------------------------------------------------------- who is let in

TOKENS = (
    *(None, "", "Bearer", "Bearer ", "secret", "bearer secret", "Bearer  secret", "Bearer secre"),
    *("Bearer secret ,x", "Bearer secrets", "Basic c2VjcmV0", "Bearer \xe9", "Bearer SECRET"),
)
PATHS = ("/settings", "/v1/models", "//", "/./", "/healthz/", "/page.css/../settings", "/%2e/")


@pytest.fixture(scope="module")
def guarded(service):
    """The address of a server for other machines, which demands a token."""
    config = replace(service.config, token="secret", host="0.0.0.0")
    decoder = AnswerDecoder([], max_batch_size=1, max_queue=1)
    with running_server(replace(service, config=config, decoder=decoder)) as address:
        yield address


@pytest.mark.parametrize("token", TOKENS[:: 1 if ALL else 4])
@pytest.mark.parametrize("host", ["x/?", "x/page.css?", "x/#"])
def test_without_the_token_nothing_but_the_page_is_given(guarded, token, host):
    headers = {"Host": host} | ({} if token is None else {"Authorization": token})
    for path in PATHS:
        status, answer = send(guarded, "GET", path, headers=headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), path
    body = {"model": "a", "prompt": "Hi"}
    assert send(guarded, "POST", TEXT, body, headers)[0] == 401


def test_no_library_reads_the_path_for_the_guard(guarded, monkeypatch):
    from starlette.datastructures import URL
    from starlette.requests import HTTPConnection

    # As starlette 1.0.0 makes it of the header Host: x/?
    monkeypatch.setattr(HTTPConnection, "url", property(lambda self: URL("http://x/?/settings")))
    assert send(guarded, "GET", "/settings")[0] == 401


def test_a_refusal_of_what_turns_out_to_be_no_http_leaves_no_traceback(guarded, capfd):
    assert raw(guarded, HTTP["negative chunk"]).startswith(b"HTTP/1.1 400")
    assert "Traceback" not in capfd.readouterr().err


def test_with_the_token_all_is_given_and_the_page_and_health_without(guarded):
    headers = {"Authorization": "Bearer secret", "Host": "box", "Origin": "https://box"}
    assert send(guarded, "GET", "/settings", headers=headers)[0] == 200
    for path in ("/", "/page.css", "/page.js"):
        page = f"GET {path} HTTP/1.1\r\nHost: box\r\nConnection: close\r\n\r\n".encode()
        assert b"200 OK" in raw(guarded, page)
    assert send(guarded, "GET", "/healthz")[1] == {"status": "ok", "running": 0, "waiting": 0}


def test_the_token_is_compared_in_constant_time(guarded, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "dschat_lora.addons.serving.endpoint.guard.hmac.compare_digest",
        lambda *both: seen.append(both) or False,
    )
    for given in ("Bearer secret", "Bearer x"):
        assert send(guarded, "GET", "/settings", headers={"Authorization": given})[0] == 401
    assert seen == [(b"Bearer secret", b"Bearer secret"), (b"Bearer x", b"Bearer secret")]


VALUES = (
    *(None, True, False, -1, 0, 1, 0.5, 1e-300, 5e-324, 1e308, 2**31, 2**63, 10**400, "", "a"),
    *("x" * 50_000, "\x00\u202e\ufeff", [], [[]], [None], ["a"], {}, {"a": 1}, {"a": {"b": [{}]}}),
)
FIELDS = (
    *("model", "messages", "prompt", "n", "stream", "stream_options", "max_tokens", "stop"),
    *("max_completion_tokens", "temperature", "top_p", "top_k", "seed", "tools", "user"),
    *("response_format", "logit_bias", "min_p", "__class__", "tool_choice", "parallel_tool_calls"),
    *("logprobs", "top_logprobs", "chat_template_kwargs"),
)


@pytest.mark.parametrize("field", list(FIELDS)[:: 1 if ALL else 4])
def test_any_value_of_a_field_is_answered_or_refused_by_name(address, field):
    path = TEXT if field == "prompt" else CHAT
    plain = {"model": "a", "max_tokens": 1, "prompt": "Hi"} if path == TEXT else PLAIN
    for value in VALUES:
        if field == "stream" and value is True:
            continue
        status, answer = send(address, "POST", path, {**plain, field: value})
        if status != 200:
            message = refused(status, answer)
            named = field in message or answer["error"]["param"] == field
            assert named or field in ("messages", "prompt", "n", "model"), (value, message)
        check_answers(address)


# ---------------------------------------------------------------------------- the page

MARKUP = (
    "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script><b id=hit>"
)


@pytest.mark.skipif(find_chromium() is None, reason="there is no chromium")
def test_the_page_shows_markup_of_names_prompts_and_answers_as_text(service, monkeypatch, tmp_path):
    base = service.models["base"]
    models = {f"{n}{MARKUP}": replace(base, name=f"{n}{MARKUP}") for n in range(2)}
    decoder = AnswerDecoder([base.batch], max_batch_size=4, max_queue=9)
    texts = iter([f"first{MARKUP}", f"second{MARKUP}"])
    monkeypatch.setattr(
        "dschat_lora.addons.serving.endpoint.text.TextStream.add",
        lambda self, token: "" if self._ids else (self._ids.append(token), next(texts))[1],
    )
    page = Page(tmp_path / "chromium")
    try:
        with running_server(replace(service, models=models, decoder=decoder)) as address:
            page.open(address)
            page.wait_for("document.querySelectorAll('#models input').length == 2")
            title = page.evaluate("document.title")
            # of a seed of its own an answer may end at once, and leaves nothing to vote for
            page.evaluate("document.getElementById('seed').value = 1")
            page.evaluate("document.getElementById('prompt').focus()")
            page.type(f"prompt{MARKUP}")
            page.press_enter()
            page.wait_for("document.querySelectorAll('.vote:enabled').length == 2")
            page.evaluate("document.querySelectorAll('.vote')[0].click()")
            page.wait_for("document.querySelector('.answer.best') != null")
            page.reload()
            page.wait_for("document.querySelector('.answer.best') != null")
            shown = page.evaluate("document.body.textContent")
            assert page.evaluate("document.title") == title
            assert (
                page.evaluate("document.querySelectorAll('#hit, img, script:not([src])').length")
                == 0
            )
        for text in (f"0{MARKUP}", f"1{MARKUP}", f"prompt{MARKUP}", f"first{MARKUP}"):
            assert text in shown, text
        assert page.errors == []
        (row,) = map(json.loads, service.votes.path.read_text().splitlines())
        assert MARKUP in row["chosen"][0]["content"]
        assert row["chosen_model"] in models
    finally:
        page.close()
        service.votes.path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------- slow and many clients


def test_a_client_that_reads_nothing_is_left(service, monkeypatch):

    listen = places.listen

    def listen_with_little_room(host, port):
        listening = listen(host, port)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listening

    monkeypatch.setattr(places, "listen", listen_with_little_room)
    monkeypatch.setattr("dschat_lora.addons.serving.endpoint.http_server.CLIENT_SECONDS", 0.3)
    own = on_endless(service, rows=16, queue=0)
    body = {"model": "endless", "prompt": "Hi", "stream": True, "n": 16, "max_tokens": 400}
    body = json.dumps(body).encode()
    with running_server(own) as address, socket.socket() as connection:
        url = urlsplit(address)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((url.hostname, url.port))
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while own.decoder.load == (0, 0):
            time.sleep(0.01)
        deadline = time.monotonic() + 30
        while own.decoder.load != (0, 0):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        received = b""
        with suppress(ConnectionResetError):
            while chunk := connection.recv(65536):
                received += chunk
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received


def test_a_stream_that_is_cancelled_is_decoded_for_one_more_step_at_most(address, service):
    pieces, steps = [], []
    rows = service.models["endless"].batch.rows
    step = rows.step
    rows.step = lambda tokens: (steps.append(1), step(tokens))[1]
    try:
        options = AnswerOptions(400, temperature=0)
        answer = service.decoder.submit(service.models["endless"], [5], options, pieces.append)
        while not pieces:
            time.sleep(0.001)
        service.decoder.leave(answer)
        at_leaving = len(steps)
        while service.decoder.load != (0, 0):
            time.sleep(0.01)
        assert len(steps) <= at_leaving + 1
    finally:
        del rows.step


def test_many_clients_at_once_are_all_answered(address):
    count = 1000 if ALL else 100

    async def run():
        url = urlsplit(address)
        body = json.dumps(PLAIN).encode()

        async def one(number):
            while True:
                try:
                    reader, writer = await asyncio.open_connection(url.hostname, url.port)
                    break
                except OSError:
                    await asyncio.sleep(0.05)
            head = POST.replace(b"/v1/completions", CHAT.encode())
            writer.write(
                head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
            )
            status = int((await reader.read()).split()[1])
            writer.close()
            return status

        return await asyncio.gather(*map(one, range(count)))

    statuses = asyncio.run(run())
    assert len(statuses) == count
    assert set(statuses) <= {200, 429}  # the queue of this server is short
    assert statuses.count(200) >= 100
    check_answers(address)


@pytest.mark.stage
@pytest.mark.thorough
def test_memory_stays_flat_and_logs_hold_no_secret(tmp_path):
    command = [sys.executable, "-m", "dschat_lora", "serve", "base", "--port", "0"]
    command += ["--token", "TOPSECRET", "--host", "127.0.0.1"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        line = process.stdout.readline()
        while " at http" not in line:
            line = process.stdout.readline()
        address = re.search(r"http://[\d.:]+", line)[0]
        headers = {"Authorization": "Bearer TOPSECRET"}
        wrong = [b"", b"{", b"[" * 100_000, b'{"a": "\xed\xa0\xbd"}', b'{"model": "x"}']

        def ask(number):
            body = {"model": "base", "prompt": f"PRIVATE {number}", "max_tokens": 1 + number % 8}
            if number % 4 == 3:
                send(address, "POST", CHAT, wrong[number % len(wrong)], headers)
                raw(address, list(HTTP.values())[number % len(HTTP)])
            return send(address, "POST", TEXT, body, headers)[0]

        def resident():
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(re.search(r"VmRSS:\s+(\d+)", status)[1])

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(ask, range(100))) == {200}
            after_100 = resident()
            assert set(pool.map(ask, range(100, 2000))) == {200}
        assert resident() < 1.05 * after_100
    finally:
        process.terminate()
        rest = process.communicate(timeout=60)[0]
    assert "PRIVATE" not in rest
    assert "TOPSECRET" not in rest
    assert "Traceback" not in rest, rest[rest.find("Traceback") - 200 :][:4000]
