"""Deduplication and decontamination of rows, their languages, and a file of the rows that stay."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import regex

from dschat_lora.addons.audit.options import FilterOptions
from dschat_lora.addons.audit.similar_rows import Likeness, NearDuplicates, SharedRuns, words_of
from dschat_lora.config.data import DataConfig
from dschat_lora.config.plurals import counted
from dschat_lora.config.staging import staged_file
from dschat_lora.data.chat import Chat
from dschat_lora.data.messages import content_text
from dschat_lora.data.readers import RawRow, RowError, iter_rows, iter_unread, json_line
from dschat_lora.data.record_files import RowCounts, RowReader
from dschat_lora.data.records import row_digest
from dschat_lora.data.rows import (
    DataKind,
    ParsedRow,
    RowOptions,
    config_sources,
    parse_row,
    row_options,
    split_preference,
)
from dschat_lora.data.sources import find_source

MAX_SHOWN = 5  # rows of each fate
LANGUAGE_CHARACTERS = 1000  # of a row
_LETTER = regex.compile(r"\p{L}")

Fate = Literal["kept", "unusable", "contaminated", "duplicates", "near_duplicates"]
FATES: tuple[Fate, ...] = get_args(Fate)


@dataclass
class Filtered:
    """The fate of each row of the training sources, each counted once, and their languages."""

    config: FilterOptions
    fates: Counter[Fate] = field(default_factory=Counter)
    near_duplicates: list[Likeness] = field(default_factory=list)  # the first few
    contaminated: list[Likeness] = field(default_factory=list)
    # rows of the sample by ISO 639 code, the most frequent first; "zxx" has no letters
    languages: dict[str, int] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, Any]:
        """Numbers of rows, of what was asked for."""
        config, fates = self.config, self.fates
        asked = {
            "near_duplicates": config.near_duplicates is not None,
            "contaminated": bool(config.against),
            "kept": config.kept_path is not None,
        }
        counts: dict[str, Any] = {fate: fates[fate] for fate in FATES if asked.get(fate)}
        return counts | ({"languages": self.languages} if config.language_rows else {})

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields, under a name of their own."""
        return {"filtered": {**asdict(self), "fates": {f: self.fates[f] for f in FATES}}}

    def lines(self) -> list[str]:
        """A short table for people."""
        counts, total, lines = self.counts, self.fates.total(), []
        if "near_duplicates" in counts:
            share = counts["near_duplicates"] / max(1, total)
            lines.append(
                f"near         {counted(counts['near_duplicates'], 'near duplicate')} ({share:.1%})"
            )
            for pair in self.near_duplicates:
                lines.append(f"near         {pair.row} is like {pair.like} ({pair.by:.2f})")
        if "contaminated" in counts:
            share = counts["contaminated"] / max(1, total)
            words = counted(counts["contaminated"], "row")
            lines.append(f"contaminated {words} ({share:.1%}) by --against")
            for pair in self.contaminated:
                lines.append(f"contaminated {pair.row} has of {pair.like}: {pair.by}")
        if "kept" in counts:
            gone = [f"{self.fates[f]:,} {f.replace('_', ' ')}" for f in FATES[1:] if self.fates[f]]
            lines.append(
                f"kept         {counts['kept']:,} of {total:,} rows, in {self.config.kept_path}; "
                f"left out: {', '.join(gone) or 'none'}"
            )
        if self.languages:
            rows = sum(self.languages.values())
            shares = ", ".join(f"{code} {n / rows:.1%}" for code, n in self.languages.items())
            lines.append(f"languages    {shares} of {rows:,} rows")
        return lines

    def show(self, fate: Literal["near_duplicates", "contaminated"], like: Likeness) -> None:
        """Keep it, if it is one of the first few."""
        examples: list[Likeness] = getattr(self, fate)
        examples += [like] * (len(examples) < MAX_SHOWN)


