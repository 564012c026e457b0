"""How many requests dschat-lora serve answers at once, against one after another.

Starts a server of the runs that are named (by default the bundled model alone), has each of
many clients ask a few questions at once, then asks the same questions one after another, and
prints seconds, tokens a second, their ratio, and the memory of the server's process.

    python benchmarks/serving.py output/sft output/dpo --clients 50 --requests 4
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import psutil

QUESTIONS = (
    "What is the opposite of hot?",
    "What is 12 plus 13?",
    "I am Gina. Name a fruit, please.",
    "Which is larger, 4 or 7?",
)


def main() -> None:
    """Measure, and print one line for each way of asking."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", default=["base"])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--max_tokens", type=int, default=32)
    parser.add_argument("--max_batch_size", type=int, default=32)
    chosen = parser.parse_args()
    command = [sys.executable, "-m", "dschat_lora", "serve", *chosen.runs, "--port", "0"]
    command += ["--max_batch_size", str(chosen.max_batch_size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            host, models = started(server)
            measure(host, models, server.pid, chosen.clients, chosen.requests, chosen.max_tokens)
        finally:
            server.terminate()


def started(server: "subprocess.Popen[str]") -> tuple[str, list[str]]:
    """The server's host and port, and its models."""
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"^(.+) at http://([\d.:]+) ", line):
            return found[2], found[1].split(", ")
    raise SystemExit("the server has not started")


def measure(
    host: str, models: Sequence[str], pid: int, clients: int, requests: int, max_tokens: int
) -> None:
    """All clients at once, twice, then the same requests one after another."""
    jobs = [
        (models[client % len(models)], QUESTIONS[number % len(QUESTIONS)])
        for client in range(clients)
        for number in range(requests)
    ]

    def client(number: int) -> int:
        own = jobs[number * requests :][:requests]
        return sum(ask(host, *job, max_tokens) for job in own)

    ask(host, *jobs[0], max_tokens)  # what is set up once is not measured
    rates = {}
    with ThreadPoolExecutor(clients) as pool:
        for name in ("at once", "at once, again"):
            rates[name] = timed(name, pid, len(jobs), lambda: sum(pool.map(client, range(clients))))
    rates["one by one"] = timed(
        "one by one", pid, len(jobs), lambda: sum(ask(host, *job, max_tokens) for job in jobs)
    )
    ratio = max(rates["at once"], rates["at once, again"]) / rates["one by one"]
    print(f"{clients} clients at once get {ratio:.1f} times the tokens a second")


def timed(name: str, pid: int, requests: int, work: Any) -> float:
    """Tokens a second of some work, which returns how many it got."""
    start = time.monotonic()
    tokens = work()
    seconds = time.monotonic() - start
    memory = psutil.Process(pid).memory_info().rss / 2**20
    print(
        f"{name:15} {requests} requests, {tokens:,} tokens in {seconds:.1f} s: "
        f"{tokens / seconds:,.0f} tokens/s, server at {memory:,.0f} MiB"
    )
    return tokens / seconds


def ask(host: str, model: str, question: str, max_tokens: int) -> int:
    """Tokens of one answer."""
    connection = HTTPConnection(host, timeout=600)
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    if response.status != 200:
        raise SystemExit(f"status {response.status}: {answer}")
    return int(answer["usage"]["completion_tokens"])


if __name__ == "__main__":
    main()
