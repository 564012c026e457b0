"""A small data set in E2E's form, and a GPT-2 that could learn it."""

from itertools import product

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

NAMES = ("The Blue Door", "Old Mill", "Green Garden", "Harbour House")
FOODS = ("Indian", "French", "Thai")
AREAS = ("riverside", "city centre")
FORMS = (
    "{name} serves {food} food in the {area} .",
    "In the {area} there is a {food} place called {name} .",
)
END = "<|endoftext|>"


def lines():
    """Every meaning with two texts, 48 lines."""
    return [
        f"name : {name} | food : {food} | area : {area}||{form.format(**locals())}"
        for name, food, area in product(NAMES, FOODS, AREAS)
        for form in FORMS
    ]


def write_data(directory):
    """``train.txt`` and ``held.txt``, whose meanings are not trained on; returns the two paths."""
    train, held = directory / "train.txt", directory / "held.txt"
    train.write_text("".join(f"{line}\n" for line in lines()[:-8]), encoding="utf-8")
    held.write_text("".join(f"{line}\n" for line in lines()[-8:]), encoding="utf-8")
    return train, held


def save_base(directory):
    """An untrained GPT-2 of two blocks with a tokenizer of the data; returns its directory."""
    bytes_and_pairs = ByteLevelBPETokenizer()
    texts = [line.replace("||", " ") for line in lines()]
    bytes_and_pairs.train_from_iterator(texts, vocab_size=320, special_tokens=[END])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_and_pairs._tokenizer, bos_token=END, eos_token=END, unk_token=END
    )
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end, **sizes)
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
