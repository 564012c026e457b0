"""The audit of data by itself: counts, lengths and samples of what a stage would learn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from dschat_lora.addons.audit.config import AuditConfig
from dschat_lora.addons.report.html import page
from dschat_lora.addons.report.markup import safe
from dschat_lora.config.addons import groups_of
from dschat_lora.config.data import DataConfig
from dschat_lora.config.plurals import counted
from dschat_lora.config.staging import write_whole
from dschat_lora.data.audit import MAX_SHOWN, NONE_HELD_OUT, STAGES, DataAudit
from dschat_lora.data.chat import make_chat
from dschat_lora.data.media import media_of, media_reader
from dschat_lora.data.prepare import ShownSample, prepare, preview
from dschat_lora.models.loading import Tokenizer, load_tokenizer
from dschat_lora.models.source import find_model
from dschat_lora.report.terminal import is_terminal, log_once, print_json
from dschat_lora.report.texts import sample_text, visible


class RowFindings(Protocol):
    """What an add-on found of the rows, one by one."""

    @property
    def counts(self) -> dict[str, Any]:
        """Numbers of rows."""

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready, under a name of its own."""

    def lines(self) -> list[str]:
        """A short table for people."""


@dataclass(frozen=True)
class Findings:
    """What the audit of data found."""

    audit: DataAudit
    samples: list[ShownSample]
    refusal: str | None  # why a run would stop
    tokenizer: Tokenizer
    of_rows: Sequence[RowFindings] = ()
    no_eval_data: bool = True  # none is named, so that all rows count as training rows

    @property
    def counts(self) -> dict[str, Any]:
        """Numbers of rows, samples and tokens."""
        audit = self.audit
        return {
            "rows": sum(audit.rows_by_type.values()),
            "by_type": audit.rows_by_type,
            "samples": audit.train_samples,
            "eval_samples": audit.eval_samples,
            "tokens": audit.tokens,
            "supervised_tokens": audit.supervised_tokens,
            "bad": audit.bad_rows,
            "too_long": audit.dropped_rows,
            "too_long_in_part": audit.partly_dropped_rows,
            "truncated": audit.truncated_rows,
            "split": audit.split_rows,
            "duplicates": audit.duplicate_rows,
            "overlap": audit.overlap_rows,
            **audit.media,
            **{name: count for each in self.of_rows for name, count in each.counts.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON of counts and samples; of a pair, the chosen answer comes first."""
        samples, media = [], media_of(self.tokenizer)
        for sample in self.samples:
            first, *others = (
                {"input_ids": media.plain(ids) if media else ids, "supervised": supervised}
                for ids, supervised in sample.sequences.values()
            )
            rejected = {"rejected": others[0]} if others else {}
            samples.append({**first, **rejected, "row": sample.row})
        return {
            "counts": self.counts,
            "audit": self.audit.to_dict(),
            "warnings": [each for each in self.audit.warnings() if not self._is_of_a_run(each)],
            "refusal": self.refusal,
            "samples": samples,
            **{name: fields for each in self.of_rows for name, fields in each.to_dict().items()},
        }

    def _is_of_a_run(self, line: str) -> bool:
        """Whether a warning is true of what was counted, but of no run by its defaults."""
        return self.no_eval_data and NONE_HELD_OUT in line

    def lines(self, *, colour: bool = False) -> list[str]:
        """The findings for a person."""
        audit = self.audit
        lines = [line for line in audit.lines() if not self._is_of_a_run(line)]
        if self.no_eval_data and not audit.eval_samples:
            share = f"{DataConfig().eval_ratio:.0%} of the rows"
            lines.append(f"note         a run holds out {share} by default (--eval_ratio)")
        lines += [f"bad row      {text}" for text in audit.bad_row_examples[MAX_SHOWN:]]
        for part, quantiles in audit.part_quantiles.items():
            words = ", ".join(f"{name} {n:,}" for name, n in quantiles.items())
            lines.append(f"{part:<12} {words} tokens")
        lines += [line for each in self.of_rows for line in each.lines()]
        lines += ["lengths of training rows", *histogram(audit.longer_rows, audit.train_rows)]
        if self.samples:
            lines += ["", "In green: tokens that are trained on" if colour else "[...]: trained on"]
        for sample in self.samples:
            for name, (ids, supervised) in sample.sequences.items():
                tokens = _tokens(self.tokenizer, ids, supervised)
                lines += ["", _headline(sample.row, name, supervised)]
                lines.append(sample_text(*tokens, colour=colour))
        if self.refusal is not None:
            lines += ["", f"refused      {self.refusal}"]
        return lines


def audit_data(config: AuditConfig) -> Findings:
    """What a stage would learn of the data, prepared as by a run but for bad rows.

    Those are all to be known.

    Raises:
        ValueError: if the data cannot be read at all.
    """
    source = find_model(config.model_name_or_path)
    tokenizer = load_tokenizer(source.tokenizer, config.model)
    media = media_reader(config, tokenizer, source.base)
    data, eos_id = replace(config.data, bad_rows="skip"), int(tokenizer.eos_token_id)
    phase, kind = STAGES[config.stage]
    with TemporaryDirectory() as cache:
        audit = prepare(
            data,
            tokenizer,
            phase=phase,
            seed=config.seed,
            eos_id=eos_id,
            cache_dir=Path(cache),
            kind=kind,
            media=media,
        ).audit
    samples = preview(data, tokenizer, eos_id=eos_id, kind=kind)
    chat = make_chat(tokenizer, data.chat_template_kwargs, eos_id=eos_id)
    looks = (
        own.look_at_rows(data, chat, kind=kind, seed=config.seed)
        for own in groups_of(config, "look_at_rows")
    )
    of_rows = [each for each in looks if each is not None]
    refusal = audit.refusal
    if audit.bad_rows and config.data.bad_rows == "stop":
        refusal = (
            f"{counted(audit.bad_rows, 'row')} cannot be used; "
            "--bad_rows skip continues without them"
        )
    shown = list(islice(samples, config.show))
    return Findings(audit, shown, refusal, tokenizer, of_rows, not data.eval_data_path)


def show_audit(config: AuditConfig) -> bool:
    """Show the audit; returns whether a run would take the data."""
    findings = audit_data(config)
    if config.json:
        print_json(findings.to_dict(), indent=None)
    else:
        for line in findings.lines(colour=is_terminal()):
            log_once(line)
    if config.html is not None:
        write_whole(Path(config.html).expanduser(), _page(findings))
    return findings.refusal is None


def _tokens(
    tokenizer: Tokenizer, ids: Sequence[int], supervised: Sequence[int]
) -> tuple[list[str], list[int]]:
    """Texts of tokens, and 1 where they are learnt; an input beside text is one."""
    if (media := media_of(tokenizer)) is None:
        return [tokenizer.decode([each]) for each in ids], list(supervised)
    tokens = media.tokens(ids)
    return [text for text, _ in tokens], [supervised[place] for _, place in tokens]


def _page(findings: Findings) -> str:
    table = "\n".join(replace(findings, samples=[]).lines())
    parts = [f"<pre>{safe(table)}</pre>"]
    for sample in findings.samples:
        for name, (ids, supervised) in sample.sequences.items():
            parts.append(f"<h3>{safe(_headline(sample.row, name, supervised))}</h3>")
            parts.append(sample_html(*_tokens(findings.tokenizer, ids, supervised)))
    return page("Audit of data", "".join(parts))


def _headline(row: str, name: str, supervised: list[int]) -> str:
    return f"{row}  {name}: {counted(len(supervised), 'token')}, {sum(supervised):,} supervised"


def sample_html(tokens: Sequence[str], supervised: Sequence[int]) -> str:
    """The same as HTML: supervised tokens are marked."""
    parts = (
        f"<mark>{safe(token)}</mark>" if counts else f"<span>{safe(token)}</span>"
        for token, counts in zip(map(visible, tokens), supervised, strict=True)
    )
    return f'<p class="tokens">{"&#8203;".join(parts)}</p>'


def histogram(above: dict[str, int], total: int, *, width: int = 40) -> list[str]:
    """Lines of a histogram of lengths, from the number of rows above each limit."""
    counts, lines = [total, *above.values()], []
    for limit, (larger, rest) in zip(above, pairwise(counts), strict=True):
        bar = "#" * round(width * (larger - rest) / max(1, total))
        lines.append(f"  up to {int(limit):>7,} tokens {larger - rest:>9,} rows  {bar}".rstrip())
    return lines + ([f"  more                 {counts[-1]:>9,} rows"] if counts[-1] else [])
