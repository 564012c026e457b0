"""Time and work of an iteration's phases: generation, scoring, training."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field

import torch

from dschat_lora.algos.segments import causal_pairs
from dschat_lora.engine.distributed import device, sum_over_ranks, world_size
from dschat_lora.lora.parallel import group_of
from dschat_lora.models.build import AdaptedModel
from dschat_lora.perf.memory import cached_token_bytes
from dschat_lora.perf.shape import describe
from dschat_lora.perf.throughput import (
    Flops,
    StepCounts,
    deepspeed_chat_flops,
    device_peak,
    forward_flops,
    peak_memory_bytes,
    step_flops,
    synchronize,
)
from dschat_lora.rl.learn.experience import Steps
from dschat_lora.rl.response.response import Response

PHASES = ("generation", "scoring", "training")


@dataclass
class PhaseTimer:
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
class PhaseWork:
    """Work of an iteration over all processes."""

    flops: dict[str, Flops]  # by phase
    deepspeed_chat_flops: float  # of generation and training by DeepSpeed-Chat's formula
    decode_bytes: float  # that decoding reads


class FlopCounter:
    """Counts the work of iterations from the shapes of the models, by role."""

    def __init__(
        self,
        models: Mapping[str, AdaptedModel],
        *,
        checkpointed: Mapping[str, bool],
        num_generations: int,
        batch_size: int,
        decodes_here: bool = True,
        compares: bool = False,
    ) -> None:
        """Read the models' shapes, before ZeRO 3 shards them.

        ``checkpointed`` says whether blocks of each role that trains are recomputed. Keys and
        values of a prompt are computed once for its ``num_generations`` responses, of which
        ``batch_size`` are decoded at a time by a model, unless that is done elsewhere. With
        ``compares`` an update runs the reference too.

        Raises:
            ValueError: for an architecture that is not understood.
        """
        self._shapes = {name: describe(model.model) for name, model in models.items()}
        self._checkpointed = checkpointed
        self._num_generations, self._batch_size = num_generations, batch_size
        self._decodes_here, self._compares = decodes_here, compares
        model = models["actor"].model
        group = group_of(model)
        holders = 1 if group is None else group.size  # each reads what it holds
        self._weight_bytes = holders * sum(p.numel() * p.element_size() for p in model.parameters())
        self._bytes_per_cached_token = cached_token_bytes(model)

    def __call__(
        self,
        responses: Sequence[Response],
        *,
        passes: float,
        shares_before: Mapping[str, float],
        counts: StepCounts,
        skips_padding: bool,
        text: StepCounts | None = None,
        learning: Collection[str] = ("actor", "critic"),
    ) -> PhaseWork:
        """Work of one iteration over all processes, whose update made ``passes`` over responses.

        Roles that are not ``learning`` had forward passes alone. Actor and critic had one before
        the update over these shares of the responses. ``counts`` are of all ranks' batches of one
        pass, in which ``skips_padding`` says that padding is not computed, and ``text`` of the
        pretraining text that the actor trained on.
        """
        forward = counts.sizes(skips_padding=skips_padding)
        scoring = training = Flops()
        for name, shape in self._shapes.items():
            share = shares_before[name] if name in self._checkpointed else 1.0
            one = forward_flops(shape, **forward)
            scoring += Flops(one.model * share, one.hardware * share)

        def learnt(role: str, sizes: dict[str, float]) -> Flops:
            checkpointed = self._checkpointed[role]
            return step_flops(self._shapes[role], gradient_checkpointing=checkpointed, **sizes)

        for name in (*self._checkpointed, *(["reference"] if self._compares else [])):
            learns = name in learning
            one = learnt(name, forward) if learns else forward_flops(self._shapes[name], **forward)
            training += Flops(one.model * passes, one.hardware * passes)
        if text is not None:
            training += learnt("actor", text.sizes(skips_padding=skips_padding))
        generation, read = self._decoding(responses) if self._decodes_here else (Flops(), 0.0)
        return PhaseWork(
            {"generation": generation, "scoring": scoring, "training": training},
            self._deepspeed_chat(responses, passes),
            read,
        )

    def _decoding(self, responses: Sequence[Response]) -> tuple[Flops, float]:
        """FLOPs and bytes read: weights once a step, keys and values before it once a token.

        Each token is computed once; the last one of a response never, a shared prompt once.
        """
        sequences = [each for r in responses if r.origin.is_drawn for each in r.sequences]
        prompts, lengths = ([len(getattr(s, n)) for s in sequences] for n in ("prompt", "tokens"))
        fed = [prompt + length - 1 for prompt, length in zip(prompts, lengths, strict=True)]
        saved = 1 - 1 / self._num_generations
        flops = forward_flops(
            self._shapes["actor"],
            num_tokens=sum(fed) - saved * sum(prompts),
            num_attended=sum(map(causal_pairs, fed)) - saved * sum(map(causal_pairs, prompts)),
            num_targets=sum(each.num_actor_tokens for each in responses),
        )
        pairs = zip(prompts, lengths, strict=True)
        cached = sum(prompt * length + causal_pairs(length) for prompt, length in pairs)
        steps = sum(sorted(lengths, reverse=True)[:: self._batch_size])
        return flops, steps * self._weight_bytes + cached * self._bytes_per_cached_token

    def _deepspeed_chat(self, responses: Sequence[Response], passes: float) -> float:
        """FLOPs of training and generation by DeepSpeed-Chat's formula, k = 2r/h included."""
        lengths = [len(each) for each in responses]
        if not sum(lengths):
            return 0.0
        length = sum(n**2 for n in lengths) / sum(lengths)

        def flops(role: str, *, lora_dim: int, checkpointed: bool) -> float:
            return deepspeed_chat_flops(
                self._shapes[role],
                batch_size=sum(lengths) / length,
                sequence_length=length,
                lora_dim=lora_dim,
                gradient_checkpointing=checkpointed,
            )

        training = sum(
            passes * flops(role, lora_dim=self._shapes[role].lora_dim, checkpointed=checkpointed)
            for role, checkpointed in self._checkpointed.items()
        )
        return training + flops("actor", lora_dim=0, checkpointed=False) / 3


