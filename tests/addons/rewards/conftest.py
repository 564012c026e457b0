"""A server that scores or judges, for tests."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest


@pytest.fixture
def server():
    """``server(answer, path, code)``: the address of one that answers so, and what it is asked.

    ``answer`` gets the JSON that was sent, None where none was, and gives JSON or bytes; a POST is
    answered with ``code``, and kept as path, key and JSON.
    """
    asked, running = [], []

    def of(answer, path, code=200):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(answer(None), 200)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append((self.path, self.headers["Authorization"], body))
                self.reply(answer(body), code)

            def reply(self, found, code):
                text = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *words):
                pass

        running.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=running[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_port}{path}", asked

    yield of
    for each in running:
        each.shutdown()
        each.server_close()
