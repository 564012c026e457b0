"""Rollouts: the actor's responses to prompts, the same for any number of processes."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dschat_lora.algos.seeds import permutation, stream_seed
from dschat_lora.data.samples import PromptSample
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.collectives import gather_over_ranks, max_over_ranks
from dschat_lora.engine.distributed import data_rank, data_world_size
from dschat_lora.engine.zero import gathered
from dschat_lora.generation.generate import Decoder, KeepGoing
from dschat_lora.generation.sampling import Sampling
from dschat_lora.models.causal_lm import PreTrainedModel
from dschat_lora.rlhf.batch import Response
from dschat_lora.rlhf.roles import Network

# Share of the free memory that the whole weights may take during generation at ZeRO 3.
GATHER_SHARE = 0.6


@dataclass(frozen=True)
class PromptOrder:
    """Prompts of each iteration: a random order of all of them, epoch after epoch."""

    num_prompts: int
    per_iteration: int
    seed: int

    @property
    def iterations_per_epoch(self) -> int:
        """The last one of an epoch may have fewer prompts."""
        return -(-self.num_prompts // self.per_iteration)

    def size(self, iteration: int) -> int:
        """How many prompts an iteration has."""
        number = iteration % self.iterations_per_epoch
        return min(self.per_iteration, self.num_prompts - number * self.per_iteration)

    def __call__(self, iteration: int) -> list[int]:
        """Numbers of the prompts of an iteration, counted from 0."""
        epoch, number = divmod(iteration, self.iterations_per_epoch)
        order = permutation(self.num_prompts, "prompts", self.seed, epoch)
        first = number * self.per_iteration
        return [int(n) for n in order[first : first + self.per_iteration]]


class Generator:
    """Generates responses with the actor's present weights; call methods on every rank.

    At ZeRO 3 the weights are gathered once for a whole phase if the free memory holds them, else
    layer by layer at every token.
    """

    def __init__(
        self,
        engine: TrainEngine[Network],
        rollout: PreTrainedModel,
        sharded: PreTrainedModel,
        *,
        eos_ids: Collection[int],
        pad_id: int,
        batch_size: int,
        max_length: int = 0,
        keeps_memory: bool = False,
        merged: bool = False,
        find_end: Callable[[Sequence[int]], int | None] = lambda tokens: None,
    ) -> None:
        """Prepare to decode ``batch_size`` responses at a time, of ``max_length`` with the prompt.

        What a GPU needs for that stays in its memory between calls if ``keeps_memory``. With
        ``merged``, adapters are added to copies of the weights.
        ``find_end`` says after how many tokens the text of a response ends, if it does.
        ``rollout`` is the actor's model in modules without the engine's hooks, ``sharded`` in the
        engine's modules, which gather their weights.
        """
        self._engine, self._rollout, self._batch_size = engine, rollout.eval(), batch_size
        self._eos_ids, self._keeps_memory = frozenset(eos_ids), keeps_memory
        self._sharded, self._decoders = sharded, dict[int, Decoder]()
        self._find_end = find_end
        self._make_decoder = partial(
            Decoder,
            eos_ids=eos_ids,
            pad_id=pad_id,
            device=engine.device,
            largest=(batch_size, max_length),
            merged=merged,
        )

    def __call__(
        self,
        prompts: Sequence[PromptSample],
        sampling: Sampling,
        *,
        num_generations: int,
        key: tuple[int | str, ...],
        keep_logprobs: bool = False,
    ) -> list[Response]:
        """``num_generations`` responses to each prompt, prompt after prompt, on every rank.

        The prompts are the same on every rank; each data rank answers a share of them. ``key`` is
        that of the random numbers, of which each response has its own. ``keep_logprobs`` keeps the
        decode loop's log-probabilities, of the policy and of what was drawn from.
        """
        # Prompts of like length are decoded together, and ranks have equal work.
        order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n].input_ids))
        mine = order[data_rank() :: data_world_size()]
        at_a_time = max(1, self._batch_size // num_generations)
        chunks = -(-len(order[:: data_world_size()]) // at_a_time)
        rows: list[list[int]] = []
        drawn: list[list[float]] = []
        with self._weights() as (decoder, keep_going):
            for chunk in range(chunks):
                numbers = mine[chunk * at_a_time : (chunk + 1) * at_a_time]
                responses = decoder(
                    [prompts[n].input_ids.tolist() for n in numbers],
                    sampling,
                    seeds=[
                        [stream_seed("rollout", *key, n, k) for k in range(num_generations)]
                        for n in numbers
                    ],
                    keep_logprobs=keep_logprobs,
                    keep_going=keep_going,
                )
                copies = [n * num_generations + k for n in numbers for k in range(num_generations)]
                texts = responses.tokens()
                rows += [[n, *tokens] for n, tokens in zip(copies, texts, strict=True)]
                if keep_logprobs:
                    pairs = zip(responses.logprobs(), responses.sampler_logprobs(), strict=True)
                    drawn += [own + of_sampler for own, of_sampler in pairs]
                else:
                    drawn += [[] for _ in copies]
        return [
            self._response(prompts[n // num_generations], n // num_generations, tokens, logprobs)
            for n, (tokens, logprobs) in enumerate(self._share(rows, drawn, sampling))
        ]

    def _response(
        self, prompt: PromptSample, group: int, tokens: list[int], logprobs: list[float]
    ) -> Response:
        ended = bool(tokens) and tokens[-1] in self._eos_ids
        ids = tuple(prompt.input_ids.tolist())
        own, of_sampler = logprobs[: len(tokens)], logprobs[len(tokens) :]
        # What was drawn after it changes nothing: a token depends on those before it alone.
        if (end := self._find_end(tokens)) is not None:
            tokens, own, of_sampler, ended = tokens[:end], own[:end], of_sampler[:end], True
        return Response(
            ids, tuple(tokens), ended, group, prompt.columns, tuple(own), tuple(of_sampler)
        )

    def _share(
        self, rows: list[list[int]], drawn: list[list[float]], sampling: Sampling
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and both log-probabilities of all ranks' responses by number, on every rank."""
        # Numbers, tokens and fp32 values are exact in fp64.
        width = sampling.max_new_tokens
        table = torch.full((len(rows), 3 + 3 * width), -1, dtype=torch.float64)
        for index, (row, own) in enumerate(zip(rows, drawn, strict=True)):
            table[index, 0], table[index, 1], table[index, 2] = row[0], len(row) - 1, len(own)
            table[index, 3 : 2 + len(row)] = torch.tensor(row[1:])
            table[index, 3 + width : 3 + width + len(own)] = torch.tensor(own)
        whole = gather_over_ranks(table.to(self._engine.device)).cpu()
        whole = whole[whole[:, 0].argsort()]
        return [
            (row[3 : 3 + int(row[1])].long().tolist(), row[3 + width :][: int(row[2])].tolist())
            for row in whole
        ]

    @contextmanager
    def _weights(self) -> Iterator[tuple[Decoder, KeepGoing | None]]:
        """What to decode with, and where ranks must run as many passes, ``keep_going``."""
        try:
            if self._engine.zero_stage < 3:
                yield self._decoder(self._rollout), None
                return
            parameters: list[Any] = list(self._rollout.parameters())
            if not self._fits(parameters):
                self._engine.eval()
                decoder = self._decoder(self._sharded)
                yield decoder, lambda done: max_over_ranks(float(not done)) > 0
                return
            with gathered(parameters):
                yield self._decoder(self._rollout), None
        finally:
            if not self._keeps_memory:
                self._decoders.clear()

    def _decoder(self, model: PreTrainedModel) -> Decoder:
        if id(model) not in self._decoders:
            self._decoders[id(model)] = self._make_decoder(model)
        return self._decoders[id(model)]

    def _fits(self, parameters: list[Any]) -> bool:
        """Whether the free memory of every rank holds the whole weights."""
        fits = True
        if self._engine.device.type == "cuda":
            here = self._engine.device
            size = sum(p.ds_numel * p.element_size() for p in parameters)
            # Memory that torch has reserved and does not use is free too.
            unused = torch.cuda.memory_reserved(here) - torch.cuda.memory_allocated(here)
            fits = size < GATHER_SHARE * (torch.cuda.mem_get_info(here)[0] + unused)
        return max_over_ranks(float(not fits)) == 0
