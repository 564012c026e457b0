"""Scores of given answers by a reward model."""

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.media import media_reader
from dschat_lora.data.records import TextRecord
from dschat_lora.data.samples import SequenceSample
from dschat_lora.data.tokenize import TokenRule, tokenize
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.models.architecture_checks import check_architecture
from dschat_lora.models.build import as_trained, bits_of, build_reward_model
from dschat_lora.models.loading import PreTrainedModel, load_tokenizer
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.models.source import find_model
from dschat_lora.report.terminal import note
from dschat_lora.supervised.inference import check_measured


class LoadedRewardModel:
    """A reward model on this machine's device.

    Args:
        config: says which one, and how it is loaded.
        batch_size: sequences scored at a time.
        max_seq_len: longest sequence that gets a score; 0: as the model has positions.
        bases: models that are loaded already, by their path; one that fits lends its weights.
        verb: config with options of add-ons, by which it takes inputs beside text.

    Attributes:
        media: what reads these; None where it takes none, and records with any are refused.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch_size: int = 16,
        max_seq_len: int = 0,
        bases: Mapping[str, PreTrainedModel] = MappingProxyType({}),
        verb: object = None,
    ) -> None:
        here = device()
        source = find_model(config.model_name_or_path)
        self.tokenizer = load_tokenizer(source.tokenizer, config)
        base = bases.get(source.base) if source.adapter is not None else None
        bits = as_trained(config, source).base_bits or 16
        adapted = build_reward_model(
            source,
            self.tokenizer,
            config,
            LoraConfig(),
            dtype=DTYPES[resolve_dtype(config.dtype)],
            seed=0,
            meta=False,
            new_head=False,
            base=base if base is not None and bits_of(base) == bits else None,
        )
        if adapted.warning is not None:
            note(f"warning: {adapted.warning}")
        self._network = RewardModel(adapted.model).to(here).eval()
        self.media = media_reader(verb, self.tokenizer, source.base) if verb is not None else None
        self._batch_size = batch_size
        self._collate = SampleCollator(int(self.tokenizer.pad_token_id))
        limit = getattr(adapted.model.config, "max_position_embeddings", None)
        self.max_seq_len = max_seq_len or limit or sys.maxsize
        report = check_architecture(
            self._network.backbone, vocab_size=len(self.tokenizer), device=device()
        )
        self._network.backbone.own_mask |= not report.packing_is_exact

    @torch.no_grad()
    def scores(self, records: Sequence[TextRecord]) -> list[float | None]:
        """The score of each record's answer at its end; None for those that are too long.

        Raises:
            ValueError: naming a row whose score is not finite.
        """
        if beside := next((record for record in records if record.media), None):
            if self.media is None:
                raise ValueError(f"{beside.location}: the reward model takes text alone")
            self.media.attach(self._network.backbone.model)
        rule = TokenRule(int(self.tokenizer.eos_token_id), self.max_seq_len, "drop", False)
        tokenized = tokenize(records, make_encoder(self.tokenizer), rule)
        results: list[float | None] = [None] * len(records)
        samples = {
            i: t.sample for i, t in enumerate(tokenized) if isinstance(t.sample, SequenceSample)
        }
        order = sorted(samples, key=lambda i: len(samples[i].input_ids))
        for first in range(0, len(order), self._batch_size):
            chunk = order[first : first + self._batch_size]
            batch = self._collate([[samples[i]] for i in chunk]).to(device())
            width = batch.input_ids.shape[1]
            ends = [n * width + len(samples[i].input_ids) - 1 for n, i in enumerate(chunk)]
            scores = self._network(
                batch.input_ids,
                batch.position_ids,
                batch.segment_ids,
                torch.zeros_like(batch.segment_ids),
                torch.tensor(ends, device=device()),
                batch.spans,
            )
            for number, score in zip(chunk, scores.tolist(), strict=True):
                results[number] = score
        check_measured(records, results, "the score")
        return results
