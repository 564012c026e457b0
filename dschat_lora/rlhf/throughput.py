"""Time and work of an iteration's phases: generation, scoring, training."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dschat_lora.engine.distributed import world_size
from dschat_lora.lora.parallel import group_of
from dschat_lora.perf.flops import Flops, deepspeed_chat_flops, forward_flops, step_flops
from dschat_lora.perf.memory import cached_token_bytes
from dschat_lora.perf.peak import synchronize
from dschat_lora.perf.shape import ModelShape, describe
from dschat_lora.perf.throughput import StepCounts, peak_memory_bytes
from dschat_lora.rlhf.batch import Response
from dschat_lora.rlhf.roles import Roles

PHASES = ("generation", "scoring", "training")


@dataclass
class Clock:
    """Seconds spent in each phase since the last :meth:`take`; the device is waited for."""

    device: torch.device
    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time as that of a phase."""
        synchronize(self.device)
        start = self.clock()
        yield
        synchronize(self.device)
        self.seconds[name] += self.clock() - start

    def take(self) -> dict[str, float]:
        """The seconds by phase; begins anew."""
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken


@dataclass(frozen=True)
class Work:
    """FLOPs of each phase, and bytes that decoding reads, of all processes."""

    flops: dict[str, Flops]
    decode_bytes: float


class Counter:
    """Counts the work of iterations from the shapes of the roles."""

    def __init__(self, roles: Roles, *, checkpointed: Mapping[str, bool]) -> None:
        """Look at the models, before ZeRO 3 shards them.

        Args:
            roles: of the run.
            checkpointed: whether blocks of each role that may train are recomputed.

        Raises:
            ValueError: for an architecture that is not understood.
        """
        self.shapes = {name: describe(model.model) for name, model in roles.models.items()}
        model: Any = roles.actor.model
        self._checkpointed = {name: checkpointed[name] for name in roles.trained}
        group = group_of(model)
        holders = 1 if group is None else group.size  # each reads what it holds
        self._weight_bytes = holders * sum(p.numel() * p.element_size() for p in model.parameters())
        self._bytes_per_cached_token = cached_token_bytes(model)

    def __call__(
        self,
        responses: Sequence[Response],
        *,
        num_generations: int,
        batch_size: int,
        passes: float,
        extra_forward: bool,
        padded: StepCounts | None,
        text: StepCounts | None = None,
    ) -> Work:
        """Work of one iteration over all processes.

        Args:
            responses: of the iteration.
            num_generations: of each prompt, whose keys and values are computed once.
            batch_size: responses decoded at a time by a model.
            passes: that the update made over them.
            extra_forward: whether actor and critic were asked before the update too.
            padded: positions and pairs that one pass over all responses computes; None where
                padding is not computed.
            text: pretraining text that the actor trained on.
        """
        counts = _counts(responses)
        forward = _arguments(counts, padded)
        scoring = Flops()
        for name, shape in self.shapes.items():
            if extra_forward or name not in self._checkpointed:
                scoring += forward_flops(shape, **forward)
        training = Flops()
        for name, checkpointed in self._checkpointed.items():
            one = step_flops(self.shapes[name], gradient_checkpointing=checkpointed, **forward)
            training += Flops(one.model * passes, one.hardware * passes)
        if text is not None:
            training += step_flops(
                self.shapes["actor"],
                gradient_checkpointing=self._checkpointed["actor"],
                **_arguments(text, None if padded is None else text),
            )
        generation = self._generation(self.shapes["actor"], responses, num_generations)
        flops = {"generation": generation, "scoring": scoring, "training": training}
        return Work(flops, self._decode_bytes(responses, batch_size))

    def _generation(
        self, shape: ModelShape, responses: Sequence[Response], num_generations: int
    ) -> Flops:
        """Each token is computed once; the last one of a response never, a shared prompt once."""
        prompts = [len(each.prompt) for each in responses]
        fed = [len(each) - 1 for each in responses]
        saved = 1 - 1 / num_generations
        one = forward_flops(
            shape,
            num_tokens=sum(fed) - saved * sum(prompts),
            num_attended=sum(map(_pairs, fed)) - saved * sum(map(_pairs, prompts)),
            num_targets=sum(len(each.tokens) for each in responses),
        )
        return one

    def _decode_bytes(self, responses: Sequence[Response], batch_size: int) -> float:
        """Weights once a step, keys and values of what came before once a token."""
        cached = sum(
            len(each.tokens) * len(each.prompt) + _pairs(len(each.tokens)) for each in responses
        )
        ordered = sorted((len(each.tokens) for each in responses), reverse=True)
        steps = sum(ordered[::batch_size])
        return steps * self._weight_bytes + cached * self._bytes_per_cached_token

    def classic_flops(self, responses: Sequence[Response], passes: float) -> float:
        """What DeepSpeed-Chat's formula gives for training and generation, k = 2r/h included."""
        lengths = [len(each) for each in responses]
        if not sum(lengths):
            return 0.0
        length = sum(n**2 for n in lengths) / sum(lengths)
        rows = sum(lengths) / length
        total = 0.0
        for name, checkpointed in self._checkpointed.items():
            total += passes * _classic(
                self.shapes[name], rows, length, self.shapes[name].lora_dim, checkpointed
            )
        return total + _classic(self.shapes["actor"], rows, length, 0, False) / 3


