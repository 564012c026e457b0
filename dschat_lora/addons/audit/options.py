"""What ``dschat-lora audit`` is asked of rows one by one."""

from dataclasses import dataclass

from dschat_lora.config.groups import require, require_numbers
from dschat_lora.config.options import option


@dataclass(frozen=True)
class FilterOptions:
    """Which rows are not worth training on, and where the others are written."""

    near_duplicates: float | None = option(
        None,
        help="count rows whose text is near that of an earlier one: with at least this Jaccard "
        "similarity, in (0, 1], of their runs of 5 words, as 0.8",
    )
    against: tuple[str, ...] = option(
        (),
        help="count rows that share a run of --against_ngram words with these evaluation data, "
        "named as in --data_path",
    )
    against_ngram: int = option(13, help="words of a run; a shorter text is compared as a whole")
    language_rows: int = option(
        0, help="rows, drawn by --seed, whose languages are counted; 0: none, 1000 says enough"
    )
    kept_path: str | None = option(
        None,
        help=".jsonl file for the rows that can be used and are neither duplicates nor, where "
        "these are counted, near duplicates or rows of --against",
    )
    overwrite_kept_path: bool = option(False, help="replace a file that is at --kept_path")

    def __post_init__(self) -> None:
        near = self.near_duplicates
        require(near is None or 0 < near <= 1, "near_duplicates", near, "in (0, 1]")
        require_numbers(self, ">= 1", "against_ngram")
        require_numbers(self, ">= 0", "language_rows")
        if self.kept_path is not None and not self.kept_path.endswith(".jsonl"):
            raise ValueError(
                f"--kept_path {self.kept_path} must end in .jsonl, as its rows are JSON"
            )
