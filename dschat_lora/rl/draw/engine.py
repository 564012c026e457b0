"""The seam of rollout engines: what they are asked, what they draw, and how that is read."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import gather_texts
from dschat_lora.generation.sampling import Sampling
from dschat_lora.models.build import AdaptedModel
from dschat_lora.models.loading import PreTrainedModel
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.engines import EngineError, are_logprobs, engine_object
from dschat_lora.rl.options.names import called
from dschat_lora.rl.response.errors import FullWhileDecodingError, UserFunctionError
from dschat_lora.rl.response.response import DecodedTurn
from dschat_lora.runtime.memory import MemoryPlan
from dschat_lora.runtime.run import OpenRun

ResultT = TypeVar("ResultT")
Pending = Callable[[], ResultT]  # what is on its way; a call waits for it
Begin = Callable[..., Pending[list[DecodedTurn]]]  # called as a decoder is; see Drawing.decoding


class RolloutError(UserFunctionError):
    """Responses could not be drawn; the cause says why. Raised on every rank."""

    what = "--rollout_engine"


class NotFiniteError(ValueError):
    """The adapter cannot be handed over, as it is not finite. Raised on every rank."""


class Asked(NamedTuple):
    """A response that an engine is asked for."""

    prompt: list[int]
    seed: int  # in [0, 2^63), of the response's random numbers; the same for any processes
    limit: int  # most tokens, its end included
    ends: frozenset[int]  # tokens that end it; what is drawn after one is left out
    group: int  # number of the prompt in the call; responses to one prompt follow one another
    keeps_logprobs: bool  # whether log-probabilities are read


class Drawn(NamedTuple):
    """A response that an engine has drawn."""

    tokens: Sequence[int]  # its end included
    # in nats, in the distribution that the tokens were drawn from; None: they are not known
    logprobs: Sequence[float] | None = None


class RolloutEngine(Protocol):
    """What ``--rollout_engine`` names, of which :meth:`draw` alone has to be there.

    A class is called without arguments. What it says of itself are attributes, with the defaults
    of :class:`~dschat_lora.rl.options.engines.EngineFacts`.
    """

    def check(self, config: RlhfConfig) -> None:
        """Refuse options that the engine does not take, by a ValueError."""

    def bytes_beside_training(self, config: RlhfConfig) -> int:
        """Bytes of a device that it takes while the actor trains."""

    def publish(self, actor: AdaptedModel, version: int) -> None:
        """Take the weights, once they have learnt from ``version`` iterations; on every rank."""

    def draw(self, asked: Sequence[Asked], sampling: Sampling) -> Pending[Sequence[Drawn]]:
        """Begin on this rank's responses; what is returned gives them, in order."""

    def pause(self) -> None:
        """All responses are drawn, until the weights have changed; on every rank."""

    def close(self) -> None:
        """Free what the engine holds outside this process; on any rank."""


@dataclass(frozen=True)
class EngineSite:
    """What an engine is made of."""

    config: RlhfConfig
    run: OpenRun[RlhfConfig]
    base: str  # directory or hub name
    actor: AdaptedModel
    trained: TrainEngine[Any]  # of the actor
    rollout: PreTrainedModel  # the actor's model in modules without the engine's hooks
    sharded: PreTrainedModel  # in the engine's modules, which gather their weights
    ends: frozenset[int]  # tokens that end a response
    pad_id: int
    plan: MemoryPlan | None  # of the run; None for an architecture that is not understood
    unpacked: bool | None  # 4-bit weights once for a rollout; None: as the free memory allows
    started: object = None  # before models took memory
    version: Callable[[], int] = lambda: 0  # iterations that the actor has learnt from


class Drawing(Protocol):
    """An engine as rollouts use it: our own, or an :class:`EngineDecoder` of another.

    Attributes:
        keeps: whether anything is kept in memory for the next rollout.
        released: whether what was kept had to go.
    """

    keeps: bool = False
    released: bool = False

    def decoding(self) -> AbstractContextManager[tuple[Begin, int | None]]:
        """A context of what begins on turns, and of how many at a time; None: all of them.

        Call on every rank. Called as a :class:`~dschat_lora.generation.generate.Decoder` is, it
        gives what waits for a :class:`DecodedTurn` of each seed.
        """

    def release(self) -> None:
        """Free what is kept, from here on after every rollout."""
        return

    def make_room(self) -> None:
        """Free what is kept where it leaves less memory than an update takes."""
        return

    def broken_weights(self) -> list[str]:
        """Names of the actor's weights on this rank that are not finite."""
        return []


def make_engine(site: EngineSite) -> Drawing:
    """The engine that ``--rollout_engine`` names, closed when the run is."""
    facts = site.config.batch.engine
    if facts.make:
        made: Drawing = called(facts.make)(site)
        return made
    return EngineDecoder(engine_object(facts.own, is_taken=True), site)


