"""Checks that all hosts of a run have the same options, models, tokenizer and data."""

import hashlib
import json
from typing import TYPE_CHECKING

from dschat_lora.config.options import flatten
from dschat_lora.data.fingerprint import describe_tokenizer
from dschat_lora.data.prepare import Prepared
from dschat_lora.engine.distributed import check_same, local_rank
from dschat_lora.models.causal_lm import Tokenizer
from dschat_lora.models.fingerprint import file_fingerprint
from dschat_lora.models.source import ModelSource

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Hosts may keep what they read, and what they write, where they like.
_PLACES = ("_path", "_dir", "_file", "_config", "_dataset_name", "_checkpoint", "local_rank")


def check_same_options(config: "DataclassInstance") -> None:
    """Refuse processes with other options than rank 0's; call on every rank."""
    values = flatten(config).items()
    own = {f"--{n}": str(v) for n, v in values if not n.endswith(_PLACES)}
    check_same(own, remedy="start all processes with the same options")


def check_same_data(prepared: Prepared, tokenizer: Tokenizer, name: str) -> None:
    """Refuse hosts whose data or tokenizer are not rank 0's; call on every rank.

    Processes of one host read the same files.
    """
    speaks = local_rank() == 0
    check_same(
        {
            f"the {name} to train on": prepared.train.digest() if speaks else "",
            f"the {name} to evaluate on": prepared.eval.digest() if speaks else "",
            "the tokenizer": tokenizer_digest(tokenizer) if speaks else "",
        },
        remedy="give all hosts the same files",
    )


def check_same_models(*sources: ModelSource | None) -> None:
    """Refuse hosts whose models are not rank 0's; call on every rank."""
    found = {}
    for number, source in enumerate(sources):
        name = "" if len(sources) == 1 else (" of the actor", " of the critic")[number]
        for part in ("base", "adapter"):
            path = getattr(source, part, None) if local_rank() == 0 else None
            found[f"the {part}{name}"] = "" if path is None else file_fingerprint(path)
    check_same(found, remedy="give all hosts the same files")


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """32 hex digits of all that decides which tokens a text becomes."""
    rules = json.dumps(describe_tokenizer(tokenizer), sort_keys=True)
    return hashlib.blake2b(rules.encode(), digest_size=16).hexdigest()
