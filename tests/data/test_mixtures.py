"""Shares of several sources, of prepared rows; refusals of what cannot be mixed."""

import json
from collections import Counter

import numpy as np
import pytest
from hand_tokenizers import build_byte_tokenizer

from dschat_lora.config.data import DataConfig, mixture_shares, split_weight
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.loader import SampleSources, StepLoader
from dschat_lora.data.packing import make_rows
from dschat_lora.data.prepare import prepare
from dschat_lora.data.rows import config_sources


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, size in (("a", 30), ("b", 120), ("c", 50)):
        rows = [{"prompt": f"{name}{i}:", "completion": " x"} for i in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def prepared(files, *paths, **options):
    config = DataConfig(data_path=paths, **{"eval_ratio": 0.0, "max_seq_len": 64} | options)
    tokenizer = build_byte_tokenizer()
    found = prepare(config, tokenizer, phase=1, seed=3, eos_id=2, cache_dir=files / "cache")
    texts = [tokenizer.decode(found.train[i].input_ids) for i in range(len(found.train))]
    return found, [text.removeprefix("<s>").split(":")[0] for text in texts]


def test_an_epoch_has_as_many_rows_as_all_sources_in_the_shares_that_are_asked(files):
    found, names = prepared(files, "a.jsonl:0.6", "b.jsonl:0.3", "c.jsonl:0.1")
    assert Counter(name[0] for name in names) == {"a": 120, "b": 60, "c": 20}
    assert set(Counter(name for name in names if name[0] == "a").values()) == {4}
    assert set(Counter(name for name in names if name[0] in "bc").values()) == {1}
    assert found.train_sources == {"a.jsonl": 120, "b.jsonl": 60, "c.jsonl": 20}
    assert found.times == pytest.approx({"a.jsonl": 4.0, "b.jsonl": 0.5, "c.jsonl": 0.4})


def test_weights_of_any_size_make_shares_and_those_that_leave_none_are_refused():
    assert mixture_shares({0: 1.5e308, 1: 0.5e308}) == pytest.approx({0: 0.75, 1: 0.25})
    with pytest.raises(ValueError, match="give every entry a share > 0"):
        DataConfig(data_path=(f"a:1{'0' * 200}", f"b:0.{'0' * 200}1"))


def test_a_source_may_be_cut_to_its_first_rows(files):
    found, names = prepared(files, "a.jsonl", "b.jsonl", max_source_rows=(5, 0))
    assert [name for name in names if name[0] == "a"] == [f"a{i}" for i in range(5)]
    assert found.audit.train_rows == 125


def test_steps_count_samples_tokens_and_epochs_of_each_source(files):
    found, names = prepared(files, "a.jsonl:3", "b.jsonl:1")
    sizes, collate = found.train_sources, SampleCollator(0)
    numbers = [0] * sizes["a.jsonl"] + [1] * sizes["b.jsonl"]
    counts = collate.counts(found.train)
    loader = StepLoader(
        found.train,
        rows=make_rows(counts.positions, max_seq_len=64, packing=True, seed=3),
        micro_batch_size=4,
        gradient_accumulation_steps=1,
        rank=0,
        world_size=1,
        seed=3,
        collate=collate,
        counts=counts,
        sources=SampleSources(tuple(sizes), np.array(numbers), (3.75, 0.3125)),
    )
    windows = list(loader.epoch(1))
    total = Counter()
    for window in windows:
        metrics = {n: v for n, v in window.metrics.items() if not n.startswith("epochs/")}
        assert metrics["tokens/a.jsonl"] + metrics["tokens/b.jsonl"] == window.counts["num_tokens"]
        total.update(metrics)
    assert total["samples/a.jsonl"] == sum(name[0] == "a" for name in names) == 113
    assert total["samples/b.jsonl"] == sum(name[0] == "b" for name in names) == 38
    assert windows[-1].metrics["epochs/a.jsonl"] == 7.5


def test_a_number_behind_the_last_colon_is_a_weight_unless_a_file_has_that_name(files):
    assert split_weight("a.jsonl:0.6") == ("a.jsonl", 0.6)
    assert split_weight("org/name:config:split:2") == ("org/name:config:split", 2.0)
    assert split_weight("org/name:train") == ("org/name:train", None)
    (files / "b:2").write_text("")
    assert split_weight("b:2") == ("b:2", None)
    for odd in ("~nobody-of-that-name/b", "a" * 5000, r"C:\data\b"):
        assert split_weight(f"{odd}:2") == (odd, 2.0)
    assert [s.weight for s in config_sources(DataConfig(data_path=("a.jsonl:.5",)))] == [0.5]
