"""Which rows a process reads, where processes hold one model or divide rows among them."""

from types import SimpleNamespace

import pytest

from dschat_lora.config.data import DataConfig
from dschat_lora.config.groups import ParallelConfig
from dschat_lora.config.stages import PairConfig
from dschat_lora.supervised import batching
from helpers.addons import of_addon

KTO = of_addon("kto.objective")


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
    shares = []
    for rank in range(4):
        monkeypatch.setattr(batching, "rank", lambda rank=rank: rank)
        shares.append(batching.row_share(setup))
    assert [each["rank"] for each in shares] == expected
    assert {each["world_size"] for each in shares} == {len(set(expected))}


def layout_of(monkeypatch, kind, *, divisible):
    """The layout that the seventh of eight processes makes, of which four divide rows."""
    monkeypatch.setattr(batching, "rank", lambda: 6)
    monkeypatch.setattr(batching, "context", lambda: "both")
    for module in (batching, *KTO):
        monkeypatch.setattr(module, "resolve_packing", lambda *_: False)
    monkeypatch.setattr(batching, "resolve_pair_layout", lambda *_, **__: ("alone", False))
    config = SimpleNamespace(parallel=ParallelConfig(context_parallel_size=4), data=DataConfig())
    setup = SimpleNamespace(config=config, tokenizer=Tokenizer(), data=None, run=None)
    backbone = SimpleNamespace(is_divisible=divisible, model=None)
    engine = SimpleNamespace(module=SimpleNamespace(backbone=backbone))
    home = KTO[0] if kind == "unpaired" else batching
    make = getattr(home, f"make_{kind}_layout")
    return make(setup, engine, *([PairConfig()] if kind == "pair" else []))


class Tokenizer:
    pad_token_id = 0

    def __len__(self):
        return 8


@pytest.mark.parametrize("kind", ["sample", "pair", *["unpaired"] * len(KTO)])
def test_batches_of_every_kind_are_divided_among_the_group(monkeypatch, kind):
    group = layout_of(monkeypatch, kind, divisible=True).collate.context
    assert (group.process_group, group.rank, group.size) == ("both", 2, 4)


@pytest.mark.parametrize("kind", ["sample", "pair", *["unpaired"] * len(KTO)])
def test_a_model_whose_layers_mix_tokens_is_refused(monkeypatch, kind):
    with pytest.raises(ValueError, match="4 needs a model whose tokens interact only in"):
        layout_of(monkeypatch, kind, divisible=False)
