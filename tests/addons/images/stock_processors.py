"""What transformers' own processors make of conversations and pictures, with torchvision.

``PYTHONPATH=.:tests python -m addons.images.stock_processors`` writes it beside this file, where
torchvision and num2words are installed, so that tests compare with it where they are not.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoImageProcessor, AutoProcessor, __version__

from addons.images.vlms import SEEING, TORCHVISION, drawn, tiny_vlm

VALUES = Path(__file__).with_suffix(".json")
# One picture, two, none, and one that is neither RGB nor small.
ROWS = [
    [drawn(20, 30)],
    [drawn(60, 20, seed=1), drawn(16, 16, seed=2)],
    [],
    [drawn(70, 41, seed=3, mode="L")],
]
_RGB = {"do_convert_rgb": True}  # the default of all but lfm2_vl


def conversation(pictures):
    """A message of the user with the pictures between texts, and an answer."""
    parts = [{"type": "text", "text": "compare"}]
    for picture in pictures:
        parts += [{"type": "image", "image": picture}, {"type": "text", "text": " and "}]
    return [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "equal"}]},
    ]


def stock_processor(path):
    """The model's own processor, with pictures by Pillow where that can be."""
    processor = AutoProcessor.from_pretrained(path)
    processor.image_processor = AutoImageProcessor.from_pretrained(path, backend="pil")
    return processor


def stock_tokens(processor):
    """By row: the tokens of its conversation, in one step as people write it."""
    batches = [
        processor.apply_chat_template(
            conversation(row), tokenize=True, return_dict=True, processor_kwargs=_RGB
        )
        for row in ROWS
    ]
    return [[int(token) for token in batch["input_ids"][0]] for batch in batches]


def stock_inputs(processor):
    """Tensors beside tokens for the rows with pictures as one batch."""
    rows = [row for row in ROWS if row]
    text = [processor.apply_chat_template(conversation(row), tokenize=False) for row in rows]
    batch = processor(text=text, images=rows, padding=True, return_tensors="pt", **_RGB)
    tokens = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    return {name: value for name, value in batch.items() if name not in tokens}


def digest(tensor):
    """Shape, type and a sum that tells orders apart."""
    values = tensor.flatten().double()
    weights = torch.arange(1, len(values) + 1).remainder(97).double()
    return [
        list(tensor.shape),
        str(tensor.dtype),
        round((values @ weights / len(values)).item(), 9),
    ]


def main():
    """Write the file."""
    by_family = {}
    for family in (*SEEING, *TORCHVISION):
        with tempfile.TemporaryDirectory() as folder:
            processor = stock_processor(tiny_vlm(family, folder))
        by_family[family] = {
            "tokens": stock_tokens(processor),
            "inputs": {name: digest(value) for name, value in stock_inputs(processor).items()},
        }
        sys.stdout.write(f"{family}: {[len(tokens) for tokens in by_family[family]['tokens']]}\n")
    lines = (f" {json.dumps(family)}: {json.dumps(of)}" for family, of in by_family.items())
    said = f' "transformers": {json.dumps(__version__)}'
    VALUES.write_text("{\n" + ",\n".join([said, *lines]) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
