"""Write dschat_lora/__init__.pyi: the public functions with every option, for editors and mypy.

python scripts/api_stub.py
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dschat_lora as dl
from dschat_lora.config.bundled import CONFIGS

STUB = CONFIGS.parent / "__init__.pyi"
# What has options; every other public name has its types where it is defined.
WRITTEN_OUT = (
    "sft",
    "reward",
    "dpo",
    "rlhf",
    "distill",
    "generate",
    "evaluate",
    "merge",
    "audit",
    "plan",
    "tune",
)
HEAD = """# Types of the public names. scripts/api_stub.py writes this file; a test compares it.

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dschat_lora.api.options import Data, Model, Reward
from dschat_lora.addons.trainer.trainer import Trainer as _Trainer
from dschat_lora.api.verbs import Message
from dschat_lora.runtime.caller import Callback
"""


def stub() -> str:
    """The text of the file."""
    names = [n for n in dl.__all__ if n not in (*WRITTEN_OUT, "__version__", "Trainer")]
    homes = (f"from {_home(name)} import {name} as {name}" for name in names)
    parts = [HEAD + "\n".join(homes), "__version__: str\n__all__: list[str]\n"]
    parts += [_function(name, getattr(dl, name)) for name in WRITTEN_OUT]
    init = _function("__init__", dl.Trainer.__init__)
    body = "\n".join(f"    {line}".rstrip() for line in init.splitlines())
    return "\n".join([*parts, f"class Trainer(_Trainer):\n{body}\n"])


def _home(name: str) -> str:
    return getattr(getattr(dl, name), "__module__", f"{dl.__name__}.{dl._HOMES.get(name)}")


def _function(name: str, function: Callable[..., Any]) -> str:
    signature, lines, keyword = inspect.signature(function), [f"def {name}("], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            keyword = True
            lines.append("    *,")
        star = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        lines.append(f"    {star}{parameter.name}{kind}{default},")
    about = inspect.cleandoc(function.__doc__ or "").replace("\\", "\\\\")
    body = "\n".join(f"    {line}".rstrip() for line in about.splitlines()).strip()
    lines.append(f') -> {signature.return_annotation}:\n    """{body}\n    """\n')
    return "\n".join(lines)


if __name__ == "__main__":
    Path(STUB).write_text(stub(), encoding="utf-8")
