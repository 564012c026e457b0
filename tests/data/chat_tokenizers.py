"""Byte-level tokenizers with the special tokens that chat templates write."""

import re
from pathlib import Path

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.hand_tokenizers import ALPHABET

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# As the families' tokenizers have them: one token each, kept when special tokens are skipped.
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
_BARS = r"<\|[\w.]+\|>|<\|\w+>|<\w+\|>|<\uff5c[^\uff5c]+\uff5c>"
_WORDS = "|".join(
    re.escape(token)
    for token in (
        *("<start_of_turn>", "<end_of_turn>", "<end_of_utterance>", "<bos>", "<eos>", "</s>"),
        *("[gMASK]", "<sop>", "[INST]", "[/INST]"),
    )
)
EOS = {
    "phi3": "<|endoftext|>",
    "deepseek": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "llava": "</s>",
}


def template_text(name):
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def build_chat_tokenizer(name, *, template=None):
    """A tokenizer for TRL's template ``name``: one token a byte and one for each that it writes."""
    text = template_text(name)
    found = re.findall(f"{_BARS}|{_WORDS}", text)
    eos = next((end for start, end in EOS.items() if name.startswith(start)), "<|endoftext|>")
    return build_tokenizer_with(found, eos=eos, template=text if template is None else template)


def build_tokenizer_with(tokens, *, eos, template, plain=PLAIN):
    """One token a byte and one for each of ``tokens``, which are special unless in ``plain``."""
    specials = ["<bos>", eos, *(token for token in tokens if token not in plain)]
    vocab = {letter: index for index, letter in enumerate(ALPHABET)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(dict.fromkeys(specials)))
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token=eos, pad_token=eos
    )
    tokenizer.chat_template = template
    return tokenizer
