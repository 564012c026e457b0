"""Preparation of data: rows to cached token sets, with an audit, and a preview of samples."""

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from dschat_lora.config.data import DataConfig
from dschat_lora.data.audit import DataAudit, make_audit
from dschat_lora.data.cache import code_digest, file_digest, load_or_build
from dschat_lora.data.chat import make_chat
from dschat_lora.data.collect import Collected, collect
from dschat_lora.data.digests import DataDigest
from dschat_lora.data.encoder import Tokenizer, describe_tokenizer, make_encoder
from dschat_lora.data.media import MediaReader
from dschat_lora.data.readers import count_rows, iter_rows, load_hub
from dschat_lora.data.record_files import RecordTokenizer, RowCounts, RowReader, token_tasks
from dschat_lora.data.records import answers_of
from dschat_lora.data.row_arrays import Indices
from dschat_lora.data.rows import DataKind, config_sources, row_options
from dschat_lora.data.samples import (
    AnySample,
    Columns,
    PairSample,
    SequenceSample,
    TokenSet,
    UnpairedSample,
    write_set,
)
from dschat_lora.data.sources import DataSource, data_suffix
from dschat_lora.data.token_files import Tally, TokenWriter
from dschat_lora.data.tokenize import TokenRule, tokenize
from dschat_lora.data.workers import map_in_order, usable_cores

if TYPE_CHECKING:
    from datasets import Dataset

MAX_WORKERS = 16  # processes that prepare data, unless the user says how many
# Options that decide what is prepared.
OPTIONS = (
    *("max_seq_len", "overlong", "bad_rows", "columns", "unpaired_rows", "train_on_prompt"),
    *("eos_after_prompt", "data_split", "data_weights", "eval_ratio", "chat_template_kwargs"),
    "train_empty_think",
)


class Bar(Protocol):
    """How far something is, for who watches."""

    def update(self, count: int) -> object:
        """So many more are done."""


# Makes a bar of a name, and of what tells how many there are (None: that is not known).
Progress = Callable[[str, Callable[[], int | None]], AbstractContextManager[Bar | None]]


@dataclass(frozen=True)
class Prepared:
    """Tokenised data of one step of training."""

    train: TokenSet
    eval: TokenSet
    audit: DataAudit
    fingerprint: str
    from_cache: bool
    names: tuple[str, ...] = ()  # of all sources, for metrics
    # by these, in order: samples, and times that rows are used per epoch, on average
    train_sources: dict[str, int] = field(default_factory=dict)
    eval_sources: dict[str, int] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    # with a tail: digests of held-out rows and their prompts, not to be trained on
    left_out: frozenset[bytes] = frozenset()
    media: MediaReader | None = None  # of inputs beside text, where rows have any


def prepare(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    phase: int,
    seed: int,
    eos_id: int,
    cache_dir: Path,
    kind: DataKind = "samples",
    progress: Progress = lambda what, count: nullcontext(),
    media: MediaReader | None = None,
) -> Prepared:
    """Token sets of samples or pairs, from the cache if they were made before.

    Safe to call in several processes at once; the first to finish fills the cache, which is
    ``cache_dir/FINGERPRINT``. :meth:`DataAudit.check` refuses data that is not fit to train on.

    The split is disjoint between phases 1, 2 and 3 of equal ``seed``. ``eos_id`` ends a sequence;
    it need not be the tokenizer's own. ``media`` reads what rows hold beside text; without it such
    rows are refused.

    Raises:
        ValueError: for data that cannot be found, read or used, naming file and row.
    """
    sources = config_sources(config)
    run: dict[str, Any] = {"phase": phase, "seed": seed, "eos_id": eos_id, "kind": kind}
    beside_text, reader = None if media is None else media.scan(config, sources), media
    media = media if beside_text is not None else None
    key = fingerprint(config, sources, tokenizer, media=beside_text, **run)
    run |= {"media": media, "reader": reader}
    build = partial(_build, config, sources, tokenizer, progress=progress, **run)
    content, from_cache = load_or_build(cache_dir / key, build)
    if media is not None:
        media.read(cache_dir / key)
    train, held_out = (
        TokenSet.read(
            cache_dir / key / f"{name}.arrow", kind, DataDigest.of(content["digests"][name])
        )
        for name in ("train", "eval")
    )
    names = source_names(sources)
    train_sources, eval_sources, times = (
        {names[int(number)]: value for number, value in values.items()}
        for values in (content["sources"]["train"], content["sources"]["eval"], content["times"])
    )
    return Prepared(
        train,
        held_out,
        DataAudit.from_dict(content["audit"]),
        key,
        from_cache,
        tuple(names),
        train_sources,
        eval_sources,
        times,
        left_out=frozenset(map(bytes.fromhex, content["left_out"])),
        media=media,
    )


