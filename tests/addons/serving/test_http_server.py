"""Attacks by connections on the HTTP server that all commands share, with a good client beside."""

import re
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the extra [serving] is not installed")

from starlette.responses import JSONResponse
from starlette.routing import Route

from dschat_lora.addons.serving.endpoint import guard, http_server
from dschat_lora.addons.serving.endpoint.guard import read_json
from dschat_lora.addons.serving.endpoint.http_server import HttpServer, make_app
from dschat_lora.addons.serving.endpoint.sockets import listen

PACKAGE = Path(http_server.__file__).parents[1]
HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def port():
    async def echo(request):
        return JSONResponse(await read_json(request))

    async def ping(request):
        return JSONResponse({})

    async def raw(request):
        return JSONResponse(len(await request.body()))

    routes = [Route("/ping", ping), Route("/echo", echo, methods=["POST"])]
    routes.append(Route("/raw", raw, methods=["POST"]))
    with listen("127.0.0.1", 0) as listening:
        server = HttpServer(make_app(routes, host="127.0.0.1", token=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 0.3)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(guard, "BODY_RATE", 2**20)


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def ask(port, content=b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"):
    with connect(port) as connection:
        connection.sendall(content)
        with suppress(ConnectionResetError):
            return connection.recv(1000)
    return b""


@pytest.mark.parametrize(
    ("start", "drip", "answer"),
    [
        (b"", b"", b""),
        (b"", b"G", b""),
        (HEAD, b"X: 1\r\n", b""),
        (HEAD + b"Content-Length: 50\r\n\r\n", b"", b"408"),
        (HEAD + b"Content-Length: 5000\r\n\r\n", b" ", b"408"),
        (CHUNKED, b"1\r\n \r\n", b"408"),
        (CHUNKED, b"1000\r\n%b\r\n" % (b" " * 4096), b"408"),
        (CHUNKED.replace(b"echo", b"raw"), b"1\r\n \r\n", b"408"),
        (CHUNKED.replace(b"POST /echo", b"GET /ping"), b"1\r\n \r\n", b"200"),  # nobody reads it
    ],
    ids=[
        *("says nothing", "head byte by byte", "headers without end", "body never comes"),
        *("body byte by byte", "chunks byte by byte", "chunks without end"),
        *("bytes that are no JSON", "body that nobody reads"),
    ],
)
def test_a_client_that_takes_its_time_is_left(port, start, drip, answer):
    begun, received = time.monotonic(), b""
    with connect(port) as connection, suppress(ConnectionError):
        connection.sendall(start)
        connection.settimeout(0.03)
        assert ask(port).startswith(b"HTTP/1.1 200")
        while time.monotonic() < begun + 3:
            connection.sendall(drip)
            with suppress(TimeoutError):
                if not (part := connection.recv(1000)):
                    break
                received += part
    assert time.monotonic() < begun + 2
    assert received.partition(b"\r\n")[0].split()[1:2] == ([answer] if answer else [])


@pytest.mark.parametrize("path", [b"/echo", b"/raw"])
def test_a_body_that_is_too_large_is_refused_before_it_is_whole(port, path):
    chunk = b"10000\r\n%b\r\n" % bytes(2**16)
    assert ask(port, CHUNKED.replace(b"/echo", path) + chunk * 17).startswith(b"HTTP/1.1 413")


def test_all_bodies_together_are_bounded(port, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 30.0)
    monkeypatch.setattr(guard, "MAX_BODIES_BYTES", 100_000)
    head = HEAD + b"Content-Length: 60002\r\n\r\n"
    text = b'"%b"' % (b"x" * 60_000)
    for _ in range(3):  # what was answered, or given up, is not held
        with connect(port) as slow:
            slow.sendall(head + text[:-1])
            time.sleep(0.05)
            assert ask(port, head + text).startswith(b"HTTP/1.1 503")
            assert ask(port).startswith(b"HTTP/1.1 200")
            slow.sendall(text[-1:])
            assert slow.recv(1000).startswith(b"HTTP/1.1 200")
        assert ask(port, head + text).startswith(b"HTTP/1.1 200")
        with connect(port) as gone:
            gone.sendall(head + text[:-1])
            time.sleep(0.05)
        time.sleep(0.05)


def test_a_body_that_comes_fast_enough_may_take_longer(port, monkeypatch):
    monkeypatch.setattr(guard, "BODY_RATE", 10)
    with connect(port) as connection:
        connection.sendall(HEAD + b"Content-Length: 12\r\n\r\n1         ")
        time.sleep(0.6)
        connection.sendall(b"  ")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_the_oldest_idle_connection_makes_room_for_a_new_one(port, monkeypatch):
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 30.0)
    monkeypatch.setattr(guard, "BODY_SECONDS", 30.0)
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 20)
    with ExitStack() as stack:
        many = [stack.enter_context(connect(port)) for _ in range(60)]
        for each in many[1::2]:
            with suppress(ConnectionError):
                each.sendall(HEAD + b"Content-Length: 50\r\n\r\n")
        for _ in range(5):
            assert ask(port).startswith(b"HTTP/1.1 200")
        ends = []
        for each in many:
            each.settimeout(0.02)
            try:
                ends.append(each.recv(1) == b"")
            except ConnectionResetError:
                ends.append(True)
            except TimeoutError:
                ends.append(False)
    assert ends.count(False) <= 20
    assert ends == sorted(ends, reverse=True)  # the oldest ones


def test_applications_and_servers_are_made_in_one_place():
    made = re.compile(r"\bStarlette\(|uvicorn\.(Server|Config|run)\(")
    files = [path for path in PACKAGE.rglob("*.py") if made.search(path.read_text())]
    assert files == [PACKAGE / "endpoint/http_server.py"]
