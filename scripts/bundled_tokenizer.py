"""The tokenizer of the bundled base: SentencePiece, with an equal fast form for transformers."""

import io
import string
from collections.abc import Iterator
from pathlib import Path
from random import Random

import sentencepiece
from bundled_text import document
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1024  # 256 of them single bytes, so that any text has a form
DOCUMENTS = 6000
SPACE = "\u2581"  # what SentencePiece writes for a space
UNK, PAD, EOS = "<|unk|>", "<|pad|>", "<|end|>"  # names that no ordinary text holds


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.model (SentencePiece), tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = train_sentencepiece()
    (folder / "tokenizer.model").write_bytes(trained)
    fast = fast_tokenizer(sentencepiece.SentencePieceProcessor(model_proto=trained))
    fast.save_pretrained(folder)


def corpus() -> Iterator[str]:
    """The lines of the documents; a line break is a single byte, never part of a piece."""
    rng = Random("tokenizer")
    for _ in range(DOCUMENTS):
        for part in document(rng):
            yield from filter(None, part.split("\n"))


def train_sentencepiece() -> bytes:
    """A byte-pair model that keeps every character of a text as it is."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=corpus(),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY,
        hard_vocab_limit=False,
        unk_id=0,
        pad_id=1,
        eos_id=2,
        bos_id=-1,
        unk_piece=UNK,
        pad_piece=PAD,
        eos_piece=EOS,
        byte_fallback=True,
        required_chars=string.ascii_letters + string.digits + string.punctuation,
        character_coverage=1.0,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def fast_tokenizer(processor: sentencepiece.SentencePieceProcessor) -> PreTrainedTokenizerFast:
    """The same pieces and merges as a tokenizer of transformers."""
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(
        models.BPE(vocabulary, merges(vocabulary), unk_token=UNK, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in (UNK, PAD, EOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNK,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def merges(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, in the order of the third's id.

    SentencePiece numbers its pieces in the order in which it merges them, and joins whichever
    two neighbours make the first of them.
    """
    joins = []
    for piece, index in vocabulary.items():
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        known = [(a, b) for a, b in splits if a in vocabulary and b in vocabulary]
        joins += [(index, vocabulary[a], vocabulary[b], a, b) for a, b in known]
    return [(a, b) for *_, a, b in sorted(joins)]