def source_names(sources: Sequence[DataSource]) -> list[str]:
    """A name of each source, for metrics: the last part of its path, if no other has it."""
    names: list[str] = []
    ends = [Path(source.name).name for source in sources]
    for end, source in zip(ends, sources, strict=True):
        name = end if ends.count(end) == 1 else source.name
        names.append(name if name not in names else f"{name} ({len(names) + 1})")
    return names


def _build(
    config: DataConfig,
    sources: Sequence[DataSource],
    tokenizer: Tokenizer,
    directory: Path,
    *,
    phase: int,
    seed: int,
    eos_id: int,
    kind: DataKind,
    progress: Progress,
    media: MediaReader | None,
    reader: MediaReader | None,
) -> dict[str, Any]:
    """Write both token sets; returns their digests and audit.

    Files of some thousand rows are written first: of samples, or of records and then of samples
    where only all rows tell which ones are used, or what an answer is compared with. A process that
    is killed leaves them to the next one. Memory does not grow with the rows, but for KTO's numbers
    of the answers that are compared. ``reader`` is ``media`` or, where no usable row holds more
    than text, what says what is wrong with others.
    """
    (parts := directory / "parts").mkdir(exist_ok=True)
    workers = num_workers(config)
    if media is not None:
        media.number(directory, workers=workers)
    chat = make_chat(tokenizer, config.chat_template_kwargs, eos_id=eos_id)
    tokens = TokenWriter(make_encoder(tokenizer), token_rule(config, eos_id, kind))
    uses_all = config.data_split is None and not config.is_mixture
    at_once = uses_all and min(config.data_weights, default=1) >= 1 and kind != "unpaired"
    what = "tokenising rows" if at_once else "reading rows"
    with progress(what, lambda: count_rows(sources)) as bar:
        collected = collect(
            config,
            sources,
            chat,
            parts,
            workers=workers,
            on_rows=bar.update if bar is not None else lambda count: None,
            phase=phase,
            seed=seed,
            kind=kind,
            tokens=tokens if at_once else None,
            media=reader,
        )
    files = collected.rows
    sets: dict[str, NDArray[Any]] = {
        "train": collected.times,
        "eval": collected.eval.view(np.uint8),
    }
    paths, used = dict(enumerate(files.paths)), np.ones(files.size, bool)
    if not at_once:
        used = (collected.times > 0) | collected.eval
        with progress("tokenising rows", lambda: int(used.sum())) as bar:
            tasks = token_tasks(files, used, _mismatched(collected, used, seed=seed), parts)
            for task in map_in_order(RecordTokenizer(files, tokens), tasks, workers=workers):
                paths[task.file] = task.path
                if bar is not None:
                    bar.update(len(task.rows))
    tallies, digests, samples = _write_sets(directory, sets, collected, paths, used, progress)
    shutil.rmtree(parts)
    return {
        "audit": make_audit(
            config,
            collected,
            *tallies.values(),
            phase=phase,
            media_kind="" if media is None else media.kind,
        ).to_dict(),
        "digests": {name: digest.to_dict() for name, digest in digests.items()},
        "sources": samples,
        "times": collected.source_times,
        "left_out": [] if config.tail is None or config.eval_data_path else _left_out(collected),
    }


def _write_sets(
    directory: Path,
    sets: Mapping[str, NDArray[np.integer]],
    collected: Collected,
    paths: Mapping[int, Path],
    used: NDArray[np.bool_],
    progress: Progress,
) -> tuple[dict[str, Tally], dict[str, DataDigest], dict[str, Counter[int]]]:
    """Write token sets; returns counts of each, its digest, and its samples by their source.

    ``sets`` say how often each row is in a set; the files at ``paths`` have those of ``used`` rows.
    """
    files, tallies = collected.rows, {name: Tally() for name in sets}
    samples: dict[str, Counter[int]] = {name: Counter() for name in sets}

    def chosen(name: str, bar: Bar | None) -> Iterator[Columns]:
        """The samples of a set, file by file."""
        tally = tallies[name]
        for file, own in enumerate(files.slices):
            times = sets[name][own][used[own]]
            if times.any():
                before = tally.samples
                yield from tally.choose(paths[file], times)
                samples[name][files.sources[file]] += tally.samples - before
                if bar is not None:
                    bar.update(int(np.count_nonzero(times)))

    count = sum(int(np.count_nonzero(times)) for times in sets.values())
    with progress("writing samples", lambda: count) as bar:
        digests = {
            name: write_set(directory / f"{name}.arrow", chosen(name, bar), collected.kind)
            for name in sets
        }
    return tallies, digests, samples


