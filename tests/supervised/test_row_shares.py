"""Which rows a process reads, where processes hold one model or divide rows among them."""

from types import SimpleNamespace

import pytest

from dschat_lora.config.groups import ParallelConfig
from dschat_lora.supervised import batching


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"context_parallel_size": 2}, [0, 0, 1, 1]),
        ({"tensor_parallel_size": 2}, [0, 0, 1, 1]),
        ({"context_parallel_size": 4}, [0, 0, 0, 0]),
    ],
)
def test_processes_that_follow_one_another_share_rows(monkeypatch, sizes, expected):
    setup = SimpleNamespace(config=SimpleNamespace(parallel=ParallelConfig(**sizes)))
    monkeypatch.setattr(batching, "world_size", lambda: 4)
    found = []
    for rank in range(4):
        monkeypatch.setattr(batching, "rank", lambda rank=rank: rank)
        found.append(batching.row_share(setup))
    assert [each["rank"] for each in found] == expected
    assert {each["world_size"] for each in found} == {len(set(expected))}
