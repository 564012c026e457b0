import json

import pytest

from helpers.hosts import TwoHosts, why_not

ROWS = [
    {
        "prompt": f"\n\nHuman: What is {n} plus {n % 7}?\n\nAssistant:",
        "completion": f" {n} plus {n % 7} is {n + n % 7}." * (1 + n % 3),
    }
    for n in range(96)
]


@pytest.fixture(scope="session")
def hosts(tmp_path_factory, launcher):
    """Two hosts, each with the same rows at ``rows.jsonl``."""
    if reason := why_not():
        pytest.skip(f"two hosts cannot be made: {reason}")
    running = TwoHosts(tmp_path_factory.mktemp("hosts"), launcher)
    running.write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    yield running
    running.stop()
