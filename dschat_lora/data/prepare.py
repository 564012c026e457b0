"""Preparation of data: rows to cached token sets, with an audit."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dschat_lora.config.data import DataConfig
from dschat_lora.data.audit import Audit, make_audit
from dschat_lora.data.cache import load_or_build
from dschat_lora.data.chat import make_chat
from dschat_lora.data.collect import Collected, Indices, collect
from dschat_lora.data.encoder import Tokenizer, make_encoder
from dschat_lora.data.fingerprint import fingerprint
from dschat_lora.data.readers import count_rows
from dschat_lora.data.rows import DataKind, config_sources
from dschat_lora.data.sources import Source
from dschat_lora.data.store import TokenSet, join
from dschat_lora.data.tally import add_up
from dschat_lora.data.token_writer import TokenTask, TokenWriter, read_tally, token_tasks
from dschat_lora.data.tokenize import TokenRule
from dschat_lora.data.unpaired import mismatched_records
from dschat_lora.data.workers import map_in_order, usable_cores


class Bar(Protocol):
    """How far something is, for who watches."""

    def update(self, count: int) -> object:
        """So many more are done."""


# Makes a bar of a name, and of what tells how many there are (None: that is not known).
Progress = Callable[[str, Callable[[], int | None]], AbstractContextManager[Bar]]


class _NoBar:
    def update(self, count: int) -> None:
        """Show nothing."""


def no_progress(what: str, count: Callable[[], int | None]) -> AbstractContextManager[Bar]:
    """No bar."""
    return nullcontext(_NoBar())


MAX_WORKERS = 16  # processes that prepare data, unless the user says how many


@dataclass(frozen=True)
class Prepared:
    """Tokenised data of one step of training."""

    train: TokenSet
    eval: TokenSet
    audit: Audit
    fingerprint: str
    from_cache: bool


def prepare(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    phase: int,
    seed: int,
    eos_id: int,
    cache_dir: Path,
    kind: DataKind = "samples",
    progress: Progress = no_progress,
) -> Prepared:
    """Token sets of samples or pairs, from the cache if they were made before.

    Safe to call in several processes at once; the first to finish fills the cache, which is
    ``cache_dir/FINGERPRINT``. :meth:`Audit.check` refuses data that is not fit to train on.

    The split is disjoint between phases 1, 2 and 3 of equal ``seed``. ``eos_id`` ends a sequence;
    it need not be the tokenizer's own.

    Raises:
        ValueError: for data that cannot be found, read or used, naming file and row.
    """
    sources = config_sources(config)
    key = fingerprint(config, sources, tokenizer, phase=phase, seed=seed, eos_id=eos_id, kind=kind)
    rule = token_rule(config, eos_id, kind)

    def build(directory: Path) -> dict[str, Any]:
        return _build(
            config,
            sources,
            tokenizer,
            rule,
            directory,
            phase=phase,
            seed=seed,
            eos_id=eos_id,
            progress=progress,
        )

    content, from_cache = load_or_build(cache_dir / key, build)
    train, held_out = (
        TokenSet(cache_dir / key / f"{name}.arrow", kind, digest=content["digests"][name])
        for name in ("train", "eval")
    )
    return Prepared(train, held_out, Audit.from_dict(content["audit"]), key, from_cache)


def _build(
    config: DataConfig,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    rule: TokenRule,
    directory: Path,
    *,
    phase: int,
    seed: int,
    eos_id: int,
    progress: Progress,
) -> dict[str, Any]:
    """Write both token sets; returns their digests and audit.

    Files of some thousand rows are written first: of records, then of tokens. A process that is
    killed leaves them to the next one. Nothing else grows with the number of rows but a few bytes
    for each.
    """
    parts, kind = directory / "parts", rule.kind
    parts.mkdir(exist_ok=True)
    workers = config.preprocessing_num_workers or min(MAX_WORKERS, usable_cores())
    chat = make_chat(tokenizer, config.chat_template_kwargs, eos_id=eos_id)
    encoder = make_encoder(tokenizer)
    with progress("reading rows", lambda: _count(sources)) as bar:
        rows = collect(
            config,
            sources,
            chat,
            parts,
            phase=phase,
            seed=seed,
            kind=kind,
            workers=workers,
            on_rows=bar.update,
        )
    tasks = {
        "train": _tasks(rows, "train", rows.train, rows.train_repeats, parts, seed),
        "eval": _tasks(rows, "eval", rows.eval, np.ones_like(rows.eval), parts, seed),
    }
    writer = TokenWriter(rows.rows, encoder, rule)
    digests, tallies = {}, []
    with progress("tokenising rows", lambda: len(rows.train) + len(rows.eval)) as bar:
        for name, own in tasks.items():
            paths, counted = [], []
            for path in map_in_order(writer, own, workers=workers):
                paths.append(path)
                counted.append(read_tally(path))
                bar.update(counted[-1].rows)
            digests[name] = join(paths, directory / f"{name}.arrow", kind)
            tallies.append(add_up(counted))
    shutil.rmtree(parts)
    return {"audit": make_audit(config, rows, *tallies).to_dict(), "digests": digests}


def token_rule(config: DataConfig, eos_id: int, kind: DataKind) -> TokenRule:
    """How records become samples, by the options."""
    return TokenRule(
        eos_id,
        config.max_seq_len,
        config.overlong,
        config.train_on_prompt,
        kind,
        config.eos_after_prompt,
    )


def _tasks(
    rows: Collected, name: str, numbers: Indices, repeats: Indices, directory: Path, seed: int
) -> Iterator[TokenTask]:
    others = None
    if rows.kind == "unpaired":
        others = mismatched_records(rows.rows, numbers, rows.train, seed=seed)
    return token_tasks(directory, name, rows.rows, numbers, repeats, others)


def _count(sources: Sequence[Source]) -> int | None:
    total = 0
    for source in sources:
        rows = count_rows(source)
        if rows is None:
            return None
        total += rows
    return total
