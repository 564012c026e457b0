"""The command line of ``dschat-lora audit``."""

from dataclasses import replace

from dschat_lora.addons.audit.config import AuditConfig
from dschat_lora.config.addons import through_addons
from dschat_lora.config.options import parse_config
from dschat_lora.data.rows import check_sources
from dschat_lora.data.templates import read_chat_template
from dschat_lora.models.source import find_model
from dschat_lora.runtime.checks import with_bundled
from dschat_lora.runtime.directory import check_file_can_be_made
from dschat_lora.runtime.stage_main import late


def audit(argv: list[str]) -> None:
    """Run ``dschat-lora audit``."""
    config = parse_config(
        AuditConfig,
        argv,
        description=AuditConfig.__doc__,
        program="dschat-lora audit DATA",
        positionals=("data_path",),
    )
    if not late("addons.audit.findings:show_audit")(check_audit(config)):
        raise SystemExit(1)


def check_audit(config: AuditConfig) -> AuditConfig:
    """The config with the bundled data where no data is named; refuses what cannot be found."""
    find_model(config.model_name_or_path)
    if config.chat_template is not None:
        read_chat_template(config.chat_template)
    if config.html is not None:
        check_file_can_be_made(config.html, "html")
    data = config.data
    if not (data.data_path or data.sft_only_data_path):
        data = with_bundled(data, frozenset())
    config = through_addons(replace(config, data=data), "before_data")
    check_sources(replace(config.data, bad_rows="skip"))
    through_addons(config, "check")
    return config
