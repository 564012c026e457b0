"""LoRA RLHF on DeepSpeed: supervised fine-tuning, reward model or DPO, PPO.

    import dschat_lora as dl
    sft = dl.sft("Qwen/Qwen3-0.6B", data=rows, max_steps=200)
    better = dl.rlhf(sft, data=prompts, algorithm="grpo", rewards=[is_right])
    better.generate(["What is 2 plus 3?"])

Each name is imported when it is used: to import the package is quick.
"""

import sys
from difflib import get_close_matches
from importlib import import_module

from dschat_lora.config.addon_names import ADDONS
from dschat_lora.old_names import OldNames

__version__ = "0.3.0"

# Where each public name is defined.
_HOMES = {
    **dict.fromkeys(("sft", "reward", "dpo", "rlhf", "Run", "load"), "api.stages"),
    **dict.fromkeys(("generate", "merge"), "api.verbs"),
    "Algorithm": "rl.options.algorithms",
    "Addon": "config.addons",
    "RowError": "data.readers",
    "BUNDLED_DATA": "config.bundled",
}
_OF_ADDONS = [name for each in ADDONS.values() for name in each.functions.split()]
__all__ = ["__version__", *_HOMES, *_OF_ADDONS]


sys.meta_path.append(OldNames())


def __getattr__(name: str) -> object:
    """A public name, imported at its first use."""
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    elif name in _OF_ADDONS:
        addons = import_module(f"{__name__}.config.addons")
        try:
            path = addons.function_path(name)
        except ValueError as error:
            raise AttributeError(str(error)) from None
        value = addons.load(path)
    else:
        close = get_close_matches(name, __all__, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{meant}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
