"""Fingerprint of prepared data: one hash of its files, options, tokenizer and code."""

import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from dschat_lora.config.data import DataConfig
from dschat_lora.data.cache import file_digest
from dschat_lora.data.encoder import Tokenizer, call
from dschat_lora.data.readers import iter_rows, load_hub
from dschat_lora.data.rows import DataKind
from dschat_lora.data.sources import Source
from dschat_lora.data.suffixes import data_suffix
from dschat_lora.data.templates import BUILT_IN_TEMPLATE

# Spaces, digits, line ends, other scripts and a joiner: options of tokenizers act on these.
PROBES = [
    "a",
    " a  b",
    "Hello, world! 12345",
    "\n\nHuman: x\n\nAssistant:",
    "\u00e9\u4e2d\U0001f600",
]
OPTIONS = (
    "max_seq_len",
    "overlong",
    "bad_rows",
    "columns",
    "unpaired_rows",
    "train_on_prompt",
    "eos_after_prompt",
    "data_split",
    "data_weights",
    "eval_ratio",
    "chat_template_kwargs",
)


def fingerprint(
    config: DataConfig,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    *,
    phase: int,
    seed: int,
    eos_id: int,
    kind: DataKind = "samples",
) -> str:
    """32 hex digits, equal only if the prepared data would be equal.

    Files count by content, not by name or time. The code counts by its text, so that a
    changed rule never meets data made by the old one.
    """
    parts = {
        "sources": [_describe_source(source) for source in sources],
        "options": {name: getattr(config, name) for name in OPTIONS},
        "run": [phase, seed, eos_id, kind],
        "tokenizer": describe_tokenizer(tokenizer),
        "code": code_digest(),
    }
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything about a tokenizer that may change its output."""
    # Encoding comes first: it resets padding and truncation of an earlier caller, which the
    # serialised form would include.
    probes = [call(tokenizer, PROBES, add_special_tokens=special) for special in (True, False)]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    else:
        rules = backend.to_str()
    template = tokenizer.chat_template
    return {
        "class": type(tokenizer).__name__,
        "probes": probes,
        "rules": hashlib.blake2b(rules.encode(), digest_size=16).hexdigest(),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        # That of the package stands where the tokenizer has none.
        "chat_template": None if template == BUILT_IN_TEMPLATE else template,
    }


def _describe_source(source: Source) -> list[Any]:
    """The option, and the content of files and rows; a hub data set by its own fingerprint."""
    if source.hub_name is not None:
        return [source.option, load_hub(source)._fingerprint]
    if source.rows is not None:
        digest = hashlib.blake2b(digest_size=16)
        for row in iter_rows(source):
            text = json.dumps([row.values, row.problem], default=repr)
            digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
        return [source.option, "rows", digest.hexdigest()]
    return [source.option, *([data_suffix(file), file_digest(file)] for file in source.files)]


def code_digest() -> str:
    """Hash of the modules that decide what is prepared: this package's, and the shuffling's."""
    digest, root = hashlib.blake2b(digest_size=16), files("dschat_lora")
    modules = [item for item in (root / "data").iterdir() if item.name.endswith(".py")]
    for module in [*sorted(modules, key=lambda item: item.name), root / "algos" / "seeds.py"]:
        digest.update(module.name.encode() + module.read_bytes())
    return digest.hexdigest()
