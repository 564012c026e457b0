"""What ``dschat-lora models`` prints of all types of models."""

from dataclasses import asdict

from dschat_lora.models.families import COLUMNS, read_families, short
from dschat_lora.report.terminal import log_once, table, to_json, wrapped


def show_families(*, as_json: bool) -> None:
    """Print the table of types, the reasons of what is missing, and what the columns say."""
    found = read_families()
    if as_json:
        log_once(to_json(asdict(found)))
        return
    log_once(f"types of models with transformers {found.transformers}, found by trying each\n")
    for line in table(["type", *map(short, COLUMNS)], found.rows()):
        log_once(line)
    for column, reasons in found.why_not().items():
        log_once(f"\n{short(column)}: {COLUMNS[column]}; not for")
        for reason, kinds in reasons.items():
            log_once(wrapped(f"  {', '.join(kinds)}: {reason}"))
    log_once(
        "\n- nothing to try; ? not tried. Other types are tried by the probe that starts a run."
    )