def throughput_metrics(
    seconds: dict[str, float],
    responses: Sequence[Response],
    *,
    work: Work | None,
    classic: float | None,
    peak_tflops: float | None,
    device: torch.device,
) -> dict[str, float | None]:
    """Throughput fields of a train line.

    Args:
        seconds: by phase.
        responses: of the iteration.
        work: None where the architecture is not understood.
        classic: FLOPs by DeepSpeed-Chat's formula, or None.
        peak_tflops: of a device, None where unknown.
        device: of this process.
    """
    step_seconds = max(sum(seconds.values()), 1e-9)
    tokens = sum(map(len, responses))
    generated = sum(len(each.tokens) for each in responses)
    found: dict[str, float | None] = {
        "step_seconds": step_seconds,
        **{f"{name}_seconds": seconds[name] for name in PHASES},
        "tokens_per_second": tokens / step_seconds,
        "samples_per_second": len(responses) / step_seconds,
        "generation_tokens_per_second": generated / max(seconds["generation"], 1e-9),
        "tflops_per_device": None,
        "hardware_tflops_per_device": None,
        "tflops_deepspeed_chat": None,
        "mfu": None,
        "peak_memory_bytes": peak_memory_bytes(device),
    }
    if work is None or classic is None:
        return found
    scale = 1e12 * world_size()
    total = sum(work.flops.values(), Flops())
    found["tflops_per_device"] = total.model / scale / step_seconds
    found["hardware_tflops_per_device"] = total.hardware / scale / step_seconds
    found["tflops_deepspeed_chat"] = classic / scale / step_seconds
    for name in PHASES:
        spent = max(seconds[name], 1e-9)
        found[f"{name}_tflops_per_device"] = work.flops[name].model / scale / spent
    found["generation_bytes_per_second"] = (
        work.decode_bytes / world_size() / max(seconds["generation"], 1e-9)
    )
    if peak_tflops is not None:
        found["mfu"] = total.model / scale / step_seconds / peak_tflops
    return found


def _counts(responses: Sequence[Response]) -> StepCounts:
    lengths = [len(each) for each in responses]
    return StepCounts(
        num_samples=len(responses),
        num_tokens=sum(lengths),
        num_targets=sum(len(each.tokens) for each in responses),
        num_attended=sum(map(_pairs, lengths)),
    )


def _arguments(counts: StepCounts, padded: StepCounts | None) -> dict[str, float]:
    found: dict[str, float] = {
        "num_tokens": counts.num_tokens,
        "num_attended": counts.num_attended,
        "num_targets": counts.num_targets,
    }
    if padded is not None:
        found["num_positions"] = padded.num_positions
        found["num_scored_pairs"] = padded.num_scored_pairs
    return found


def _pairs(size: int) -> int:
    """(query, key) pairs of causal attention."""
    return size * (size + 1) // 2


def _classic(
    shape: ModelShape, rows: float, length: float, lora_dim: int, checkpointed: bool
) -> float:
    return deepspeed_chat_flops(
        batch_size=rows,
        sequence_length=length,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        lora_dim=lora_dim,
        gradient_checkpointing=checkpointed,
    )