class RowFilter:
    """Tells the fate of rows one after another, and keeps a sample of those that can be used."""

    def __init__(
        self, config: FilterOptions, data: DataConfig, chat: Chat, *, kind: DataKind, seed: int
    ) -> None:
        self.filtered = Filtered(config)
        self.sample: list[str] = []
        self._usable, self._draw = 0, random.Random(seed)
        self._options, self._chat, self._kind = row_options(data, chat.media), chat, kind
        self._reader = RowReader(self._options, chat, kind, skips=True)
        self._digests: set[bytes] = set()
        near = config.near_duplicates
        self._near = None if near is None else NearDuplicates(near)
        self._shared = SharedRuns(config.against_ngram)
        for entry in config.against:
            for raw in iter_rows(find_source("against", entry)):
                prompt, answers = map(words_of, _texts_of_any(raw, self._options, chat))
                self._shared.add(raw.location, prompt, prompt + answers)

    def fate(self, raw: RawRow) -> Fate:
        """The first that holds of unusable, contaminated, an earlier row again, near a kept one."""
        records, _ = self._reader.records(raw, RowCounts())
        if not records:
            return "unusable"
        texts = compared_texts(parse_row(raw, self._options), self._chat, self._kind)
        # Each of the rows so far is as likely to be in the sample (Vitter's algorithm R).
        size = self.filtered.config.language_rows
        self._usable += 1
        place = self._usable - 1 if len(self.sample) < size else self._draw.randrange(self._usable)
        if place < size:
            self.sample[place : place + 1] = [" ".join(texts)]
        prompt, answers = map(words_of, texts)
        if (like := self._shared.find(raw.location, prompt, prompt + answers)) is not None:
            self.filtered.show("contaminated", like)
            return "contaminated"
        digest = row_digest(records, self._kind)
        if digest in self._digests:
            return "duplicates"
        self._digests.add(digest)
        if self._near is not None:
            like = self._near.find_or_add(raw.location, prompt + answers)
            if like is not None:
                self.filtered.show("near_duplicates", like)
                return "near_duplicates"
        return "kept"


def filter_rows(
    config: FilterOptions, data: DataConfig, chat: Chat, *, kind: DataKind, seed: int
) -> Filtered:
    """Tell the fate of each training row, and write those that are kept.

    Time and memory grow with the number of rows, not with its square.

    Raises:
        ValueError: if data cannot be read, naming the file.
        OSError: if the rows that are kept cannot be written; no part of them is left.
    """
    judge = RowFilter(config, data, chat, kind=kind, seed=seed)
    options = ("data_path", "sft_only_data_path")[: 2 if kind == "samples" else 1]
    with ExitStack() as stack:
        file = None
        if config.kept_path is not None:
            staging = stack.enter_context(staged_file(Path(config.kept_path).expanduser()))
            file = stack.enter_context(staging.open("wb"))
        for source in config_sources(data, head=False):
            for row in iter_unread(source) if source.option in options else ():
                fate = judge.fate(row.read())
                judge.filtered.fates[fate] += 1
                if file is not None and fate == "kept":
                    file.write(json_line(row))
    judge.filtered.languages = count_languages(judge.sample)
    return judge.filtered


def compared_texts(row: ParsedRow, chat: Chat, kind: DataKind) -> tuple[str, str]:
    """The prompt of a row and its answers, "" for ``prompts``: what is said, without a template.

    System messages are left out, which many rows share. Of a pair the rejected answer counts where
    it is learnt from.
    """
    values = row.with_texts(chat.tokenizer)
    if row.kind == "preference":
        prompt, *answers = split_preference(values)[: 2 if kind == "samples" else 3]
    elif row.kind == "conversation":
        messages = values["messages"]
        said = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
        end = said[-1] if said else len(messages)
        prompt, answers = messages[:end], [messages[end:]]
    elif row.kind == "text":
        prompt, answers = "", [values["text"]]
    else:
        prompt, answers = values["prompt"], [values.get("completion", "")]
    return _plain_text(prompt), " ".join(map(_plain_text, answers)) if kind != "prompts" else ""


def _plain_text(value: str | list[dict[str, Any]]) -> str:
    """A text, or what messages say."""
    if isinstance(value, str):
        return value
    said = [each for each in value if each["role"] not in ("system", "developer")]
    return " ".join(content_text(each.get("content")) for each in said)


def _texts_of_any(raw: RawRow, options: RowOptions, chat: Chat) -> tuple[str, str]:
    """As :func:`compared_texts`, or of a row of no known type all of its texts.

    Raises:
        RowError: if it cannot be read.
    """
    if raw.problem is not None:
        raise RowError(raw.location, raw.problem)
    try:
        return compared_texts(parse_row(raw, options), chat, "unpaired")
    except ValueError:
        return "", " ".join(_strings(raw.values))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def count_languages(texts: Sequence[str]) -> dict[str, int]:
    """Number of texts by the ISO 639 code of their language, "zxx" where they have no letters."""
    if not texts:
        return {}
    from py3langid import classify

    codes = Counter(
        classify(text[:LANGUAGE_CHARACTERS])[0] if _LETTER.search(text) else "zxx" for text in texts
    )
    return dict(sorted(codes.items(), key=lambda item: (-item[1], item[0])))
