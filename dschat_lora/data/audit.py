"""What the data is, counted before training: the figures, their table, and when to stop."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from dschat_lora.config.addons import provided
from dschat_lora.config.data import DataConfig
from dschat_lora.config.plurals import counted
from dschat_lora.data.collect import Collected
from dschat_lora.data.rows import HEAD_ROWS, DataKind
from dschat_lora.data.token_files import Tally, quantile

MAX_SHOWN = 5  # bad rows that are quoted in the table
NONE_HELD_OUT = "no row is held out; there is nothing to evaluate on"
# By stage: which --data_split, and what is made of rows.
STAGES: dict[str, tuple[int, DataKind]] = {
    "sft": (1, "samples"),
    "reward": (2, "pairs"),
    "dpo": (2, "pairs"),
    "rlhf": (3, "prompts"),
    **dict.fromkeys(provided("stage"), (3, "prompts")),
}
LENGTHS = tuple(2**power for power in range(6, 18))  # of the histogram, in tokens


@dataclass(frozen=True)
class DataAudit:
    """Counts of one prepared data set. Shares follow from them; ``train`` means this step's part.

    Rows are those of the files, each counted once, whatever ``--data_weights`` is and however many
    samples it becomes; samples and tokens are counted as often as they are used in an epoch.
    """

    rows_by_type: dict[str, int]  # usable rows of the training sources, all steps' parts
    bad_rows: int  # unusable ones, evaluation files included
    empty_rows: int  # of these, rows with an empty text
    bad_row_examples: tuple[str, ...]  # "file:line: reason" of the first few
    duplicate_rows: int  # rows whose prompt and completion an earlier row has
    overlap_rows: int  # training rows whose prompt and completion are held out too
    shared_prompt_rows: int  # held-out pairs whose prompt is in training pairs too
    overlap_removed: bool  # whether these are kept out of training
    train_rows: int  # rows of this step before the length limit
    eval_rows: int
    dropped_rows: int  # training rows of which nothing is left, as they are too long
    truncated_rows: int
    eval_dropped_rows: int
    identical_rows: int  # training pairs left out because nothing tells their answers apart
    eval_identical_rows: int
    doubled_bos_rows: int  # rows that brought a second beginning-of-sequence (kept once)
    # tokens of training rows before any was cut: of the longest sample where a row is several
    length_quantiles: dict[str, int]
    longer_rows: dict[str, int]  # number of training rows of more than so many tokens
    train_samples: int
    eval_samples: int
    tokens: int  # of the training samples
    supervised_tokens: int
    eos_samples: int  # training samples whose last supervised token is end-of-sequence
    max_seq_len: int
    kind: str
    # Training rows of messages by how their answers are found, and the samples of those that
    # become one for each answer.
    chat_rows: dict[str, int] = field(default_factory=dict)
    answer_samples: int = 0
    empty_thoughts: int = 0  # that the chat template added to training samples, not learnt
    split_rows: int = 0  # training rows of text that were cut into several samples
    text_samples: int = 0  # training samples of plain text
    text_eos_samples: int = 0  # of these, those that end in end-of-sequence
    # The same of "prompt" and "answer": a pair's longer one; all of a text is answer.
    part_quantiles: dict[str, dict[str, int]] = field(default_factory=dict)
    # What the chat template or, by a weight of 0, the loss leaves out of rows, and of how many of
    # the usable ones of the training sources.
    left_out: dict[str, int] = field(default_factory=dict)
    # rows of several samples, of which some are too long and left out
    partly_dropped_rows: int = 0
    eval_partly_dropped_rows: int = 0
    # inputs beside text of training samples: counts by their names, and the same in words
    media: dict[str, int] = field(default_factory=dict)
    media_words: str = ""
    data_part: str = ""  # of --data_split that the training rows are, in words

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields; those of inputs beside text where there are any."""
        fields = asdict(self)
        if not self.media:
            del fields["media"], fields["media_words"]
        if not self.data_part:
            del fields["data_part"]
        return fields

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DataAudit":
        """The audit whose :meth:`to_dict` was written as JSON."""
        return cls(**values | {"bad_row_examples": tuple(values["bad_row_examples"])})

    @property
    def eos_share(self) -> float:
        """Share of the training samples that teach the model to stop."""
        return self.eos_samples / max(1, self.train_samples)

    @property
    def _overlong_rows(self) -> int:
        """Training rows that are not whole, but for those in pieces."""
        return self.dropped_rows + self.partly_dropped_rows + self.truncated_rows

    @property
    def _ended_answers(self) -> float:
        """The same of samples that are no plain text; 1 where there are none."""
        answers = 0 if self.kind == "prompts" else self.train_samples - self.text_samples
        return (self.eos_samples - self.text_eos_samples) / answers if answers else 1.0

    def check(self) -> None:
        """Stop a run that could not learn to answer, or to stop answering.

        Raises:
            ValueError: with what to do.
        """
        if self.refusal:
            raise ValueError(self.refusal)

    @property
    def refusal(self) -> str | None:
        """Why :meth:`check` stops a run; None if it does not."""
        longest = self.length_quantiles["max"]
        if self.train_rows == 0:
            none = "--eval_prompts" if self.kind == "prompts" else "--eval_ratio"
            return (
                "no training rows are left after the split; give more data in --data_path or "
                f"{none} 0, which holds none out, or check --data_split and --data_weights "
                f"(left out as copies of held-out rows: {self.overlap_rows})"
            )
        if self.kind == "prompts":
            if self.train_samples:
                return None
            return (
                f"none of {counted(self.train_rows, 'prompt')} has at most --max_prompt_seq_len "
                f"{self.max_seq_len} tokens (the longest has {longest}); "
                "raise it, or use --overlong truncate"
            )
        if self.supervised_tokens == 0 and self.identical_rows:
            return (
                f"no pair is left to train on: of {counted(self.train_rows, 'training row')} "
                f"{self.identical_rows} with equal answers (perhaps once cut to --max_seq_len "
                f"{self.max_seq_len}) and {self.dropped_rows} longer than that were left out"
            )
        if self.supervised_tokens == 0:
            return (
                f"no token of {counted(self.train_rows, 'training row')} would be trained on: "
                f"prompt and completion of {self.dropped_rows} do not fit "
                f"--max_seq_len {self.max_seq_len} (longest row: {longest} tokens); raise it"
            )
        # Of marked text a template's author answers for the end.
        if self._ended_answers == 0 and not self.chat_rows.get("marks"):
            return (
                f"none of {counted(self.train_samples, 'training sample')} ends in "
                "end-of-sequence, so the model would not learn to end answers; raise --max_seq_len "
                f"{self.max_seq_len}, or use --overlong drop to drop the truncated rows"
            )
        return None

    def warnings(self) -> tuple[str, ...]:
        """What is unlikely to be meant but does not stop the run."""
        cut = self._overlong_rows
        option = "max_prompt_seq_len" if self.kind == "prompts" else "max_seq_len"
        doubts = {
            f"only {self._ended_answers:.0%} of the samples end in end-of-sequence; answers may "
            "not stop": self._ended_answers < 0.5,
            f"longer than --{option} {self.max_seq_len}: {cut} of "
            f"{counted(self.train_rows, 'training row')}": cut > 0.1 * self.train_rows,
            f"--eval_data_path has {counted(self.overlap_rows, 'training row')} too; the "
            "evaluation will be too optimistic": self.overlap_rows > 0 and not self.overlap_removed,
            f"training pairs have the prompts of {self.shared_prompt_rows} of "
            f"{counted(self.eval_rows, 'held-out pair')} too; for a stricter test give "
            "--eval_data_path with other prompts": self.shared_prompt_rows > 0.1 * self.eval_rows,
            f"the beginning-of-sequence token that {counted(self.doubled_bos_rows, 'row')} had of "
            "their own is kept once": self.doubled_bos_rows > 0,
            NONE_HELD_OUT: self.eval_samples == 0,
        }
        return tuple(text for text, applies in doubts.items() if applies)

    def lines(self, *, of_head: bool = False) -> list[str]:
        """A short table for people, warnings last; ``of_head``: of a stream's first rows alone."""
        types = ", ".join(f"{count:,} {kind}" for kind, count in self.rows_by_type.items())
        quantiles = ", ".join(f"{name} {n:,}" for name, n in self.length_quantiles.items())
        fate = "left out" if self.overlap_removed else "still trained on"
        usable = sum(self.rows_by_type.values()) - self.eval_rows * self.overlap_removed
        train = counted(self.train_rows, "row")
        if self.data_part:
            train = f"{self.train_rows:,} of {usable:,} rows ({self.data_part})"
        too_long = self._overlong_rows / max(1, self.train_rows)
        part, eval_part = (
            f"{count:,} in part, " if count else ""
            for count in (self.partly_dropped_rows, self.eval_partly_dropped_rows)
        )
        supervised = self.supervised_tokens / max(1, self.tokens)
        pieces = f"and {self.split_rows:,} cut into pieces " if self.split_rows else ""
        head = f"of the first {HEAD_ROWS:,} of each source: " if of_head else ""
        table = {
            "rows": f"{head}{types or 'none'}; {self.bad_rows:,} bad ({self.empty_rows:,} empty)",
            "repeated": f"{counted(self.duplicate_rows, 'duplicate')} (trained on), "
            f"{self.overlap_rows:,} also held out ({fate})",
            "train": f"{train}, {counted(self.train_samples, 'sample')}, "
            f"{counted(self.tokens, 'token')}",
            "eval": f"{counted(self.eval_rows, 'row')}, {counted(self.eval_samples, 'sample')}",
            "length": f"{quantiles} tokens",
            "too long": f"{self.dropped_rows:,} dropped, {part}{self.truncated_rows:,} truncated "
            f"{pieces}({too_long:.1%} of the rows); eval {eval_part}{self.eval_dropped_rows:,} "
            "dropped",
            "supervised": f"{counted(self.supervised_tokens, 'token')} ({supervised:.1%})",
            "ends in EOS": f"{counted(self.eos_samples, 'sample')} ({self.eos_share:.1%})",
        }
        if self.kind == "prompts":
            del table["supervised"], table["ends in EOS"]
        if self.identical_rows or self.eval_identical_rows:
            table["identical"] = (
                f"{counted(self.identical_rows, 'pair')} of equal answers left out; eval "
                f"{self.eval_identical_rows:,}"
            )
        if self.media:
            table[next(iter(self.media))] = self.media_words
        if conversations := self._conversations():
            table["answers"] = conversations
        if self.left_out:
            words = [f"{what} ({counted(rows, 'row')})" for what, rows in self.left_out.items()]
            table["left out"] = "; ".join(words)
        if self.empty_thoughts:
            table["thoughts"] = (
                f"{self.empty_thoughts:,} empty ones, which the chat template adds, are not "
                "trained on (use --train_empty_think to train on them)"
            )
        lines = [f"{name:<12} {text}" for name, text in table.items()]
        lines += [f"bad row      {example}" for example in self.bad_row_examples[:MAX_SHOWN]]
        return lines + [f"warning      {text}" for text in self.warnings()]

    def _conversations(self) -> str:
        """How answers are told from what they answer, unless turn by turn alone."""
        rows, several = self.chat_rows, self.answer_samples
        marks, answers = rows.get("marks", 0), rows.get("answers", 0)
        words = [f"{counted(marks, 'row')} by the chat template's generation marks"] * (marks > 0)
        if several > answers:
            words.append(
                f"{counted(answers, 'row')} with {counted(several, 'sample')}, "
                "one for each answer: the chat template "
                "renders earlier turns differently when later ones follow"
            )
        return "; ".join(words)


