"""``dschat_lora.audit``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from dschat_lora.addons.audit.config import AuditConfig
from dschat_lora.addons.audit.verbs import check_audit
from dschat_lora.addons.report.markup import safe
from dschat_lora.api.options import Data, Model, with_options
from dschat_lora.api.process import run_in_process
from dschat_lora.api.verbs import config_of
from dschat_lora.runtime.stage_main import late

_NAMED = ("model_name_or_path", "data_path")  # arguments under a shorter name


@dataclass(frozen=True)
class Audit:
    """What a stage would learn of data, and what is wrong with it.

    Attributes:
        counts: numbers of rows, samples and tokens by name.
        samples: those asked for by ``show``: ``input_ids``, ``supervised`` and ``row``.
        warnings: what is unlikely to be meant.
        refusal: why a run would not take the data; None where it would.
        text: all of it for a person.
    """

    counts: dict[str, Any]
    samples: list[dict[str, Any]]
    warnings: list[str]
    refusal: str | None
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{safe(self.text)}</pre>"


@with_options(AuditConfig, *_NAMED, "json", "html")
def audit(data: Data | None = None, model: Model | None = None, **options: Any) -> Audit:
    """What a stage would learn of data; nothing is trained.

    Args:
        data: rows, as in ``dschat_lora.sft``.
        model: whose tokenizer and chat template read them.
        **options: those of ``dschat-lora audit --help all`` by their names, such as
            ``stage="reward"`` and ``show=3``.
    """
    with ExitStack() as stack:
        values = {"model_name_or_path": model, "data_path": data}
        config = config_of(AuditConfig, values, options, stack)
        stack.enter_context(run_in_process())
        findings = late("addons.audit.findings:audit_data")(check_audit(config))
        fields = findings.to_dict()
        names = ("counts", "samples", "warnings", "refusal")
        text = "\n".join(findings.lines())
        return Audit(**{name: fields[name] for name in names}, text=text)
