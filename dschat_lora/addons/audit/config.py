"""Options of ``dschat-lora audit`` that look at rows one by one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dschat_lora.addons.audit.options import FilterOptions

if TYPE_CHECKING:
    from dschat_lora.addons.audit.filtering import Filtered
    from dschat_lora.config.data import DataConfig
    from dschat_lora.config.stages import AuditConfig
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
                    f"--kept_path {self.kept_path} is a file of --{source.option} {source.entry}, "
                    "which is read; name another one"
                )
        if kept.exists() and not self.overwrite_kept_path:
            raise ValueError(
                f"--kept_path {self.kept_path} exists; name another file, or replace it by "
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
