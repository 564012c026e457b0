"""Tiny tokenizers whose output can be written down by hand."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIALS = ["<pad>", "<s>", "</s>"]


def build_byte_tokenizer(
    *, bos=False, eos=False, merges=(), chat_template=None, pad="<pad>", letters=ALPHABET
):
    """One token a byte but for ``merges``; ``bos`` and ``eos``: what it adds by default."""
    pieces = [*SPECIALS, *letters] + ["".join(pair) for pair in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            single=("<s> " if bos else "") + "$A" + (" </s>" if eos else ""),
            special_tokens=[("<s>", 1), ("</s>", 2)],
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token=pad
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def build_metaspace_tokenizer(letters="abcdefgh"):
    """As SentencePiece: spaces become a mark, and a text begins with one."""
    pieces = [*SPECIALS, "\u2581", *sorted(set(letters))]
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
