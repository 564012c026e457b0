"""Decoding of meanings into texts by beam search."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dschat_lora.checkpoint.lora_only import load_lora_only, lora_config_of_file, read_lora_only
from dschat_lora.checkpoint.staging import write_whole
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.options import fail
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.readers import RowError, iter_rows
from dschat_lora.data.rows import RowOptions, parse_row, require_usable
from dschat_lora.data.sources import find_source
from dschat_lora.data.tokenize import ended
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.collectives import gather_over_ranks, on_rank_zero, raise_together
from dschat_lora.engine.distributed import device, init_distributed, rank, shutdown, world_size
from dschat_lora.experiments.nlg.config import DecodeConfig
from dschat_lora.generation.beam_search import Search, write_texts
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.causal_lm import Tokenizer, load_tokenizer
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.report.terminal import error_message, log_once


@dataclass
class Meaning:
    """A meaning to put into words, with its reference texts."""

    text: str
    references: list[str] = field(default_factory=list)
    category: str | None = None


def run_decode(config: DecodeConfig) -> None:
    """Write a line of JSON for every meaning, from a checked config; on every rank.

    A mistake that shows only now, an error of the disk and a full GPU end the process as one
    line.
    """
    try:
        init_distributed()
        torch.manual_seed(config.seed)
        _decode(config)
    except (ValueError, OSError) as error:
        code = 1 if isinstance(error, OSError) else 2
        fail(error_message(error), code=code)
    except torch.OutOfMemoryError:
        fail(
            "the GPU is full: lower --per_device_eval_batch_size or --num_beams",
            code=1,
        )
    shutdown()


def _decode(config: DecodeConfig) -> None:
    source = find_model(config.model_name_or_path)
    tokenizer = load_tokenizer(source.tokenizer, config.model)
    meanings = read_meanings(config.data_path)
    model = raise_together(lambda: _load(config, source, tokenizer))
    search = _search(config, tokenizer, model)
    prompts = _prompts(meanings, tokenizer, search, model)
    # Batches are the same for any number of processes, and with them the rounding of the logits.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    size = config.per_device_eval_batch_size
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    lines = torch.full((0, search.max_new_tokens + 2), -1, device=device())
    for own in batches[rank() :: world_size()]:
        texts = write_texts(model, [prompts[i] for i in own], search, device=device())
        width = search.max_new_tokens
        padded = [
            [i, len(t), *t, *[-1] * (width - len(t))] for i, t in zip(own, texts, strict=True)
        ]
        lines = torch.cat([lines, torch.tensor(padded, device=device())])
    found = {i: ids[:length] for i, length, *ids in gather_over_ranks(lines).tolist()}
    plain = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    predictions = [_clean(plain(found[i])) for i in range(len(meanings))]
    text = "".join(_lines(meanings, predictions))
    on_rank_zero(lambda: write_whole(Path(config.output_path).expanduser(), text))
    log_once(f"{len(meanings):,} meanings written to {config.output_path}")


def read_meanings(paths: Sequence[str]) -> list[Meaning]:
    """Every distinct meaning in the order of its first row, with the texts of all its rows.

    Raises:
        ValueError: if a row cannot be used.
    """
    meanings: dict[str, Meaning] = {}
    for entry in paths:
        for raw in iter_rows(find_source("data_path", entry)):
            row = require_usable(parse_row(raw, RowOptions(unpaired="all")), "prompts")
            prompt = row.values.get("prompt")
            if row.kind not in ("prompt", "prompt-completion") or not isinstance(prompt, str):
                raise RowError(row.location, "decode takes a `prompt` of text, its `completion`")
            meaning = meanings.setdefault(prompt, Meaning(prompt))
            if row.kind == "prompt-completion":
                meaning.references.append(row.values["completion"].strip())
            meaning.category = meaning.category or row.values.get("category")
    return list(meanings.values())


def _load(config: DecodeConfig, source: ModelSource, tokenizer: Tokenizer) -> Any:
    """The model with its adapter on this device."""
    file = None
    lora = LoraConfig()
    if config.lora_path is not None:
        file = read_lora_only(Path(config.lora_path).expanduser())
        if file.settings is not None and file.settings.base not in (None, source.base):
            log_once(f"  note         {file.path} was trained on {file.settings.base}")
        lora = lora_config_of_file(
            file, lora_alpha=config.lora_alpha, enable_lora=config.enable_lora
        )
    dtype = DTYPES[resolve_dtype(config.dtype)]
    adapted = build_causal_lm(
        source, tokenizer, config.model, lora, dtype=dtype, seed=0, meta=False
    )
    if file is not None:
        load_lora_only(adapted.model, file)
    return adapted.model.to(device()).eval()


def _search(config: DecodeConfig, tokenizer: Tokenizer, model: Any) -> Search:
    tokens = model.get_input_embeddings().num_embeddings
    for value in config.eos_token_id:
        if value >= tokens:
            raise ValueError(f"--eos_token_id {value}: the model has {tokens} tokens, from 0")
    return Search(
        num_beams=config.num_beams,
        max_new_tokens=config.max_new_tokens,
        # In this order and once each: transformers searches wider for every one.
        eos_ids=tuple(dict.fromkeys((int(tokenizer.eos_token_id), *config.eos_token_id))),
        pad_id=int(tokenizer.pad_token_id),
        length_penalty=config.length_penalty,
        no_repeat_ngram_size=config.no_repeat_ngram_size,
        repetition_penalty=config.repetition_penalty,
        min_length=config.min_length,
    )


def _prompts(
    meanings: Sequence[Meaning], tokenizer: Tokenizer, search: Search, model: Any
) -> list[list[int]]:
    """Tokens of each meaning and the end-of-sequence token behind it, as in training."""
    encoded = make_encoder(tokenizer).encode([each.text for each in meanings])
    prompts = [ended(ids, int(tokenizer.eos_token_id)) for ids in encoded]
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    length = len(prompts[longest])
    if limit is not None and length + search.max_new_tokens > limit:
        raise ValueError(
            f"--max_new_tokens {search.max_new_tokens} and the {length} tokens of the meaning "
            f"{meanings[longest].text[:60]!r} exceed the model's {limit} positions"
        )
    return prompts


def _clean(text: str) -> str:
    """The text up to an empty line, stripped."""
    return text.split("\n\n")[0].strip()


def _lines(meanings: Sequence[Meaning], predictions: Sequence[str]) -> Iterator[str]:
    for meaning, prediction in zip(meanings, predictions, strict=True):
        line: dict[str, Any] = {
            "meaning": meaning.text,
            "prediction": prediction,
            "references": meaning.references,
        }
        if meaning.category is not None:
            line["category"] = meaning.category
        yield json.dumps(line, ensure_ascii=False) + "\n"
