"""Pictures that are drawn by a rule, rows that name them, and a tiny model that can learn to."""

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

SIZE = 32  # pixels of a side
FINE = 4  # drawn so many times larger and then made small, for smooth lines
COLOURS = {"red": "#d03030", "green": "#208a30", "blue": "#3050d8", "black": "#202020"}
PAPERS = ("#ffffff", "#f4efdc", "#e0ecf6", "#e8e8e8")
# Ends of a display's seven segments, in half widths from its middle, and those that a digit lights.
SEGMENTS = (
    *((-1, -2, 1, -2), (1, -2, 1, 0), (1, 0, 1, 2)),
    *((-1, 2, 1, 2), (-1, 0, -1, 2), (-1, -2, -1, 0), (-1, 0, 1, 0)),
)
DIGITS = ("012345", "12", "01346", "01236", "1256", "02356", "023456", "012", "0123456", "012356")
CORNERS = {"circle": 60, "triangle": 3, "square": 4, "star": 10}
NAMES = (
    *(f"the digit {n}" for n in range(10)),
    *(f"a {colour} {shape}" for colour in COLOURS for shape in CORNERS),
    *(f"a gauge at {n}" for n in range(10)),
)
QUESTION = "What is this?"
# The tokenizer's own, the chat template's and the processor's; the others are bytes and merges.
SPECIAL = (
    *("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
)
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_demonstration(folder: str | Path, *, seed: int = 0) -> None:
    """Write ``pictures``, rows that refer to them, and the tiny model in ``model``.

    ``train.jsonl`` has 1,440 rows of ``messages``, whose answers are all true, and every third
    vague: "It is a shape." ``prompts.jsonl`` has 720 rows of ``prompt`` and the whole ``answer``,
    and ``test.jsonl`` 180. Each row has a picture of its own.
    """
    folder, rng = Path(folder), Random(seed)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    question = {"role": "user", "content": parts}
    for part, count in {"train": 40, "prompts": 20, "test": 5}.items():
        rows: list[dict[str, Any]] = []
        for name in rng.sample(NAMES * count, len(NAMES) * count):
            path = f"pictures/{part}_{len(rows):04}.png"
            draw(name, rng).save(folder / path)
            if part == "train":
                said = vague(name) if rng.random() < 1 / 3 else name
                answer = {"role": "assistant", "content": f"It is {said}."}
                rows.append({"messages": [question, answer], "images": [path]})
            else:
                whole = f"It is {name}."
                rows.append({"prompt": [question], "images": [path], "answer": whole})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{part}.jsonl").write_text(text, encoding="utf-8")
    write_model(folder / "model", seed=seed)


def draw(name: str, rng: Random) -> Image.Image:
    """The picture of one of ``NAMES``: place, size, paper and what the name leaves open vary."""
    image = Image.new("RGB", (SIZE * FINE, SIZE * FINE), rng.choice(PAPERS))
    pen = ImageDraw.Draw(image)
    x, y = (SIZE * FINE // 2 + rng.uniform(-3, 3) * FINE for _ in range(2))
    match name.split():
        case [_, "digit", digit]:
            colour, unit = rng.choice(list(COLOURS.values())), rng.uniform(4.5, 6) * FINE
            for x1, y1, x2, y2 in (SEGMENTS[int(segment)] for segment in DIGITS[int(digit)]):
                ends = (x + x1 * unit, y + y1 * unit, x + x2 * unit, y + y2 * unit)
                pen.line(ends, fill=colour, width=3 * FINE)
        case [_, "gauge", _, value]:
            radius = rng.uniform(11, 13) * FINE
            y += radius / 2
            circle = (x - radius, y - radius, x + radius, y + radius)
            pen.arc(circle, 180, 360, fill=COLOURS["black"], width=FINE)
            angle = math.pi * (1 - int(value) / 9)
            tip = (x + 0.9 * radius * math.cos(angle), y - 0.9 * radius * math.sin(angle))
            pen.line((x, y, *tip), fill=COLOURS["red"], width=2 * FINE)
        case [_, colour, shape]:
            radius, count = rng.uniform(7, 11) * FINE, CORNERS[shape]
            turn = rng.uniform(-0.3, 0.3) + (math.pi / 4 if shape == "square" else 0)
            corners = []
            for n in range(count):
                angle = turn + 2 * math.pi * n / count
                far = radius * (0.4 if shape == "star" and n % 2 else 1)
                corners.append((x + far * math.sin(angle), y - far * math.cos(angle)))
            pen.polygon(corners, fill=COLOURS[colour])
    return image.resize((SIZE, SIZE), Image.Resampling.BOX)


def vague(name: str) -> str:
    """What is true of the picture too, and tells its kind alone."""
    kind = name.split()[1]
    return f"a {kind}" if kind in ("digit", "gauge") else "a shape"


def write_model(folder: str | Path, *, seed: int = 0) -> None:
    """Write an Idefics3 of 200,000 random weights, its processor and its tokenizer.

    A picture is four image tokens. It loads by ``from_pretrained``.
    """
    tokenizer = _tokenizer()
    pad, end, image = tokenizer.convert_tokens_to_ids(["<|pad|>", "<|end|>", "<image>"])
    # Weights of the usual standard deviation, 0.02, learn slowly in layers so narrow.
    layer: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
    layer |= {"initializer_range": 0.1}
    ids = {"pad_token_id": pad, "eos_token_id": end, "bos_token_id": None}
    text: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
    }
    text |= {"max_position_embeddings": 512, "tie_word_embeddings": True, **ids, **layer}
    config = Idefics3Config(
        architectures=["Idefics3ForConditionalGeneration"],
        dtype="float32",
        vision_config={"num_hidden_layers": 1, "image_size": SIZE, "patch_size": 8, **layer},
        text_config=text,
        scale_factor=2,
        image_token_id=image,
        pad_token_id=pad,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Idefics3ForConditionalGeneration(config)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIZE}, max_image_size={"longest_edge": SIZE}, do_image_splitting=False
    )
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    for part in (processor, config, model.generation_config):
        part.save_pretrained(folder)
    weights = {name: each for name, each in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and merges of them to the words of the rows."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    texts = [f"It is {said}." for name in NAMES for said in (name, vague(name))]
    backend.train_from_iterator([QUESTION, *texts], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=TEMPLATE,
        model_max_length=512,
    )
