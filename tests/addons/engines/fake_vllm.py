"""A program in the place of ``vllm``, for ``python fake_vllm.py TARGET serve MODEL --port ...``.

It passes connections on to the server at TARGET, HOST:PORT; where that is ``alone`` it says itself
what it serves, and does nothing else. Its log begins with what it was started with. As ``broken``
it fails as vLLM does, and as ``stubborn`` it never answers, nor ends when it is told to.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


def command_of(target):
    """What ``--vllm_command`` starts this program with, for a server's address too."""
    return shlex.join([sys.executable, __file__, target.removeprefix("http://"), "serve"])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "base", "max_model_len": 64}]}')


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def forward(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def pass_on(host, port, listener):
    while True:
        inner, _ = listener.accept()
        outer = socket.create_connection((host, int(port)))
        for pair in ((inner, outer), (outer, inner)):
            threading.Thread(target=forward, args=pair, daemon=True).start()


def main():
    target, words = sys.argv[1], sys.argv[2:]
    engine = subprocess.Popen(["sleep", "60"]).pid  # as vLLM has one in a process of its own
    say(json.dumps({"words": words, "pids": [os.getpid(), engine]}))
    if target == "broken":
        say("(EngineCore) ValueError: no such model\nRuntimeError: see above\n")
        sys.exit(3)
    if target == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("loading")
        time.sleep(60)
    here = "127.0.0.1", int(words[words.index("--port") + 1])
    if target == "alone":
        HTTPServer(here, Handler).serve_forever()
    pass_on(*target.split(":"), socket.create_server(here))


if __name__ == "__main__":
    main()
