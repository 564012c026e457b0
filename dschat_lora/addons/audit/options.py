"""What ``dschat-lora audit`` is asked of rows one by one."""

from dataclasses import dataclass

from dschat_lora.config.groups import require, require_numbers
from dschat_lora.config.options import option


@dataclass(frozen=True)
class FilterOptions:
    """Which rows are not worth training on, and where the others are written."""

    near_duplicates: float | None = option(
        None,
        help="count near duplicates: rows whose word 5-grams have at least this Jaccard similarity "
        "to those of an earlier row, in (0, 1], such as 0.8",
    )
    against: tuple[str, ...] = option(
        (),
        help="count contaminated rows: those that share --against_ngram consecutive words with "
        "this evaluation data, named as in --data_path",
    )
    against_ngram: int = option(
        13, help="n-gram size of --against, in words; shorter texts are compared as a whole"
    )
    language_rows: int = option(
        0, help="number of random rows whose language is detected; 0: none; 1000 is usually enough"
    )
    kept_path: str | None = option(
        None,
        help=".jsonl file to write the usable rows to, without duplicates and, if they are "
        "counted, near duplicates and rows that overlap with --against",
    )
    overwrite_kept_path: bool = option(False, help="overwrite an existing file at --kept_path")

    def __post_init__(self) -> None:
        near = self.near_duplicates
        require(near is None or 0 < near <= 1, "near_duplicates", near, "in (0, 1]")
        require_numbers(self, ">= 1", "against_ngram")
        require_numbers(self, ">= 0", "language_rows")
        if self.kept_path is not None and not self.kept_path.endswith(".jsonl"):
            raise ValueError(
                f"--kept_path {self.kept_path} must end in .jsonl, as its rows are JSON"
            )