class Throughput:
    """Measures each iteration: its phases by ``timer``, its work by ``counter`` (None: unknown)."""

    def __init__(
        self,
        counter: FlopCounter | None,
        *,
        dtype: torch.dtype,
        skips_padding: bool,
        take_text: Callable[[], StepCounts | None],
    ) -> None:
        """Prepare to measure.

        ``dtype`` is that of computations, ``skips_padding`` whether the actor's backbone computes
        no padding, and ``take_text`` gives the counts of pretraining text since its last call.
        """
        self.timer = PhaseTimer(device())
        self._counter, self._take_text, self._skips_padding = counter, take_text, skips_padding
        self._peak_tflops = device_peak(device(), dtype)

    def __call__(
        self,
        responses: Sequence[Response],
        steps: Steps,
        totals: Mapping[str, dict[str, float]],
        *,
        taken: int,
        learning: Collection[str],
    ) -> dict[str, float | None]:
        """Metrics since the last call, in which so many of the ``steps`` were taken; on every rank.

        The ``totals`` ``seconds`` and ``flops`` of the run, by phase, are added to. Roles that are
        not ``learning`` had forward passes alone.
        """
        seconds, work = self.timer.take(), None
        if self._counter is not None:
            own = sum((batch.counts for batch in steps.first_batches), StepCounts())
            work = self._counter(
                responses,
                passes=taken / steps.per_pass,  # the last one may have been cut short
                shares_before=steps.shares_before,
                counts=StepCounts(*map(round, sum_over_ranks(list(astuple(own))))),  # of all ranks
                skips_padding=self._skips_padding,
                text=self._take_text(),
                learning=learning,
            )
        for name in PHASES:
            totals["seconds"][name] += seconds[name]
            if work is not None:
                totals["flops"][name] += work.flops[name].model
        step_seconds = max(sum(seconds.values()), 1e-9)
        spent = {name: max(seconds[name], 1e-9) for name in PHASES}
        generated = sum(each.num_actor_tokens for each in responses if each.origin.is_drawn)
        of_work = ("tflops_per_device", "hardware_tflops_per_device", "tflops_deepspeed_chat")
        metrics: dict[str, float | None] = {
            "step_seconds": step_seconds,
            **{f"{name}_seconds": seconds[name] for name in PHASES},
            "tokens_per_second": sum(map(len, responses)) / step_seconds,
            "samples_per_second": len(responses) / step_seconds,
            "generation_tokens_per_second": generated / spent["generation"],
            **dict.fromkeys((*of_work, "mfu")),
            "peak_memory_bytes": peak_memory_bytes(device()),
        }
        if work is None:
            return metrics
        scale, total = 1e12 * world_size(), sum(work.flops.values(), Flops())
        flops = (total.model, total.hardware, work.deepspeed_chat_flops)
        metrics |= {n: each / scale / step_seconds for n, each in zip(of_work, flops, strict=True)}
        if self._peak_tflops is not None:
            metrics["mfu"] = total.model / scale / step_seconds / self._peak_tflops
        return metrics | {
            **{f"{n}_tflops_per_device": work.flops[n].model / scale / spent[n] for n in PHASES},
            "generation_bytes_per_second": work.decode_bytes / world_size() / spent["generation"],
        }
