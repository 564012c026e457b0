"""Decoding of meanings into texts by beam search, with the model of a run, a hub or a file."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dschat_lora.addons.loralib.lora_only import load_lora_only, lora_config_of_file, read_lora_only
from dschat_lora.addons.nlg.beam_search import BeamSearch, beam_search
from dschat_lora.addons.nlg.config import DecodeConfig
from dschat_lora.addons.nlg.gpt2_checkpoint import gpt2_with_weights, read_gpt2_checkpoint
from dschat_lora.addons.nlg.validation import weights_file
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.plurals import counted
from dschat_lora.config.staging import write_whole
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.readers import RowError, iter_rows
from dschat_lora.data.row_formats import TwoWayTokenizer
from dschat_lora.data.rows import RowOptions, parse_row, require_usable
from dschat_lora.data.sources import find_source
from dschat_lora.data.tokenize import ended
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import (
    device,
    gather_over_ranks,
    on_rank_zero,
    raise_together,
    rank,
    world_size,
)
from dschat_lora.engine.process_group import init_distributed, shutdown
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.loading import Tokenizer, load_tokenizer
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.report.terminal import error_message, log_once
from dschat_lora.runtime.stage_main import fail


@dataclass
class Meaning:
    """A meaning to put into words, with its reference texts."""

    text: str
    references: list[str] = field(default_factory=list)
    category: str | None = None
    row: int = field(default=0, compare=False)  # the first of its rows, from 0


def run_decode(config: DecodeConfig) -> None:
    """Write a line of JSON for every meaning, from a checked config; on every rank.

    A mistake that shows only now, an error of the disk and a full GPU end the process as one
    line.
    """
    if config.dry_run:
        log_once("decode: options, files and data are in order")
        return
    try:
        if words := init_distributed():
            log_once(f"  note         {words}")
        torch.manual_seed(config.seed)
        write_predictions(config)
    except (ValueError, OSError) as error:
        code = 1 if isinstance(error, OSError) else 2
        fail(error_message(error), code=code)
    except torch.OutOfMemoryError:
        fail("the GPU is full: lower --per_device_eval_batch_size or --num_beams", code=1)
    shutdown()


def write_predictions(config: DecodeConfig) -> None:
    """Search for a text to every meaning and write the file; call on every rank."""
    source = find_model(config.model_name_or_path)
    tokenizer = load_tokenizer(source.tokenizer, config.model)
    meanings = read_meanings(config.data_path, tokenizer)
    model = raise_together(partial(load_model, config, source, tokenizer))
    ids = search_all(config, tokenizer, model, meanings)
    text = "".join(prediction_lines(meanings, as_texts(ids, tokenizer), ids))
    path = Path(config.output_path).expanduser()
    on_rank_zero(partial(write_whole, path, text))
    log_once(f"{counted(len(meanings), 'meaning')} written to {path}")


def search_all(
    config: DecodeConfig, tokenizer: Tokenizer, model: PreTrainedModel, meanings: Sequence[Meaning]
) -> list[list[int]]:
    """Tokens of the text of each meaning; call on every rank."""
    tokens = model.get_input_embeddings().num_embeddings
    for value in config.eos_token_id:
        if value >= tokens:
            raise ValueError(f"--eos_token_id {value}: the model has {tokens} tokens, from 0")
    search = BeamSearch(
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
    width = search.max_new_tokens
    prompts = encode_prompts(meanings, tokenizer, width, model, seq_len=config.seq_len)
    # Batches are the same for any number of processes, and with them the rounding of the logits.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    size = config.per_device_eval_batch_size
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    lines = torch.full((0, width + 2), -1, device=device())
    for own in batches[rank() :: world_size()]:
        texts = beam_search(model, [prompts[i] for i in own], search, device=device())
        padded = [
            [i, len(t), *t, *[-1] * (width - len(t))] for i, t in zip(own, texts, strict=True)
        ]
        lines = torch.cat([lines, torch.tensor(padded, device=device())])
    texts_of = {i: ids[:length] for i, length, *ids in gather_over_ranks(lines).tolist()}
    return [texts_of[i] for i in range(len(meanings))]


def encode_prompts(
    meanings: Sequence[Meaning],
    tokenizer: Tokenizer,
    max_new_tokens: int,
    model: PreTrainedModel,
    *,
    seq_len: int | None = None,
) -> list[list[int]]:
    """Tokens of each meaning and the end-of-sequence token behind it, as in training."""
    encoded = make_encoder(tokenizer).encode([each.text for each in meanings])
    prompts = [ended(ids, int(tokenizer.eos_token_id)) for ids in encoded]
    most = getattr(model.config, "max_position_embeddings", None)
    limit = min((each for each in (most, seq_len) if each is not None), default=None)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    length = len(prompts[longest])
    if limit is not None and length + max_new_tokens > limit:
        raise ValueError(
            f"--max_new_tokens {max_new_tokens} and the {length} tokens of the meaning "
            f"{meanings[longest].text[:60]!r} exceed "
            + (f"--seq_len {limit}" if limit == seq_len else f"the model's {limit} positions")
        )
    return prompts


def as_texts(ids: Sequence[list[int]], tokenizer: Tokenizer) -> list[str]:
    plain = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return [clean_text(plain(each)) for each in ids]


def load_model(config: DecodeConfig, source: ModelSource, tokenizer: Tokenizer) -> PreTrainedModel:
    """The model with its factors on this device.

    Raises:
        ValueError: if the weights cannot be read, or do not fit the model or the options.
    """
    dtype = DTYPES[resolve_dtype(config.dtype)]
    base, file, parts = None, None, config.enable_lora
    if config.lora_path is not None:
        file = read_lora_only(Path(config.lora_path).expanduser())
    elif (weights := weights_file(config.init_checkpoint)) is not None:
        checkpoint = read_gpt2_checkpoint(weights)
        file, parts = checkpoint.factors, parts or ("q", "v")
        if checkpoint.base:
            base = gpt2_with_weights(source.base, config.model, checkpoint, dtype=dtype)
    lora = LoraConfig()
    if file is not None:
        if config.lora_dim is not None and config.lora_dim != file.r:
            raise ValueError(
                f"--lora_dim is {config.lora_dim}, but {file.path} holds factors of rank {file.r}"
            )
        if file.settings is not None:
            parts = config.enable_lora
            if file.settings.base not in (None, source.base):
                log_once(f"  note         {file.path} was trained on {file.settings.base}")
        lora = lora_config_of_file(file, lora_alpha=config.lora_alpha, enable_lora=parts)
    adapted = build_causal_lm(
        source, tokenizer, config.model, lora, dtype=dtype, seed=0, meta=False, base=base
    )
    if file is not None:
        load_lora_only(adapted.model, file)
    model: PreTrainedModel = adapted.model.to(device()).eval()
    return model


def read_meanings(paths: Sequence[str], tokenizer: TwoWayTokenizer | None = None) -> list[Meaning]:
    """Every distinct meaning in the order of its first row, with the texts of all its rows.

    Rows of token ids need the ``tokenizer``.

    Raises:
        ValueError: if a row cannot be used.
    """
    meanings: dict[str, Meaning] = {}
    rows = (raw for entry in paths for raw in iter_rows(find_source("data_path", entry)))
    for number, raw in enumerate(rows):
        row = require_usable(parse_row(raw, RowOptions(unpaired="all")), "prompts")
        values = row.values
        if tokenizer is not None:
            try:
                values = row.with_texts(tokenizer)
            except ValueError as error:
                raise RowError(row.location, str(error)) from error
        prompt = values.get("prompt")
        if row.kind not in ("prompt", "prompt-completion") or not isinstance(prompt, str):
            raise RowError(row.location, "decode takes a `prompt` of text, its `completion`")
        meaning = meanings.setdefault(prompt, Meaning(prompt, row=number))
        if row.kind == "prompt-completion":
            meaning.references.append(values["completion"].strip())
        meaning.category = meaning.category or values.get("category")
    return list(meanings.values())


def prediction_lines(
    meanings: Sequence[Meaning], texts: Sequence[str], ids: Sequence[Sequence[int]]
) -> Iterator[str]:
    """A line of JSON for each meaning, with what was written: as text, and as token ids.

    ``id`` and ``predict`` are what microsoft/LoRA's ``gpt2_decode.py`` reads: the number of a row
    with this meaning, from 0, and the tokens.
    """
    for meaning, text, tokens in zip(meanings, texts, ids, strict=True):
        line: dict[str, Any] = {
            "meaning": meaning.text,
            "prediction": text,
            "references": meaning.references,
        }
        if meaning.category is not None:
            line["category"] = meaning.category
        line |= {"id": meaning.row, "predict": list(tokens)}
        yield json.dumps(line, ensure_ascii=False) + "\n"


def clean_text(text: str) -> str:
    """The text up to an empty line, stripped."""
    return text.split("\n\n")[0].strip()
