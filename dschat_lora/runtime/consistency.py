"""Checks that all hosts of a run have the same options, models, tokenizer and data."""

import hashlib
import json
from typing import TYPE_CHECKING

from dschat_lora.config.options import flatten
from dschat_lora.data.encoder import describe_tokenizer
from dschat_lora.data.prepare import Prepared
from dschat_lora.engine.collectives import check_same
from dschat_lora.engine.distributed import local_rank
from dschat_lora.models.fingerprint import file_fingerprint
from dschat_lora.models.loading import Tokenizer
from dschat_lora.models.source import ModelSource

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Hosts may keep what they read, and what they write, where they like.
_PLACES = (
    "_path",
    "chat_template",
    "_dir",
    "_file",
    "_config",
    "_dataset_name",
    "_checkpoint",
    "local_rank",
)


def check_same_options(config: "DataclassInstance") -> None:
    """Refuse processes with other options than rank 0's; call on every rank."""

    def options() -> dict[str, str]:
        values = flatten(config).items()
        return {f"--{name}": str(v) for name, v in values if not name.endswith(_PLACES)}

    check_same(options, remedy="start all processes with the same options")


def check_same_data(prepared: Prepared, tokenizer: Tokenizer, name: str) -> None:
    """Refuse hosts whose data or tokenizer are not rank 0's; call on every rank.

    Processes of one host read the same files.
    """

    def digests() -> dict[str, str]:
        speaks = local_rank() == 0
        return {
            f"the {name} to train on": prepared.train.digest if speaks else "",
            f"the {name} to evaluate on": prepared.eval.digest if speaks else "",
            "the tokenizer": tokenizer_digest(tokenizer) if speaks else "",
        }

    check_same(digests, remedy="give all hosts the same files")


def check_same_models(*sources: ModelSource | None) -> None:
    """Refuse hosts whose models are not rank 0's; call on every rank."""

    def fingerprints() -> dict[str, str]:
        found = {}
        for number, source in enumerate(sources):
            name = "" if len(sources) == 1 else (" of the actor", " of the critic")[number]
            for part in ("base", "adapter"):
                path = getattr(source, part, None) if local_rank() == 0 else None
                found[f"the {part}{name}"] = "" if path is None else file_fingerprint(path)
        return found

    check_same(fingerprints, remedy="give all hosts the same files")


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """32 hex digits of all that decides which tokens a text becomes."""
    rules = json.dumps(describe_tokenizer(tokenizer), sort_keys=True)
    return hashlib.blake2b(rules.encode(), digest_size=16).hexdigest()
