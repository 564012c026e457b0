"""What a PPO iteration is measured on: random models written to files, prompts and lengths."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.common.pair_data import QUANTILES, draw_length
from benchmarks.common.shapes import Shape, draw_weights_, model_config
from dschat_lora.checkpoint.adapter import write_adapter
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.engine.build import DTYPES
from dschat_lora.lora.model import adapter_layout, adapter_parameters, apply_lora
from dschat_lora.models.loading import load_causal_lm, load_config
from dschat_lora.models.reward_model import HEAD, load_reward_model

EOS_ID, PAD_ID, UNK_ID = 0, 1, 2  # the first of all: see ppo_contenders.ending_at
FIRST_WORD = 3
ALPHA = 32.0
SEED = 0
LOGIT_OF_SPECIAL = -40.0  # no response holds them unless it is told to
QUANTILES_PROMPT = 256  # tokens of DeepSpeed-Chat's longest prompt and answer
REAL, ENDING, FULL = "real prompts", "real prompts, answers end", "full prompts"


@dataclass(frozen=True)
class IterationSize:
    """Actor and critic, and how much an iteration is.

    Attributes:
        actor, critic: their bases, with the actor's vocabulary and rank; the reference has the
            actor's, the reward model the critic's. None: there is no critic.
        max_prompt, max_answer: tokens.
        responses: of an iteration, one to a prompt.
        chat_micro: responses of a micro-batch of the others' updates.
        settings: those that are measured.
        rounds: iterations of each. seconds: no round begins later than so much after the first.
        group: responses to a prompt, of algorithms that compare them.
        max_num_seqs: responses that the package decodes at a time.
    """

    actor: Shape
    critic: Shape | None
    max_prompt: int
    max_answer: int
    responses: int
    chat_micro: int
    settings: tuple[str, ...]
    rounds: int
    seconds: float
    group: int = 8
    max_num_seqs: int | str = "auto"


@dataclass(frozen=True)
class Setting:
    """Which prompts are answered, and how long the answers are; None: as long as they may be."""

    numbers: tuple[int, ...]
    lengths: tuple[int, ...] | None


@dataclass(frozen=True)
class PpoTask:
    """What both contenders are given.

    Attributes:
        directory: of the files below, and for what a contender writes.
        size: of the task.
        prompts: token ids, in the order of ``prompts.jsonl``.
        settings: by name.
        dtype: of the bases. threads: of a CPU.
    """

    directory: str
    size: IterationSize
    prompts: list[list[int]]
    settings: dict[str, Setting]
    dtype: str
    threads: int

    def path(self, name: str) -> str:
        """Of ``actor``, ``critic``, ``sft``, ``reward`` or ``prompts.jsonl``."""
        return str(Path(self.directory) / name)


def write_task(
    directory: Path, size: IterationSize, *, dtype: str, threads: int, device: torch.device
) -> PpoTask:
    """Draw everything, the weights on ``device``, and write it to an empty directory."""
    generator = np.random.default_rng(SEED)
    scale = size.max_prompt / QUANTILES_PROMPT
    prompts = [
        min(size.max_prompt, draw_length(QUANTILES["shared"], scale, generator))
        for _ in range(size.responses)
    ]
    answers = [
        min(size.max_answer, draw_length(QUANTILES["rejected"], scale, generator))
        for _ in range(size.responses)
    ]
    everything = prompts + [size.max_prompt] * size.responses
    if size.settings == (FULL,):
        everything = everything[size.responses :]
    ids = [generator.integers(FIRST_WORD, size.actor.vocab_size, n).tolist() for n in everything]
    rows = [json.dumps({"prompt": " ".join(map(_word, each))}) for each in ids]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    tokenizer = word_tokenizer(size.actor.vocab_size)
    for role, adapter in (("actor", "sft"), ("critic", "reward")):
        base, shape = directory / role, getattr(size, role)
        if shape is None:
            continue
        _write_base(base, shape, dtype=DTYPES[dtype], device=device)
        tokenizer.save_pretrained(base)
        _write_adapter(directory / adapter, base, size.actor.lora_dim, scores=adapter == "reward")
        tokenizer.save_pretrained(directory / adapter)
    first = tuple(range(size.responses))
    settings = {
        REAL: Setting(first, None),
        ENDING: Setting(first, tuple(answers)),
        FULL: Setting(tuple(range(len(ids) - size.responses, len(ids))), None),
    }
    return PpoTask(str(directory), size, ids, settings, dtype, threads)


def _word(token: int) -> str:
    return f"w{token}"


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A token for each word, so that prompts have the lengths they are meant to have."""
    special = {"</s>": EOS_ID, "<pad>": PAD_ID, "<unk>": UNK_ID}
    words = {_word(token): token for token in range(FIRST_WORD, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(special | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def _write_base(path: Path, shape: Shape, *, dtype: torch.dtype, device: torch.device) -> None:
    config = model_config(shape)
    config.eos_token_id, config.bos_token_id, config.pad_token_id = EOS_ID, None, PAD_ID
    model = load_causal_lm("random", config, ModelConfig(), dtype=dtype, meta=True)
    draw_weights_(model, device)
    _suppress_special_(model)
    model.save_pretrained(path)


@torch.no_grad()
def _suppress_special_(model: PreTrainedModel) -> None:
    """Make logits of special tokens far below any other; without biases, as any other."""
    last = getattr(model.get_decoder(), "final_layer_norm", None)
    if last is None:
        return
    # What a norm of weights 1 gives sums to that of its biases.
    embedding = model.get_input_embeddings().weight
    embedding[:FIRST_WORD] = -1.0
    last.bias.fill_(-LOGIT_OF_SPECIAL / embedding.shape[1])


def _write_adapter(path: Path, base: Path, lora_dim: int, *, scores: bool) -> None:
    """Factors as training leaves them: none of them zeros."""
    options = ModelConfig()
    config = load_config(str(base), options)
    common: dict[str, Any] = {"dtype": torch.float32, "meta": True}
    lora = LoraConfig(lora_dim=lora_dim, lora_alpha=ALPHA)
    if scores:
        config.pad_token_id = PAD_ID
        model = load_reward_model(str(base), config, options, seed=SEED, **common)
        lora = replace(lora, modules_to_save=(HEAD,))
    else:
        model = load_causal_lm(str(base), config, options, **common)
    apply_lora(model, lora, seed=SEED)
    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name, parameter in adapter_parameters(model).items():
        # A head's scores are about 1.
        std = 0.02 if ".lora_" in name else (parameter.shape[1] + 1) ** -0.5
        tensors[name] = torch.empty(parameter.shape).normal_(std=std, generator=generator)
    write_adapter(
        path,
        tensors,
        lora,
        layout=adapter_layout(model),
        base_model_name_or_path=str(base),
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
    )
