"""Training the bundled model on the bundled data, as the parts about numbers do it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from dschat_lora.assets import BUNDLED_DATA
from dschat_lora.config.groups import LoraConfig, ModelConfig, OptimConfig
from dschat_lora.data.batch import Batch, SampleCollator
from dschat_lora.data.chat import Chat
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.loader import StepLoader
from dschat_lora.data.packing import make_rows
from dschat_lora.data.readers import iter_file
from dschat_lora.data.records import to_records
from dschat_lora.data.rows import parse_row
from dschat_lora.data.samples import SequenceSample
from dschat_lora.data.tokenize import TokenRule, tokenize
from dschat_lora.engine.build import DTYPES, EngineSettings, TrainEngine
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.rates import parameter_groups
from dschat_lora.models.build import AdaptedModel, build_causal_lm
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.models.loading import load_tokenizer
from dschat_lora.models.source import ModelSource, find_model

SEED = 1234
MODEL = ModelConfig()
LORA = LoraConfig(lora_dim=16)


@dataclass(frozen=True)
class DataSize:
    """How much of the data a step takes."""

    num_samples: int
    max_seq_len: int
    rows_per_step: int


FULL = DataSize(num_samples=2000, max_seq_len=256, rows_per_step=16)
TINY = DataSize(num_samples=300, max_seq_len=64, rows_per_step=2)


class Bundled:
    """The bundled tokenizer and packed samples, and engines over fresh adapted models."""

    def __init__(self, *, tiny: bool, rows_per_step: int | None = None) -> None:
        disable_progress_bar()
        size = TINY if tiny else FULL
        self.size = replace(size, rows_per_step=rows_per_step or size.rows_per_step)
        self.source = find_model(None)
        self.tokenizer = load_tokenizer(self.source.base, MODEL)
        self.samples = _samples(self.tokenizer, self.size)

    def windows(self, steps: int, *, share: int = 0, shares: int = 1) -> Iterator[list[Batch]]:
        """The micro-batches of the first ``steps`` optimizer steps, the same at every call.

        Or one share of them, of as many as there are processes that see other data.
        """
        lengths = np.array([len(sample.input_ids) for sample in self.samples])
        rows = make_rows(lengths, max_seq_len=self.size.max_seq_len, packing=True, seed=SEED)
        loader = StepLoader(
            self.samples,
            rows=rows,
            micro_batch_size=self.size.rows_per_step // 2 // shares,
            gradient_accumulation_steps=2,
            rank=share,
            world_size=shares,
            seed=SEED,
            collate=SampleCollator(int(self.tokenizer.pad_token_id)),
        )
        return islice((window for epoch in count() for window in loader.epoch(epoch)), steps)

    def build(
        self, dtype: str, source: ModelSource | None = None, group: TensorGroup | None = None
    ) -> AdaptedModel:
        """The bundled base with a new adapter, or with the one that ``source`` names.

        ``group`` are the ranks that hold it between them, None for each by itself.
        """
        return build_causal_lm(
            source or self.source,
            self.tokenizer,
            MODEL,
            LORA,
            dtype=DTYPES[dtype],
            seed=SEED,
            meta=False,
            group=group,
        )


def make_engine(
    model: PreTrainedModel,
    *,
    dtype: str,
    zero_stage: int,
    rows: int,
    accumulation_steps: int,
    network: nn.Module | None = None,
    rate: float | None = None,
    offload: bool = False,
) -> TrainEngine:
    """An engine with the stages' defaults over a transformers model with adapters.

    ``network`` computes what is trained on; by default the loss of the next token.
    """
    optim = OptimConfig(lora_learning_rate=rate)
    settings = EngineSettings(
        dtype=dtype,
        zero_stage=zero_stage,
        offload=offload,
        micro_batch_size=rows,
        accumulation_steps=accumulation_steps,
        max_grad_norm=optim.max_grad_norm,
        betas=(optim.adam_beta1, optim.adam_beta2),
        epsilon=optim.adam_epsilon,
        deepspeed_json={},
    )
    return TrainEngine(network or CausalLMLoss(model), parameter_groups(model, optim), settings)


def _samples(tokenizer: PreTrainedTokenizerBase, size: DataSize) -> list[SequenceSample]:
    eos_id = int(tokenizer.eos_token_id)
    chat = Chat(tokenizer, tokenizer.convert_ids_to_tokens(eos_id))
    rows = islice(iter_file(BUNDLED_DATA["train"]), size.num_samples)
    records = [each for row in rows for each in to_records(parse_row(row), chat)]
    rule = TokenRule(eos_id, size.max_seq_len, "drop", train_on_prompt=False)
    tokenized = tokenize(records, make_encoder(tokenizer), rule)
    return [result.sample for result in tokenized if result.sample is not None]
