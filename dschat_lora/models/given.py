"""A model that a Python program has loaded, as a directory that runs can start from."""

import copy
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from dschat_lora.data.encoder import describe_tokenizer


def saved_model(model: Any, tokenizer: Any) -> Path:
    """The directory of a transformers model and its tokenizer in the cache of this user.

    It is named after every value, and written once. Neither object is changed.

    Raises:
        TypeError: if they are not a model of transformers and a tokenizer.
    """
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise TypeError(
            f"model must be (model, tokenizer) of transformers, got a {type(model).__name__} first"
        )
    if hasattr(model, "peft_config"):
        raise TypeError(
            "model has an adapter of PEFT: save it by save_pretrained and give its path, or call "
            "merge_and_unload first"
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise TypeError(
            "model must be (model, tokenizer) of transformers, got a "
            f"{type(tokenizer).__name__} second"
        )
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dschat_lora/models"
    directory = home / _digest(model, tokenizer)
    if directory.is_dir():
        return directory
    home.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=".saving-", dir=home))
    config = copy.deepcopy(model.config)
    try:
        disable_progress_bar()  # as where models are loaded
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        staged.chmod(0o755)
        try:
            staged.rename(directory)
        except OSError:
            if not directory.is_dir():  # another process was first
                raise
    finally:
        model.config = config  # saving notes its architecture there
        shutil.rmtree(staged, ignore_errors=True)
    return directory


@torch.no_grad()
def _digest(model: Any, tokenizer: Any) -> str:
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures"):
        config.pop(name, None)
    facts = [type(model).__name__, config, describe_tokenizer(tokenizer)]
    digest = hashlib.blake2b(
        json.dumps(facts, default=str, sort_keys=True).encode(), digest_size=16
    )
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
