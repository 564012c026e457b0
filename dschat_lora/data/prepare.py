"""Preparation of data: rows to cached token sets, with an audit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_lora.config.data import DataConfig, parse_variables
from dschat_lora.data.audit import Audit, Tally, make_audit
from dschat_lora.data.chat import Chat
from dschat_lora.data.collect import collect
from dschat_lora.data.encoder import Tokenizer, make_encoder
from dschat_lora.data.fingerprint import fingerprint
from dschat_lora.data.rows import DataKind, config_sources
from dschat_lora.data.samples import AnySample
from dschat_lora.data.store import TokenSet, load_or_build, write_samples
from dschat_lora.data.tokenize import Tokenized, TokenRule, tokenize_all
from dschat_lora.data.unpaired import unpair


@dataclass(frozen=True)
class Prepared:
    """Tokenised data of one step of training."""

    train: TokenSet
    eval: TokenSet
    audit: Audit
    fingerprint: str
    from_cache: bool


def prepare(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    phase: int,
    seed: int,
    eos_id: int,
    cache_dir: Path,
    kind: DataKind = "samples",
) -> Prepared:
    """Token sets of samples or pairs, from the cache if they were made before.

    Safe to call in several processes at once; the first to finish fills the cache, which is
    ``cache_dir/FINGERPRINT``. :meth:`Audit.check` refuses data that is not fit to train on.

    The split is disjoint between phases 1, 2 and 3 of equal ``seed``. ``eos_id`` ends a sequence;
    it need not be the tokenizer's own.

    Raises:
        ValueError: for data that cannot be found, read or used, naming file and row.
    """
    sources = config_sources(config)
    key = fingerprint(config, sources, tokenizer, phase=phase, seed=seed, eos_id=eos_id, kind=kind)
    rule = token_rule(config, eos_id, kind)

    def build(directory: Path) -> dict[str, Any]:
        chat = make_chat(config, tokenizer, eos_id)
        rows = collect(config, sources, chat, phase=phase, seed=seed, kind=kind)
        if kind == "unpaired":
            rows = unpair(rows, seed=seed)
        encoder = make_encoder(tokenizer)
        tallies = []
        workers = config.preprocessing_num_workers
        for name, part, repeats in (
            ("train", rows.train, rows.train_repeats),
            ("eval", rows.eval, [1] * len(rows.eval)),
        ):
            records = [record for row in part for record in row]
            times = [n for row, n in zip(part, repeats, strict=True) for _ in row]
            tokenized = tokenize_all(records, encoder, rule, workers=workers)
            tallies.append(_write(directory / f"{name}.arrow", tokenized, times, rule))
        return make_audit(config, rows, *tallies).to_dict()

    content, from_cache = load_or_build(cache_dir / key, build)
    train, held_out = (
        TokenSet(cache_dir / key / f"{name}.arrow", kind) for name in ("train", "eval")
    )
    return Prepared(train, held_out, Audit.from_dict(content), key, from_cache)


def token_rule(config: DataConfig, eos_id: int, kind: DataKind) -> TokenRule:
    """How records become samples, by the options."""
    return TokenRule(
        eos_id,
        config.max_seq_len,
        config.overlong,
        config.train_on_prompt,
        kind,
        config.eos_after_prompt,
    )


def make_chat(config: DataConfig, tokenizer: Tokenizer, eos_id: int) -> Chat:
    """How messages become text, by the tokenizer and the options."""
    eos_text = tokenizer.convert_ids_to_tokens(eos_id)
    return Chat(tokenizer, eos_text, parse_variables(config.chat_template_kwargs))


def _write(
    path: Path, tokenized: Iterable[Tokenized], times: Sequence[int], rule: TokenRule
) -> Tally:
    """Write the sample of each record as often as it is used, and count."""
    tally = Tally(rule.eos_id)

    def samples() -> Iterator[AnySample]:
        for result, repeat in zip(tokenized, times, strict=True):
            tally.add(result, repeat)
            yield from result.samples * repeat

    write_samples(path, samples(), rule.kind)
    return tally
