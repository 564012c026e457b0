"""Types of models x what each must get right, against stock transformers and PEFT.

``PYTHONPATH=.:tests python -m families.matrix FILE.json`` tries all types with the installed
versions and prints a table, which the file gets too; types that are named behind it are tried
alone. ``--quick`` runs no commands.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.utils import logging

from families.checks import COMMANDS, IN_PROCESS, Family
from helpers.kinds import LEFT_OUT, TYPES
from helpers.launcher import Launcher


def cells(kind, directory, checks, launcher):
    """What each check found of a type: ``{"type", "check", "ok", "found"}``."""
    names = [check.__name__ for check in checks]
    try:
        family = Family(kind, directory, launcher=launcher)
    except Exception as error:  # noqa: BLE001 - a cell says what failed
        return [_cell(kind, name, False, _words(error)) for name in names]
    made = []
    for check in checks:
        try:
            made.append(_cell(kind, check.__name__, True, check(family)))
        except Exception as error:  # noqa: BLE001
            made.append(_cell(kind, check.__name__, False, _words(error)))
    return made


def _cell(kind, check, ok, found):
    return {"type": kind, "check": check, "ok": ok, "found": found}


def _words(error):
    kind = "" if isinstance(error, AssertionError | ValueError) else f"{type(error).__name__}: "
    return kind + str(error).partition("\n")[0][:300]


def table_of(rows):
    """The cells as a table, a row for each type."""
    checks = list(dict.fromkeys(row["check"] for row in rows))
    lines = [f"| type | {' | '.join(checks)} |", "|---" * (len(checks) + 1) + "|"]
    for kind in dict.fromkeys(row["type"] for row in rows):
        of_type = {row["check"]: row for row in rows if row["type"] == kind}
        words = [("" if row["ok"] else "NO: ") + row["found"] for row in of_type.values()]
        lines.append(f"| {kind} | {' | '.join(words)} |")
    return "\n".join(lines)


def main(file, *arguments):
    """Try the types, and write the table."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"})
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    kinds = [each for each in arguments if not each.startswith("-")]
    kinds = kinds or [each for each in TYPES if each in CAUSAL]
    checks = IN_PROCESS if "--quick" in arguments else (*IN_PROCESS, *COMMANDS)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        launcher = Launcher(Path(temporary) / "launcher")
        for kind in kinds:
            directory = Path(temporary) / kind
            directory.mkdir()
            rows += cells(kind, directory, checks, launcher)
            Path(file).write_text(json.dumps(rows, indent=1), encoding="utf-8")
        launcher.stop()
    lines = [table_of(rows)]
    right = [k for k in kinds if all(row["ok"] for row in rows if row["type"] == k)]
    lines.append(f"{len(right)} of {len(kinds)} types are right")
    untried = CAUSAL.keys() - {*TYPES, *LEFT_OUT}
    lines.append(
        f"types that are neither tried nor left out: {', '.join(sorted(untried)) or 'none'}"
    )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
