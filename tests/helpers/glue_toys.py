"""Tiny RoBERTa and DeBERTa-v2 models, and the nine tasks in GLUE's own files, made on the spot."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
from transformers.models.deberta_v2 import DebertaV2Config
from transformers.models.roberta import RobertaConfig

WORDS = "a the cat dog bird sat ran flew saw ate red blue small big not never on under".split()
#: options of a run that learns something in a few steps
LORA = ("--apply_lora", "--learning_rate", "1e-2", "--logging_steps", "1")
_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
_COMMON = {
    "vocab_size": len(_SPECIAL) + len(WORDS),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,
}


def save_encoder(kind, directory, **more):
    """A pretrained encoder of ``kind`` (roberta, deberta-v2) with its tokenizer."""
    if kind == "roberta":
        settings = RobertaConfig(type_vocab_size=1, **{**_COMMON, **more})
    else:
        settings = DebertaV2Config(
            type_vocab_size=0,
            relative_attention=True,
            position_buckets=8,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            pooler_hidden_size=32,
            position_biased_input=False,
            **{**_COMMON, **more},
        )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(settings)
        # As a pretrained encoder comes: without the head.
        model.base_model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory):
    """Words apart at spaces, with RoBERTa's special tokens."""
    vocabulary = {word: number for number, word in enumerate([*_SPECIAL, *WORDS])}
    raw = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    raw.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=64,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(directory)


def sentence(draw):
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 8)))


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return path


# Header of each task's own files and, for a row, its cells; in the columns of GLUE's download.
_LAYOUTS = {
    "cola": (None, lambda i, a, _, y: ["gj04", y, "" if y else "*", a]),
    "sst2": (["sentence", "label"], lambda i, a, _, y: [a, y]),
    "mrpc": (
        ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
        lambda i, a, b, y: [y, i, i, a, b],
    ),
    "qqp": (
        ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
        lambda i, a, b, y: [i, i, i, a, b, y],
    ),
    "stsb": (
        "index genre filename year old_index source1 source2 sentence1 sentence2 score".split(),
        lambda i, a, b, y: [i, "g", "f", 2012, i, "s", "s", a, b, y],
    ),
    "mnli": (
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse "
        "sentence1_parse sentence2_parse sentence1 sentence2 label1 gold_label".split(),
        lambda i, a, b, y: [i, i, i, "g", "p", "p", "p", "p", a, b, y, y],
    ),
    "qnli": (["index", "question", "sentence", "label"], lambda i, a, b, y: [i, a, b, y]),
    "rte": (["index", "sentence1", "sentence2", "label"], lambda i, a, b, y: [i, a, b, y]),
    "wnli": (["index", "sentence1", "sentence2", "label"], lambda i, a, b, y: [i, a, b, y]),
}
_ENTAILMENT = ["entailment", "not_entailment"]
_LABELS = {"mnli": ["entailment", "neutral", "contradiction"], "qnli": _ENTAILMENT}
_LABELS["rte"] = _ENTAILMENT
TSV_TASKS = list(_LAYOUTS)


def write_task(task, directory, *, train=24, dev=12, seed=0):
    """GLUE's own files of a task; whether "not" or "never" is there tells the label."""
    draw = random.Random(f"{seed}{task}")
    header, cells = _LAYOUTS[task]
    stems = {"train": train, "dev": dev, "test": dev}
    if task == "mnli":
        stems = {"train": train} | {f"{s}_{m}": dev for s in ("dev", "test") for m in _KINDS}
    for stem, count in stems.items():
        rows = [cells(i, *_row(task, draw)) for i in range(count)]
        top = header
        if stem.startswith("test"):
            rows, top = [_without_label(task, row) for row in rows], _test_header(task)
        write_lines(Path(directory) / f"{stem}.tsv", [*([top] if top else []), *rows])
    return directory


_KINDS = ("matched", "mismatched")


def _row(task, draw):
    a, b = sentence(draw), sentence(draw)
    count = sum(word in ("not", "never") for word in (a + " " + b).split())
    if task == "stsb":
        return a, b, round(min(5.0, 1.5 * count), 2)
    names = _LABELS.get(task, [0, 1])
    return a, b, names[min(count, len(names) - 1)]


def _without_label(task, row):
    if task == "cola":
        return [0, row[3]]
    if task == "mrpc":
        return [0, *row[1:]]
    if task == "mnli":
        return row[:-2]
    return [0, row[0]] if task == "sst2" else row[:-1]


def _test_header(task):
    own = {"cola": ["index", "sentence"], "sst2": ["index", "sentence"]}
    if task in own:
        return own[task]
    if task == "mrpc":
        return ["index", *_LAYOUTS["mrpc"][0][1:]]
    return _LAYOUTS[task][0][: -2 if task == "mnli" else -1]


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