class EngineDecoder(Drawing):
    """Calls a :class:`RolloutEngine` as our own decoder is called, and checks what it draws.

    Engines see to their memory themselves; what they cannot draw is an error of theirs.
    """

    def __init__(self, engine: object, site: EngineSite) -> None:
        self.engine, self._site = cast(RolloutEngine, engine), site
        batch = site.config.batch
        self._where = f"--rollout_engine {batch.rollout_engine}"
        self._at_a_time = None if batch.engine.batches_itself else batch.rows_decoded
        # A tokenizer may have fewer tokens than the model has logits.
        self._vocab_size = int(site.actor.model.config.vocab_size)
        if hasattr(engine, "close"):
            site.run.closing.callback(engine.close)

    @contextmanager
    def decoding(self) -> Iterator[tuple[Begin, int | None]]:
        """Within, :meth:`begin` by the present weights; call on every rank.

        Raises:
            RolloutError: if the engine does not take them.
        """
        try:
            self._told("publish", self._site.actor, self._site.version())
            yield self.begin, self._at_a_time
            self._told("pause")
        except torch.OutOfMemoryError as error:
            raise FullWhileDecodingError(str(error)) from error

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[Sequence[int]],
        limits: Sequence[int] | None = None,
        prefixes: Sequence[tuple[int, int]] | None = None,
        keep_logprobs: bool = False,
    ) -> Pending[list[DecodedTurn]]:
        """Begin on as many responses to each prompt as it has seeds, prompt after prompt.

        They are drawn by the weights of the latest :meth:`decoding`; engines find prefixes by
        themselves. What is returned waits for them, is called on every rank, and raises a
        RolloutError if the engine fails, or draws what is no response.
        """
        most, ends = sampling.max_new_tokens, self._site.ends
        bounds = [most] * len(prompts) if limits is None else [min(most, n) for n in limits]
        asked = [
            Asked(list(prompt), seed % 2**63, bound, ends, group, keep_logprobs)
            for group, (prompt, own, bound) in enumerate(zip(prompts, seeds, bounds, strict=True))
            for seed in own
        ]
        pending, failure = _tried(partial(self.engine.draw, asked, sampling))

        def responses() -> list[DecodedTurn]:
            turns, later = list[DecodedTurn](), failure
            if failure is None:
                turns, later = _tried(partial(self._checked, pending, asked, sampling))
            self._raise_together(later)
            return turns

        return responses

    def _checked(
        self,
        pending: Pending[Sequence[Drawn]] | Sequence[Drawn],
        asked: Sequence[Asked],
        sampling: Sampling,
    ) -> list[DecodedTurn]:
        """What was drawn, cut at its ends.

        Log-probabilities are NaN where they are not known: of the policy, where the tokens were
        drawn from another distribution, or of what an engine gives none.

        Raises:
            EngineError: if it is not what was asked for.
        """
        drawn_rows = pending() if callable(pending) else pending
        if len(drawn_rows) != len(asked):
            raise EngineError(
                f"{self._where} returned a wrong number of responses: {len(drawn_rows)} instead of "
                f"{len(asked)}"
            )
        turns = []
        for row, (tokens, logprobs) in zip(asked, drawn_rows, strict=True):
            own = [int(token) for token in tokens]
            known = None
            if row.keeps_logprobs and logprobs is not None:
                known = [float(value) for value in logprobs]
            fault = self._fault(row, own, known)
            if logprobs is None and self._site.config.ppo.use_rollout_logprobs:
                fault = "returned no log-probabilities: --use_rollout_logprobs needs them"
            if not own:
                fault = fault or "returned a response without tokens"
            if fault:
                raise EngineError(f"{self._where} {fault}")
            stop = next((n for n, token in enumerate(own, 1) if token in row.ends), None)
            unknown = [math.nan] * len(own[:stop] if row.keeps_logprobs else ())
            drawn = unknown if known is None else known[:stop]
            of_policy = drawn if sampling.draws_from_policy else unknown
            turns.append(DecodedTurn(own[:stop], of_policy, drawn, undrawn=False))
        return turns

    def _fault(self, row: Asked, tokens: list[int], logprobs: list[float] | None) -> str:
        """What is wrong with a response; empty where nothing is."""
        if len(tokens) > row.limit:
            return f"returned more tokens ({len(tokens)}) than the limit of {row.limit}"
        if strange := [token for token in tokens if not 0 <= token < self._vocab_size]:
            return (
                f"returned the token {strange[0]}, but the actor's vocabulary has "
                f"{self._vocab_size}"
            )
        if logprobs is None or (len(logprobs) == len(tokens) and are_logprobs(logprobs)):
            return ""
        return (
            f"gave log-probabilities that are not one in nats for each token ({len(logprobs)} for "
            f"{len(tokens)}): leave them out (None), or give those of the distribution that was "
            "drawn from"
        )

    def _told(self, method: str, *values: object) -> None:
        """Call a method, if the engine has it; on every rank."""
        if (call := getattr(self.engine, method, None)) is not None:
            self._raise_together(_tried(partial(call, *values))[1])

    def _raise_together(self, failure: Exception | None) -> None:
        """Raise a :class:`RolloutError` of the first rank that has a failure; on every rank."""
        is_plain = isinstance(failure, EngineError)
        own = (str(failure) if is_plain else f"{self._where} failed: {failure!r}", is_plain)
        texts = gather_texts(json.dumps(None if failure is None else own))
        for words, is_plain in filter(None, map(json.loads, texts)):
            # A user's own error is shown with its place.
            cause: Exception = OSError(words) if is_plain else RuntimeError(words)
            cause.__cause__ = failure
            raise RolloutError from cause


def _tried(do: Callable[[], ResultT]) -> tuple[Any, Exception | None]:
    """What ``do`` returns, and what it raised, to be told on every rank."""
    try:
        return do(), None
    except (torch.OutOfMemoryError, NotFiniteError, RolloutError):
        raise  # on every rank, or of this device
    except Exception as error:  # noqa: BLE001 - raised on every rank
        return None, error
