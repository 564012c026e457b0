"""Files of rows, and what they are prepared as."""

import json

import pytest
from hand_tokenizers import build_byte_tokenizer

from dschat_lora.config.data import DataConfig
from dschat_lora.data.prepare import prepare


@pytest.fixture
def jsonl(tmp_path):
    """Writes rows (dicts, or raw lines) to a file and returns its path."""

    def write(rows, name="train.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def byte_tokenizer():
    return build_byte_tokenizer()


@pytest.fixture
def run(tmp_path, byte_tokenizer):
    """``prepare`` of files, with settings of its own for one call."""

    def call(*paths, tokenizer=byte_tokenizer, phase=1, seed=0, eos_id=2, kind="samples", **more):
        options = {"max_seq_len": 64, "eval_ratio": 0.0} | more
        config = DataConfig(data_path=tuple(map(str, paths)), **options)
        where = {"cache_dir": tmp_path / "cache", "kind": kind}
        return prepare(config, tokenizer, phase=phase, seed=seed, eos_id=eos_id, **where)

    return call
