"""What a process computes: adapters in training and samplers, on its bases."""

import json
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from dschat_lora.addons.tinker.adapters import AdamParams, TrainedAdapter, read_saved
from dschat_lora.addons.tinker.bases import Adapting, Base
from dschat_lora.addons.tinker.formats import (
    ForwardBackward,
    adam_params,
    content_of,
    forward_backward,
    sample_request,
    sample_response,
)
from dschat_lora.addons.tinker.processes import Channel, agreed, collective
from dschat_lora.addons.tinker.samplers import Sampler
from dschat_lora.addons.tinker.store import Store
from dschat_lora.addons.tinker.together import Portion, SharedBase
from dschat_lora.engine.distributed import rank, world_size
from dschat_lora.report.terminal import note

# The summed loss, and each example's log-probabilities.
Output = tuple[float, list[Tensor]]
# The body of a request for samples, and what seeds one that has no seed.
SampleBody = tuple[Mapping[str, Any], Sequence[str]]


class Worker:
    """The bases of a process, and the adapters and samplers that it has in memory.

    Each process has one, with the same adapters; a request's examples, and requests for samples,
    are divided among them. Rank 0's is called by the service, the others make the same calls.

    Args:
        bases: by name.
        store: where runs are read from.
        tokens_per_device: most positions of a forward and backward pass.
        zero_stage: 1 divides AdamW's moments among the processes, 2 gradients too.

    Attributes:
        adapters: by run; the one that was used last comes last.
        samplers: by path or base.
    """

    def __init__(
        self,
        bases: Mapping[str, Base],
        store: Store,
        *,
        tokens_per_device: int = 16384,
        zero_stage: int = 0,
    ) -> None:
        self.bases, self.store = bases, store
        self._tokens, self._zero_stage = tokens_per_device, zero_stage
        self.channel = Channel()
        self.adapters: OrderedDict[str, TrainedAdapter] = OrderedDict()
        self.samplers: OrderedDict[str, Sampler] = OrderedDict()
        self._shared: dict[str, SharedBase | None] = {}
        self.passes_of_several = 0  # passes in which several runs had a part

    @collective
    def open(self, run: str, done: int) -> None:
        """Have a run's adapter in memory, as it was after its request ``done``.

        What requests have done since its state was written is done again.
        """

        def read() -> tuple[TrainedAdapter, list[Any]]:
            store, saved = self.store.run(run), -1
            facts = store.facts()
            base, how = self.bases[facts["base_model"]], Adapting(**facts["lora"])
            adapter = TrainedAdapter(
                base,
                base.lora_of(how),
                seed=how.seed,
                tokens_per_device=self._tokens,
                zero_stage=self._zero_stage,
            )
            if store.state_facts() is not None:
                tensors, state = store.state()
                values = {name: tensors.pop(name) for name in adapter.parameters}
                adapter.load(values, tensors, state["steps"])
                saved = state["seq"]
            logged = [each for each in store.logged() if saved < each[0] <= done]
            return adapter, [(store.result(seq), kind, body) for seq, kind, body in logged]

        adapter, requests = agreed(read)
        for request in requests:
            with suppress(ValueError):  # those that failed fail once more
                self._repeat(adapter, *request)
        self.adapters[run] = adapter

    def _repeat(
        self, adapter: TrainedAdapter, result: tuple[str, bytes] | None, kind: str, body: bytes
    ) -> None:
        """Do again what a request has done to the adapter."""
        if result is not None and result[0] == "error":
            if json.loads(result[1])["category"] == "server":
                return  # what it did was undone
            if kind == "optim_step":
                adam_params(content_of(body))
                adapter.drop_gradients()  # they were not finite, or none
        elif kind == "optim_step":
            adapter.step(adam_params(content_of(body)))
        elif kind in ("create_model", "load_weights"):
            content = content_of(body).rest
            if content.get("path") is not None:
                self._load(adapter, content["path"], optimizer=bool(content.get("optimizer")))
        if kind == "forward_backward":
            request = forward_backward(body, adapter.base)
            if not request.forward_only:
                adapter.forward(request.examples, request.loss, backward=True)

    @collective
    def close(self, run: str) -> None:
        """Have a run's adapter on disk alone."""
        self.adapters.pop(run, None)

    @collective
    def forward(self, requests: Sequence[tuple[str, int]]) -> list[Output | ValueError]:
        """What ``forward_backward`` of different runs of a base gives, by run and number.

        Those with a gradient are computed in one pass where the base allows it, and those without.
        """

        def read(run: str, number: int) -> ForwardBackward | ValueError:
            body = self.store.run(run).request(number)
            try:
                return forward_backward(body, self.adapters[run].base)
            except ValueError as error:
                return error

        parsed = agreed(lambda: [read(run, number) for run, number in requests])
        given: dict[int, Output | ValueError] = {}
        for forward_only in (False, True):
            chosen, shares = [], []
            for n, each in enumerate(parsed):
                if isinstance(each, ForwardBackward) and each.forward_only is forward_only:
                    chosen.append(n)
                    shares.append(Portion(self.adapters[requests[n][0]], each.examples, each.loss))
            outputs = self._outputs(shares, backward=not forward_only)
            for n, output in zip(chosen, outputs, strict=True):
                given[n] = output
        errors = {n: each for n, each in enumerate(parsed) if isinstance(each, ValueError)}
        return [(given | errors)[n] for n in range(len(parsed))]

    def _outputs(self, shares: Sequence[Portion], *, backward: bool) -> list[Output | ValueError]:
        if len(shares) > 1 and (shared := self._shared_base(shares[0].adapter.base)) is not None:
            self.passes_of_several += 1
            return shared(shares, backward=backward, tokens_per_device=self._tokens)
        outputs: list[Output | ValueError] = []
        for share in shares:
            try:
                outputs.append(share.adapter.forward(share.examples, share.loss, backward=backward))
            except ValueError as error:
                outputs.append(error)
        return outputs

    def _shared_base(self, base: Base) -> SharedBase | None:
        """What runs of a base share a pass by; None where each takes one of its own."""
        if base.name not in self._shared:
            shared = None
            try:
                shared = agreed(lambda: SharedBase(base))
            except Exception as error:  # noqa: BLE001 - of an architecture that is unlike others
                note(f"runs of {base.name} take turns: {type(error).__name__}: {error}")
            self._shared[base.name] = shared if shared is not None and shared.works else None
        return self._shared[base.name]

    @collective
    def step(self, run: str, params: Mapping[str, float]) -> dict[str, float]:
        """Take a step by :class:`AdamParams`; its figures by name."""
        return self.adapters[run].step(AdamParams(**params))

    @collective
    def load(self, run: str, path: str, optimizer: bool) -> None:
        """Put saved weights into a run's adapter, with AdamW's moments or without."""
        self._load(self.adapters[run], path, optimizer=optimizer)

    def _load(self, adapter: TrainedAdapter, path: str, *, optimizer: bool) -> None:
        def read() -> None:
            saved = read_saved(self.store.place(path))
            moments = saved.moments if optimizer else {}
            adapter.load(saved.values, moments, saved.steps if moments else 0)

        agreed(read)

    @collective
    def moments(self, run: str) -> dict[str, Tensor]:
        """AdamW's moments of a run, as one process has them; on rank 0."""
        own = self.adapters[run].moments()
        if not self._zero_stage or world_size() == 1:
            return own
        parts = self.channel.gather(save({key: value.cpu() for key, value in own.items()}))
        return {} if rank() else {key: each for part in parts for key, each in load(part).items()}

    @collective
    def sample(
        self, base: str, path: str | None, requests: Sequence[SampleBody], most: int
    ) -> list[bytes]:
        """Answers to requests with the same options, as they are sent; ``most`` samplers stay."""
        answers = agreed(lambda: self._answers(base, path, requests[rank() :: world_size()], most))
        if world_size() == 1:
            return answers
        own = json.dumps([b64encode(each).decode() for each in answers])
        parts = [json.loads(each) for each in self.channel.gather(own.encode())]
        return [b64decode(parts[n % len(parts)][n // len(parts)]) for n in range(len(requests))]

    def _answers(
        self, base: str, path: str | None, requests: Sequence[SampleBody], most: int
    ) -> list[bytes]:
        key, chosen = path or base, self.bases[base]
        if key not in self.samplers:
            while len(self.samplers) >= most:
                self.samplers.popitem(last=False)
            saved = None if path is None else read_saved(self.store.place(path))
            self.samplers[key] = (
                Sampler(chosen) if saved is None else Sampler(chosen, saved.lora, saved.values)
            )
        self.samplers.move_to_end(key)
        for other, sampler in self.samplers.items():
            if other != key:
                sampler.release()
        if not requests:  # those of other processes read it too: all have the same samplers
            return []
        parsed = [sample_request(body, chosen, tuple(seed)) for body, seed in requests]
        return [sample_response(each) for each in self.samplers[key](parsed)]

    @collective
    def drop_sampler(self, path: str) -> None:
        """Read a sampler anew when it is asked next: others are at its path."""
        self.samplers.pop(path, None)
