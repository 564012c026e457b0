"""Tiny models that see with adapters, and what stock transformers and PEFT say of pictures."""

import base64
import io
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoTokenizer

from dschat_lora.addons.images.processors import PictureProcessor
from dschat_lora.config.groups import LoraConfig
from helpers.served import write_run


def data_uri(picture):
    """A picture as OpenAI's clients send it."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def asked(*parts):
    """A question of texts and pictures, which become ``image`` parts."""
    content = [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else {"type": "image", "image": each}
        for each in parts
    ]
    return [{"role": "user", "content": content}]


def as_sent(messages):
    """The same in OpenAI's form."""
    sent = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = [
                {"type": "image_url", "image_url": {"url": data_uri(part["image"])}}
                if part["type"] == "image"
                else part
                for part in content
            ]
        sent.append({**message, "content": content})
    return sent


def write_adapter(base, directory, *, seed, reward=False, **options):
    """An output directory with an adapter on ``base`` that changes what it says; returns it.

    ``options`` are of :class:`LoraConfig`.
    """
    lora = LoraConfig(**{"lora_dim": 4, **options})
    return write_run(directory, seed=seed, reward=reward, base=base, lora=lora, std=0.2)


class Stock:
    """The composite model of ``base`` in stock transformers, with adapters of stock PEFT."""

    def __init__(self, base, *runs):
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.processor = PictureProcessor(str(base), self.tokenizer)
        model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()
        self.bare, self.model = model, model
        for run in runs:
            path, name = Path(run) / "adapter", Path(run).name
            if isinstance(self.model, PeftModel):
                self.model.load_adapter(path, name)
            else:
                self.model = PeftModel.from_pretrained(self.model, path, adapter_name=name)

    def inputs(self, messages):
        """Of a conversation up to the assistant's turn."""
        pictures = [
            part["image"]
            for message in messages
            if isinstance(message["content"], list)
            for part in message["content"]
            if part["type"] == "image"
        ]
        text = self.tokenizer.apply_chat_template(
            messages,
            chat_template=self.processor.chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
        return self.processor._processor(
            text=[text], images=[pictures] if pictures else None, return_tensors="pt"
        )

    def answer(self, messages, count, *, run=None):
        """The greedy answer's tokens and the number of tokens of the prompt."""
        inputs = self.inputs(messages)
        size = inputs["input_ids"].shape[1]
        options = {"max_new_tokens": count, "do_sample": False}
        if run is None and isinstance(self.model, PeftModel):
            with self.model.disable_adapter():
                ids = self.model.generate(**inputs, **options)
        else:
            if run is not None:
                self.model.set_adapter(Path(run).name)
            ids = self.model.generate(**inputs, **options)
        return ids[0, size:].tolist(), size

    def text(self, ids):
        """Of an answer's tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)
