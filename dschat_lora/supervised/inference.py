"""Trained models and rows of data, for verbs that train nothing."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import torch

from dschat_lora.algos.logprobs import token_logprobs
from dschat_lora.config.data import parse_columns
from dschat_lora.config.files import naming
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.config.staging import staged_file
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.chat import Chat
from dschat_lora.data.media import MediaReader, media_of, media_reader
from dschat_lora.data.readers import iter_rows
from dschat_lora.data.records import TextRecord, to_records
from dschat_lora.data.rows import DataKind, ParsedRow, RowOptions, parse_row, require_usable
from dschat_lora.data.samples import SequenceSample
from dschat_lora.data.sources import find_source
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.causal_lm import CausalLMLogprobs
from dschat_lora.models.loading import PreTrainedModel, Tokenizer, load_tokenizer
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.report.terminal import STDOUT, Screen, note


class RowsConfig(Protocol):
    """Options of reading rows."""

    @property
    def data_path(self) -> tuple[str, ...]: ...
    @property
    def columns(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class LoadedPolicy:
    """A language model on this machine's device, in evaluation mode, with its adapter if any."""

    source: ModelSource
    model: PreTrainedModel
    tokenizer: Tokenizer

    @property
    def media(self) -> MediaReader | None:
        """What reads inputs beside text; None where the model takes text alone."""
        return media_of(self.tokenizer)

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sequence; None where the model sets no limit."""
        limit: int | None = getattr(self.model.config, "max_position_embeddings", None)
        return limit


def load_policy(config: ModelConfig, verb: object = None) -> LoadedPolicy:
    """The language model that ``--model_name_or_path`` names.

    It takes inputs beside text where the config of a ``verb`` with options of add-ons is given.

    Raises:
        ValueError: if it cannot be loaded, or its adapter does not fit.
    """
    here = device()
    source = find_model(config.model_name_or_path)
    tokenizer = load_tokenizer(source.tokenizer, config)
    dtype = DTYPES[resolve_dtype(config.dtype)]
    adapted = build_causal_lm(
        source, tokenizer, config, LoraConfig(), dtype=dtype, seed=0, meta=False
    )
    if adapted.warning is not None:
        note(f"warning: {adapted.warning}")
    model = adapted.model.eval().to(here)
    attached_media(verb, tokenizer, source, model)
    return LoadedPolicy(source, model, tokenizer)


def attached_media(
    verb: object, tokenizer: Tokenizer, source: ModelSource, model: PreTrainedModel
) -> MediaReader | None:
    """What reads inputs beside text for a model, which takes them then; see :func:`load_policy`."""
    media = None if verb is None else media_reader(verb, tokenizer, source.base)
    if media is not None:
        media.attach(model)
    return media


def read_rows(
    config: RowsConfig, *, kind: DataKind | None, limit: int = 0, media: MediaReader | None = None
) -> Iterator[tuple[dict[str, Any], ParsedRow]]:
    """Each row as read and as parsed, of ``limit`` at most (0: all).

    Raises:
        ValueError: at the first row that cannot be used as ``kind``, if any is given.
    """
    options = RowOptions(parse_columns(config.columns), unpaired="all", media=media)
    rows = (raw for each in config.data_path for raw in iter_rows(find_source("data_path", each)))
    for raw in islice(rows, limit or None):
        row = parse_row(raw, options)
        yield raw.values, row if kind is None else require_usable(row, kind, options)


def last_record(row: ParsedRow, chat: Chat, kind: DataKind) -> TextRecord:
    """The record of a row, up to its last answer or prompt."""
    *_, record = to_records(row, chat, kind)
    return record


def check_measured(
    records: Sequence[TextRecord], values: Sequence[float | None], what: str
) -> None:
    """Refuse measures of rows that are not finite, which overflow makes.

    Raises:
        ValueError: naming the first such row.
    """
    for record, value in zip(records, values, strict=True):
        if value is not None and not math.isfinite(value):
            raise ValueError(
                f"{record.location}: {what} is {value}, because the model overflows; try --dtype "
                "fp32, or an earlier checkpoint"
            )


class LossMeter:
    """Losses of samples under a language model."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
        self._network = CausalLMLogprobs(model).eval()
        self._collate = SampleCollator(int(tokenizer.pad_token_id))
        self._network.fit_to_architecture(len(tokenizer), device())

    @torch.no_grad()
    def losses(self, samples: Sequence[SequenceSample]) -> list[tuple[float, int]]:
        """Of each sample the sum of -log p of its supervised tokens in nats, and their number."""
        batch = self._collate([[sample] for sample in samples]).to(device())
        logprobs = self._network(
            batch.input_ids,
            batch.position_ids,
            batch.segment_ids,
            torch.zeros_like(batch.segment_ids),
            batch.logit_positions,
            batch.target_ids,
            batch.spans,
        )
        rows, width = batch.input_ids.shape
        owner = batch.logit_positions // width
        sums = logprobs.new_zeros(rows, dtype=torch.float64).index_add_(0, owner, logprobs.double())
        counts = owner.bincount(minlength=rows)
        return list(zip((-sums).tolist(), counts.tolist(), strict=True))

    @torch.no_grad()
    def scores(
        self, samples: Sequence[SequenceSample], *, positions: int
    ) -> list[tuple[float, bool]]:
        """Of each sample log p of its supervised tokens in nats, and if each is the likeliest.

        A sample may have one token more than the model has ``positions``.
        """
        batch = self._collate([[sample] for sample in samples]).to(device())
        logits = self._network.logits(
            batch.logit_positions,
            batch.input_ids,
            batch.position_ids.clamp(max=positions - 1),  # nothing follows from a last token
            batch.segment_ids,
            torch.zeros_like(batch.segment_ids),
            batch.spans,
        )
        rows, width = batch.input_ids.shape
        owner = batch.logit_positions // width
        logprobs = token_logprobs(logits.float(), batch.target_ids).double()
        sums = logprobs.new_zeros(rows).index_add_(0, owner, logprobs)
        wrong = torch.zeros_like(sums).index_add_(
            0, owner, (logits.argmax(-1) != batch.target_ids).double()
        )
        return list(zip(sums.tolist(), (wrong == 0).tolist(), strict=True))


@contextmanager
def output_file(path: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that takes its name when it is complete."""
    if path is None:
        with naming(STDOUT):
            yield cast(TextIO, Screen()) if sys.stdout.isatty() else sys.stdout
            sys.stdout.flush()
        return
    final = Path(path).expanduser()
    with staged_file(final) as staged, staged.open("w", encoding="utf-8") as file:
        yield file