def _mismatched(collected: Collected, used: NDArray[np.bool_], *, seed: int) -> Indices | None:
    """Of answers of KTO, for each record of used rows the number of one to another prompt."""
    if collected.kind != "unpaired":
        return None
    files, trained = collected.rows, collected.times > 0
    others = np.zeros(int(files.sizes.sum()), np.int64)
    for rows in (trained, collected.eval):
        others[np.repeat(rows, files.sizes)] = files.mismatched(rows, trained, seed=seed)
    return others[np.repeat(used, files.sizes)]


def _left_out(collected: Collected) -> list[str]:
    """Hex digests of held-out rows, and of their prompts where all rows of one are held out."""
    files, held_out, trained = collected.rows, collected.eval, collected.times > 0
    rows, prompts, others = (
        {digest.tobytes() for digest in digests}
        for digests in (files.digests[held_out], files.groups[held_out], files.groups[trained])
    )
    return sorted(digest.hex() for digest in rows | prompts - others - {bytes(16)})


def num_workers(config: DataConfig) -> int:
    """Processes that prepare data."""
    return config.preprocessing_num_workers or min(MAX_WORKERS, usable_cores())


def token_rule(config: DataConfig, eos_id: int, kind: DataKind) -> TokenRule:
    """How records become samples, by the options."""
    return TokenRule(
        eos_id,
        config.max_seq_len,
        config.overlong,
        config.train_on_prompt,
        kind,
        config.eos_after_prompt,
        config.train_empty_think,
    )


def fingerprint(
    config: DataConfig,
    sources: Sequence[DataSource],
    tokenizer: Tokenizer,
    *,
    phase: int,
    seed: int,
    eos_id: int,
    kind: DataKind,
    media: str | None = None,
) -> str:
    """32 hex digits, equal only if the prepared data would be equal.

    Files count by content, not by name or time, and a hub data set by its own fingerprint. The
    code counts by its text, so that a changed rule never meets data made by the old one.
    """
    described: list[list[object]] = []
    for source in sources:
        identity: list[object]
        if source.files and source.tail is None:
            identity = [[data_suffix(file), file_digest(file)] for file in source.files]
        elif source.hub_name is not None and source.tail is None:
            identity = [cast("Dataset", load_hub(source))._fingerprint]
        else:
            digest = hashlib.blake2b(digest_size=16)
            for row in iter_rows(source):
                text = json.dumps([row.values, row.problem], default=_without_address)
                digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
            identity = ["rows", digest.hexdigest()]
        described.append([source.option, *identity, source.weight, source.most])
    parts = {
        "sources": described,
        "options": {name: getattr(config, name) for name in OPTIONS},
        "has_tail": config.tail is not None,
        "run": [phase, seed, eos_id, kind],
        "tokenizer": describe_tokenizer(tokenizer),
        "code": code_digest(),
    }
    if media is not None:
        parts["media"] = media
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _without_address(value: object) -> str:
    """What an object without a form in JSON says of itself, which another process says, too."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


@dataclass(frozen=True)
class ShownSample:
    """Sequences of one sample: one, or of a pair the chosen and the rejected one."""

    row: str  # "file:line"
    sequences: dict[str, tuple[list[int], list[int]]]  # by name: tokens, and 1 where supervised


def preview(
    config: DataConfig, tokenizer: Tokenizer, *, eos_id: int, kind: DataKind
) -> Iterator[ShownSample]:
    """Samples as they are trained on, in the order of the rows; rows that cannot be used are none.

    Raises:
        ValueError: if a file cannot be read.
    """
    chat = make_chat(tokenizer, config.chat_template_kwargs, eos_id=eos_id)
    reader = RowReader(row_options(config, chat.media), chat, kind, skips=True)
    rule, encoder = token_rule(config, eos_id, kind), make_encoder(tokenizer)
    for source in config_sources(config):
        for raw in iter_rows(source):
            records, _ = reader.records(raw, RowCounts())
            if kind == "unpaired":
                # Its own answer stands for that to another prompt, which is not shown.
                answers = answers_of(*records)
                records = tuple(each._replace(mismatched=each.completion) for each in answers)
            for record, result in zip(records, tokenize(records, encoder, rule), strict=True):
                for sample in result.samples:
                    yield ShownSample(record.location, _sequences(sample))


def _sequences(sample: AnySample) -> dict[str, tuple[list[int], list[int]]]:
    if isinstance(sample, SequenceSample):
        return {"sample": (sample.input_ids.tolist(), sample.supervised.astype(int).tolist())}
    shown = {"prompt": sample.input_ids}
    if isinstance(sample, PairSample):
        shown = {"chosen": sample.chosen, "rejected": sample.rejected}
    elif isinstance(sample, UnpairedSample):
        shown = {"good answer" if sample.label else "bad answer": sample.input_ids}
    begin = len(sample.prompt)
    return {
        name: (ids.tolist(), [0] * begin + [1] * (len(ids) - begin)) for name, ids in shown.items()
    }