def make_audit(
    config: DataConfig,
    rows: Collected,
    train: Tally,
    held_out: Tally,
    *,
    phase: int,
    media_kind: str = "",
) -> DataAudit:
    """The audit of what was read and what was written."""
    split = config.data_split
    counts = {
        media_kind: train.media,
        f"rows_with_{media_kind}": train.media_rows,
        f"tokens_of_{media_kind}": train.media_tokens,
    }
    count, with_some, tokens = counts.values()
    share = tokens / max(1, train.tokens)
    words = f"{count:,} in {counted(with_some, 'row')}, {counted(tokens, 'token')} ({share:.1%})"
    return DataAudit(
        rows_by_type=dict(rows.counts.by_type),
        bad_rows=rows.counts.bad,
        empty_rows=rows.counts.empty,
        bad_row_examples=tuple(rows.counts.examples),
        left_out=dict(rows.counts.left_out),
        duplicate_rows=rows.duplicates,
        overlap_rows=rows.overlap,
        shared_prompt_rows=rows.shared_prompts,
        overlap_removed=not config.eval_data_path,
        train_rows=train.rows,
        chat_rows=dict(train.chat_rows),
        answer_samples=train.answer_samples,
        empty_thoughts=train.empty_thoughts,
        eval_rows=held_out.rows,
        dropped_rows=train.dropped,
        partly_dropped_rows=train.partly_dropped,
        eval_partly_dropped_rows=held_out.partly_dropped,
        truncated_rows=train.truncated,
        eval_dropped_rows=held_out.dropped,
        identical_rows=train.identical,
        eval_identical_rows=held_out.identical,
        doubled_bos_rows=train.doubled_bos,
        length_quantiles=_quantiles(train.lengths),
        longer_rows=_longer(train.lengths),
        train_samples=train.samples,
        eval_samples=held_out.samples,
        tokens=train.tokens,
        supervised_tokens=train.supervised,
        eos_samples=train.eos,
        split_rows=train.split,
        text_samples=train.texts,
        text_eos_samples=train.text_eos,
        part_quantiles={
            "prompt": _quantiles(train.prompts),
            "answer": _quantiles(train.answers),
        },
        max_seq_len=config.max_seq_len,
        kind=rows.kind,
        media=counts if train.media else {},
        media_words=words if train.media else "",
        data_part="" if split is None else f"part {phase} of --data_split {split}",
    )


def _quantiles(lengths: Counter[int]) -> dict[str, int]:
    """Lengths that the given share of rows does not exceed."""
    shares = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: quantile(lengths, share) for name, share in shares.items()}


def _longer(lengths: Counter[int]) -> dict[str, int]:
    """Number of rows above each of ``LENGTHS``, up to the first that no row exceeds."""
    above = {
        str(limit): sum(rows for length, rows in lengths.items() if length > limit)
        for limit in LENGTHS
    }
    last = next((index for index, number in enumerate(above.values()) if not number), len(above))
    return dict(list(above.items())[: last + 1])
