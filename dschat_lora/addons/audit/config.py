"""Options of ``dschat-lora audit``: which data, and what of their rows is looked at one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dschat_lora.addons.audit.options import FilterOptions
from dschat_lora.config.addons import addon_options, provided
from dschat_lora.config.data import DataConfig
from dschat_lora.config.groups import ModelConfig, require_numbers
from dschat_lora.config.options import group, option

if TYPE_CHECKING:
    from dschat_lora.addons.audit.filtering import Filtered
    from dschat_lora.data.chat import Chat
    from dschat_lora.data.rows import DataKind


@dataclass(frozen=True)
class FilterConfig(FilterOptions):
    """The same options, with what they check and do."""

    def check(self, config: AuditConfig) -> None:
        """Refuse what cannot be compared with, and to write over data that are read.

        Raises:
            ValueError: naming the option.
        """
        from dschat_lora.data.rows import config_sources
        from dschat_lora.data.sources import find_source
        from dschat_lora.runtime.checks import require_packages
        from dschat_lora.runtime.directory import check_file_can_be_made

        against = [find_source("against", entry) for entry in self.against]
        if self.near_duplicates is not None:
            require_packages("--near_duplicates", "datasketch", extra="audit")
        if self.language_rows:
            require_packages("--language_rows", "py3langid", extra="audit")
        if self.kept_path is None:
            return
        check_file_can_be_made(self.kept_path, "kept_path")
        kept = Path(self.kept_path).expanduser()
        for source in (*config_sources(config.data, head=False), *against):
            named = Path(source.entry).expanduser()
            if any(kept.exists() and file.samefile(kept) for file in source.files) or (
                named.is_dir() and kept.resolve().is_relative_to(named.resolve())
            ):
                raise ValueError(
                    f"--kept_path {self.kept_path} is an input file of --{source.option} "
                    f"{source.entry}; choose another one"
                )
        if kept.exists() and not self.overwrite_kept_path:
            raise ValueError(
                f"--kept_path {self.kept_path} exists; choose another file, or use "
                "--overwrite_kept_path"
            )

    def look_at_rows(
        self, data: DataConfig, chat: Chat, *, kind: DataKind, seed: int
    ) -> Filtered | None:
        """What is found of the rows one by one; None where nothing of it was asked for."""
        asked = [self.near_duplicates is not None, self.kept_path is not None]
        if not any((*asked, self.against, self.language_rows)):
            return None
        from dschat_lora.addons.audit.filtering import filter_rows

        return filter_rows(self, data, chat, kind=kind, seed=seed)


if TYPE_CHECKING:
    AuditedStage = str
else:
    AuditedStage = Literal[("sft", "reward", "dpo", "rlhf", *provided("stage"))]


@dataclass(frozen=True)
class AuditConfig:
    """Show what a stage would train on, and problems of the data; nothing is trained.

    The exit code is 1 if a run would refuse the data.
    """

    everyday: ClassVar[Sequence[str]] = (
        *("model_name_or_path", "data_path", "show", "stage", "json", "html"),
    )
    model_name_or_path: str | None = option(
        None,
        help="model whose tokenizer and chat template are applied to the data: hub name, "
        "directory, or the output of an earlier stage; default: the bundled tiny model",
    )
    stage: AuditedStage = option(
        "sft",
        help="stage for which rows are prepared: as sequences, pairs, or prompts of step 3",
    )
    show: int = option(
        0, help="number of samples to show token by token, with the supervised tokens marked"
    )
    json: bool = option(False, help="print one JSON object to standard output")
    html: str | None = option(None, help="also write an HTML page to this file")
    chat_template: str | None = option(None, help="Jinja file with a chat template, as in training")
    trust_remote_code: bool = option(
        False, help="allow running tokenizer code from a hub repository"
    )
    add_eot_token: bool = option(False, help="as in training")
    eot_token: str = option("<|endoftext|>", help="as in training")
    seed: int = option(1234, help="random seed of --data_split and --eval_ratio")
    data: DataConfig = group(DataConfig, eval_ratio=0.0)
    addons: Any = group(addon_options("audit"))

    def __post_init__(self) -> None:
        require_numbers(self, ">= 0", "show")

    @property
    def model(self) -> ModelConfig:
        """The options of loading the tokenizer."""
        return ModelConfig(
            model_name_or_path=self.model_name_or_path,
            trust_remote_code=self.trust_remote_code,
            chat_template=self.chat_template,
            add_eot_token=self.add_eot_token,
            eot_token=self.eot_token,
        )
