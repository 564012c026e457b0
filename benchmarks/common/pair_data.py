"""Pairs of answers to measure on: a file's, or random tokens of the same lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.chat import Chat
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.readers import iter_file
from dschat_lora.data.records import to_records
from dschat_lora.data.rows import DataKind, parse_row
from dschat_lora.data.samples import PairSample, SequenceSample
from dschat_lora.data.tokenize import TokenRule, tokenize

SPECIAL = ("<unk>", "<pad>", "<s>", "</s>")
PAD_ID = SPECIAL.index("<pad>")
EOS_ID = SPECIAL.index("</s>")
SEED = 0
# Tokens at the least, each tenth and the most of the AlpacaEval results, public: what pairs of at
# most 512 tokens begin with, and what is left of the chosen and of the rejected answer, in pieces
# of a vocabulary of 8192 trained on the same texts.
QUANTILES = {
    "shared": (4, 10, 14, 17, 21, 25, 30, 37, 50, 73, 372),
    "chosen": (1, 21, 48, 77, 99, 122, 154, 195, 257, 345, 497),
    "rejected": (1, 15, 36, 57, 74, 90, 107, 132, 168, 228, 483),
}
QUANTILES_LENGTH = 512  # of the longest sequence they were taken from


@dataclass(frozen=True)
class Pairs:
    """Tokenised pairs, and the tokenizer as ``tokenizers`` writes it."""

    samples: list[PairSample]
    tokenizer: str
    source: str


def read_pairs(path: Path, *, vocab_size: int, max_seq_len: int, limit: int) -> Pairs:
    """``limit`` usable pairs of a file, at random, in pieces of a vocabulary of its own texts."""
    samples, text = _read(path, vocab_size, max_seq_len, "pairs")
    return Pairs(samples[:limit], text, "file")


def read_samples(
    path: Path, *, vocab_size: int, max_seq_len: int
) -> tuple[list[SequenceSample], str]:
    """A file's prompts with their (chosen) answers, at random, and the tokenizer of its texts."""
    return _read(path, vocab_size, max_seq_len, "samples")


def _read(path: Path, vocab_size: int, max_seq_len: int, kind: DataKind) -> tuple[list[Any], str]:
    rows = [parse_row(row) for row in iter_file(path)]
    names = ("prompt", "chosen", "rejected", "completion")
    texts = [str(row.values[name]) for row in rows for name in names if name in row.values]
    tokenizer = load_tokenizer(_train(texts, vocab_size).to_str())
    chat = Chat(tokenizer, SPECIAL[EOS_ID])
    rule = TokenRule(EOS_ID, max_seq_len, "drop", train_on_prompt=False, kind=kind)
    results = tokenize(
        [record for row in rows for record in to_records(row, chat)], make_encoder(tokenizer), rule
    )
    samples = [result.sample for result in results if result.sample is not None]
    order = permutation(len(samples), "benchmark", SEED)
    return [samples[number] for number in order], tokenizer.backend_tokenizer.to_str()


def random_pairs(*, vocab_size: int, max_seq_len: int, limit: int) -> Pairs:
    """Random tokens in the lengths of ``QUANTILES``, scaled to ``max_seq_len``."""
    generator = np.random.default_rng(SEED)
    samples: list[PairSample] = []
    while len(samples) < limit:
        shared, chosen, rejected = (
            draw_length(QUANTILES[name], max_seq_len / QUANTILES_LENGTH, generator)
            for name in ("shared", "chosen", "rejected")
        )
        if shared + max(chosen, rejected) <= max_seq_len:
            ids = _ids(shared + chosen + rejected, vocab_size, generator)
            # Both ways on differ at once, and end alike.
            ids[shared + chosen] = 4 + (ids[shared] - 3) % (vocab_size - 4)
            ids[[shared + chosen - 1, -1]] = EOS_ID
            samples.append(PairSample(ids, shared, shared, chosen))
    return Pairs(samples, _train([], vocab_size).to_str(), "random tokens")


def load_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers from :attr:`Pairs.tokenizer`."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text),
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="</s>",
    )


def _train(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def draw_length(quantiles: Sequence[int], scale: float, generator: np.random.Generator) -> int:
    """A random length with these quantiles times ``scale``, at least 2."""
    at = generator.uniform(0, len(quantiles) - 1)
    return max(2, round(scale * float(np.interp(at, range(len(quantiles)), quantiles))))


def _ids(size: int, vocab_size: int, generator: np.random.Generator) -> NDArray[np.int32]:
    return generator.integers(len(SPECIAL), vocab_size, size=size).astype(np.int32)
