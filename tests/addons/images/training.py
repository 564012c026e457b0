"""Rows with pictures for tiny models that see, in our pieces and in stock transformers and PEFT."""

import json
from dataclasses import replace

import peft
import torch
from transformers import AutoModelForImageTextToText

from addons.images.vlms import drawn, prepared_by, tiny_vlm
from dschat_lora.checkpoint.adapter import write_adapter
from dschat_lora.config.addons import through_addons
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.lora.model import adapter_layout, adapter_parameters
from dschat_lora.models.build import build_causal_lm, check_targets
from dschat_lora.models.source import find_model

SIZES = {"square": (32, 32), "tall": (20, 40), "wide": (48, 24), "other": (32, 32)}
# One, several and no picture of a row, by name.
PICTURES = {
    "one": ["square"],
    "several": ["tall", "wide"],
    "none": [],
    "another": ["wide"],
    "like": ["other"],
}
EXACT = 1e-5
RATE, EPSILON = 2e-3, 1e-2  # of AdamW: a gradient of rounding errors alone then moves nothing


def question(name):
    """A message of the user with the pictures of this name between words."""
    text = {"type": "text", "text": f"Which is {name}?"}
    first, *rest = [{"type": "image"} for _ in PICTURES[name]] or [text]
    return {"role": "user", "content": [first, *([text] if PICTURES[name] else []), *rest]}


def answer(text):
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def sample_row(name):
    """A conversation about these pictures."""
    return {
        "messages": [question(name), answer(f"It is {name}, I say.")],
        "images": [f"{each}.png" for each in PICTURES[name]],
    }


def pair_row(name):
    """Two answers to a question about these pictures, which begin alike."""
    return {
        "prompt": [question(name)],
        "chosen": [answer(f"It is {name}, I say.")],
        "rejected": [answer("It is not, and I do not know.")],
        "images": [f"{each}.png" for each in PICTURES[name]],
    }


def numbered(row, number):
    """The row as another one, which asks for its number too."""
    return json.loads(json.dumps(row).replace("Which is", f"Number {number}: which is"))


class Seeing:
    """A tiny model that sees, on disk, beside its pictures."""

    def __init__(self, kind, folder, **options):
        self.kind, self.folder = kind, folder
        self.base = tiny_vlm(kind, folder / "base", **options)
        self.pictures, self._made, self._read = {}, {}, {}
        for number, (name, size) in enumerate(SIZES.items()):
            self.pictures[name] = drawn(*size, seed=number)
            self.pictures[name].save(folder / f"{name}.png")
        self.source = find_model(str(self.base))

    def data(self, rows, kind="samples", *options, config_class=SupervisedConfig):
        """Rows as a stage prepares them, in order; what reads their pictures is that of the model.

        Equal rows are prepared once.
        """
        rows = list(rows)
        key = json.dumps([rows, kind, options, config_class.__name__])
        if key not in self._read:
            self._read[key] = self._prepare(rows, kind, options, config_class)
        samples, self.config, self.tokenizer, self.media = self._read[key]
        self.processor = self.media.processor
        return samples

    def _prepare(self, rows, kind, options, config_class):
        path = self.folder / f"{kind}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        words = ["--model_name_or_path", self.base, "--data_path", path, "--eval_ratio", 0]
        words += ["--max_seq_len", 400, "--preprocessing_num_workers", 1]
        words += ["--data_output_path", self.folder / "cache", *options]
        config = parse_config(config_class, list(map(str, words)), program="test")
        config = through_addons(config, "before_data")
        cache = self.folder / "cache"
        tokenizer, _, prepared = prepared_by(config, self.source.base, cache, kind)
        samples = [prepared.train[index] for index in range(len(prepared.train))]
        return samples, config, tokenizer, prepared.media

    def ours(self, *targets, build=build_causal_lm, dtype=torch.float32):
        """Our model with an adapter that does something, over the pictures of ``data``."""
        lora = LoraConfig(lora_dim=4, lora_alpha=8.0)
        lora = replace(lora, target_modules=targets or lora.target_modules)
        check_targets(self.source, self.config.model, lora)
        adapted = build(
            self.source, self.tokenizer, self.config.model, lora, dtype=dtype, seed=1, meta=False
        )
        self.applied = adapted.lora
        generator = torch.Generator().manual_seed(0)
        for name, parameter in adapter_parameters(adapted.model).items():
            if name.endswith("lora_B"):
                parameter.data.normal_(std=0.05, generator=generator)
        self.media.towers.clear()  # of other models
        self.media.attach(adapted.model)
        return adapted.model.eval()

    def write(self, model, task="CAUSAL_LM"):
        """The adapter of our model, as a stage writes it."""
        write_adapter(
            self.folder / "adapter",
            {name: p.detach() for name, p in adapter_parameters(model).items()},
            self.applied,
            layout=adapter_layout(model),
            base_model_name_or_path=str(self.base),
            task_type=task,
        )
        return self.folder / "adapter"

    def stock(self, adapter, auto=AutoModelForImageTextToText, **options):
        """Transformers' published class under PEFT's adapter."""
        model = auto.from_pretrained(self.base, dtype=torch.float32, **options).eval()
        return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()

    def inputs(self, messages, names):
        """What the model's own processor makes of messages, and the tokens before the answer."""
        before = self.all_inputs(messages[:-1], names)["input_ids"].shape[1]
        return self.all_inputs(messages, names), before

    def prompt_inputs(self, messages, names):
        """The same of what precedes the last message."""
        return self.all_inputs(messages[:-1], names)

    def all_inputs(self, messages, names):
        """What the processor makes of messages up to the assistant's turn or its end."""
        key = json.dumps([messages, names])
        if key not in self._made:
            text = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.processor.chat_template,
                tokenize=False,
                add_generation_prompt=messages[-1]["role"] == "user",
            )
            pictures = [[self.pictures[name] for name in names]] if names else None
            self._made[key] = self.processor._processor(
                text=[text], images=pictures, return_tensors="pt"
            )
        return self._made[key]

    def logprobs(self, model, messages, names):
        """Of the last message's tokens and its end, by the stock model."""
        inputs, before = self.inputs(messages, names)
        logits = model(**inputs).logits[0, before - 1 : -1]
        targets = inputs["input_ids"][0, before:]
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def train_steps(parameters, losses):
    """One step of AdamW for each of the losses, which are made in turn; their values."""
    optimizer = torch.optim.AdamW(
        parameters, lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
    )
    values = []
    for make in losses:
        loss = make()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values
