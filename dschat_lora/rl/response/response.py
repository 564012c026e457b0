"""Responses of the actor: from the decoder's tokens, between processes, and as messages."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dschat_lora.data.samples import PromptSample
from dschat_lora.data.tool_calls import parse_answer
from dschat_lora.engine.distributed import gather_over_ranks, gather_texts


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and what follows it, of which some tokens may only be read."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    actor_mask: tuple[bool, ...] = ()  # which of the tokens are the actor's; empty: all

    @property
    def actor_positions(self) -> NDArray[np.int64]:
        """(n,) places of the actor's tokens; nothing predicts the first of all."""
        steps = np.arange(len(self.prompt), len(self.prompt) + len(self.tokens))
        if self.actor_mask:
            steps = steps[np.array(self.actor_mask)]
        return steps[steps > 0]


@dataclass(frozen=True)
class Episode:
    """What a player knows of a response beside its tokens."""

    earlier: bytes = b""  # messages before the last turn, as JSON; empty: there is but one turn
    reward: float | None = None  # that the player gave
    earlier_sequences: tuple[TokenSequence, ...] = ()  # where there are several, beside the last
    num_calls: int = 0  # of the actor, by a program that plays
    num_retries: int = 0  # attempts before this one
    failure: str = ""  # why it does not count; empty: it does
    logged: Mapping[str, float] = field(default_factory=dict)  # beside the reward


@dataclass(frozen=True)
class Origin:
    """Where a response comes from."""

    place: int = 0  # among the responses of its rollout
    source: int = 0  # of the row, of several that metrics tell apart
    is_drawn: bool = True  # by the actor; else it is an answer of the data
    # iterations that the adapter which drew it had learnt from, where it may be an older one
    policy_version: int | None = None


@dataclass(frozen=True)
class Response:
    """A prompt and the actor's response to it, without any tokens until it is drawn.

    A player may have tokens stand between turns of the actor: they are read, and nothing is learnt
    from them. Its response may have several sequences of tokens, such as those of a history that
    was rewritten: ``prompt`` and ``tokens`` are of the one that ended last, and the actor's tokens
    of all count as one response, sequence after sequence.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # up to and including end-of-sequence, if it came
    ended: bool  # whether it did
    group: int  # number of the prompt within the iteration
    columns: bytes = b""  # the row of data, as JSON
    logprobs: tuple[float, ...] = ()  # of the actor's tokens in the decode loop, in nats, if kept
    actor_mask: tuple[bool, ...] = ()  # which of the tokens are the actor's; empty: all
    sampler_logprobs: tuple[float, ...] = ()  # in the distribution they were drawn from
    undrawn: bool = False  # the last token could not be drawn; the response does not count
    # what the reference reads in the place of the prompt; None: the same
    reference_prompt: tuple[int, ...] | None = None
    episode: Episode = Episode()
    origin: Origin = Origin()

    def read(self, tokens: Sequence[int]) -> "Response":
        """The response with tokens behind it that the actor is to read, and does not learn."""
        mask = self.actor_mask or (True,) * len(self.tokens)
        return replace(
            self,
            tokens=(*self.tokens, *tokens),
            actor_mask=(*mask, *(False for _ in tokens)),
            ended=False,
        )

    def with_turn(self, turn: "DecodedTurn") -> "Response":
        """The response with a turn of the actor behind it."""
        mask = self.actor_mask and (*self.actor_mask, *(True for _ in turn.tokens))
        return replace(
            self,
            tokens=(*self.tokens, *turn.tokens),
            ended=turn.ended,
            logprobs=(*self.logprobs, *turn.logprobs),
            actor_mask=mask,
            sampler_logprobs=(*self.sampler_logprobs, *turn.sampler_logprobs),
            undrawn=turn.undrawn,
        )

    def rewarded(self, reward: float | None) -> "Response":
        """The response with a reward of its own; None for one that is not to count."""
        reward = None if reward is None else float(reward)
        return replace(self, episode=replace(self.episode, reward=reward))

    def drawn_by(self, policy_version: int) -> "Response":
        """The response of an adapter that had learnt from so many iterations."""
        return replace(self, origin=replace(self.origin, policy_version=policy_version))

    @property
    def row(self) -> dict[str, Any]:
        """The row of data."""
        row: dict[str, Any] = json.loads(self.columns or b"{}")
        return row

    def __len__(self) -> int:
        return sum(len(each.prompt) + len(each.tokens) for each in self.sequences)

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """All of the response's sequences of tokens; one as a rule."""
        last = TokenSequence(self.prompt, self.tokens, self.actor_mask)
        return (*self.episode.earlier_sequences, last)

    @property
    def is_left_out(self) -> bool:
        """Whether the response does not count, whatever scores it."""
        return self.undrawn or bool(self.episode.failure)

    @property
    def num_actor_tokens(self) -> int:
        """Tokens that the actor chose."""
        return sum(sum(s.actor_mask) if s.actor_mask else len(s.tokens) for s in self.sequences)

    @property
    def num_read_tokens(self) -> int:
        """Tokens after the prompts that the actor did not choose."""
        return sum(len(each.tokens) for each in self.sequences) - self.num_actor_tokens

    @property
    def last_chosen(self) -> int:
        """Place of the last token that the actor chose; -1 if it chose none."""
        own = self.actor_mask or (True,) * len(self.tokens)
        return len(own) - 1 - own[::-1].index(True) if True in own else -1

    @property
    def last_turn(self) -> tuple[int, ...]:
        """The tokens of the actor's last turn."""
        read = self.actor_mask
        return self.tokens[len(read) - read[::-1].index(False) :] if False in read else self.tokens


class Beside(NamedTuple):
    """What a player keeps of each response for reward functions that ask for it."""

    name: str  # of their argument; without its s for a function of one response
    by_place: Mapping[int, Any]  # of this process's responses


class DecodedTurn(NamedTuple):
    """The actor's tokens of a turn, and their log-probabilities in nats where they were kept."""

    tokens: list[int]
    logprobs: list[float]  # of the policy
    sampler_logprobs: list[float]  # in the distribution they were drawn from
    undrawn: bool  # the last token could not be drawn
    ended: bool = False  # by itself

    def cut(
        self, is_end: Callable[[int], bool], find_end: Callable[[Sequence[int]], int | None]
    ) -> "DecodedTurn":
        """The turn up to its end: a token that is one, or as many as ``find_end`` says, if any."""
        # What was drawn after it changes nothing: a token depends on those before it alone.
        end = find_end(self.tokens[: len(self.tokens) - self.undrawn])
        if end is None:
            ended = bool(self.tokens) and not self.undrawn and is_end(self.tokens[-1])
            return self._replace(ended=ended)
        own, drawn = self.logprobs[:end], self.sampler_logprobs[:end]
        return DecodedTurn(self.tokens[:end], own, drawn, undrawn=False, ended=True)


def unanswered(group: int, prompt: PromptSample, place: int = 0) -> Response:
    """The response to a prompt before any of it is drawn."""
    ids, origin = tuple(prompt.input_ids.tolist()), Origin(place, prompt.source)
    return Response(ids, (), False, group, prompt.columns, origin=origin)


def share_responses(
    own: Mapping[int, Response],
    blank: Sequence[Response],
    *,
    width: int,
    device: torch.device,
    as_json: bool,
) -> list[Response]:
    """All ranks' responses by place, from those of this rank; call on every rank.

    A table of numbers is quick, for single turns of at most ``width`` tokens; JSON holds episodes.
    ``blank`` are all of them before they were drawn, of which some may not have been.
    """
    if as_json:
        shares = map(json.loads, gather_texts(responses_as_json(own)))
        of_all = {int(n): fields for share in shares for n, fields in share.items()}
        return [response_from_json(of_all[n], blank[n].columns, n) for n in sorted(of_all)]
    # (n, 4 + 3 width) fp64: numbers, tokens and fp32 values, which are exact in it.
    table = torch.full((len(own), 4 + 3 * width), -1, dtype=torch.float64)
    for row, (number, each) in zip(table, own.items(), strict=True):
        drawn = torch.tensor([each.logprobs, each.sampler_logprobs])
        sizes = [number, len(each.tokens), drawn.shape[1], each.ended - each.undrawn]
        row[:4] = torch.tensor(sizes, dtype=torch.float64)
        row[4 : 4 + len(each.tokens)] = torch.tensor(each.tokens)
        row[4 + width :].view(2, width)[:, : drawn.shape[1]] = drawn
    whole = gather_over_ranks(table.to(device)).cpu()
    return [
        replace(
            blank[int(row[0])],
            tokens=tuple(row[4 : 4 + int(row[1])].long().tolist()),
            ended=bool(row[3] > 0),
            undrawn=bool(row[3] < 0),
            logprobs=tuple(row[4 + width :][: int(row[2])].tolist()),
            sampler_logprobs=tuple(row[4 + 2 * width :][: int(row[2])].tolist()),
        )
        for row in whole[whole[:, 0].argsort()]
    ]


# In the order that checkpoints have.
_NAMES = (
    *("prompt", "tokens", "ended", "group", "columns", "logprobs", "actor_mask", "earlier"),
    *("sampler_logprobs", "undrawn", "reward", "earlier_sequences", "num_calls"),
    *("num_retries", "failure", "logged", "is_drawn", "policy_version", "reference_prompt"),
    "source",
)


def responses_as_json(responses: Mapping[int, Response]) -> str:
    """Responses by number, without their prompts' columns."""
    by_number = {}
    for number, each in responses.items():
        fields = {**vars(each), "columns": b"", **vars(each.episode), **vars(each.origin)}
        fields["earlier_sequences"] = [*map(asdict, each.episode.earlier_sequences)]
        by_number[number] = {name: fields[name] for name in _NAMES}
    return json.dumps(by_number, default=bytes.decode)


def response_from_json(fields: Mapping[str, Any], columns: bytes, place: int = 0) -> Response:
    """A response of :func:`responses_as_json`."""
    more: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}
    earlier, given = more.pop("earlier").encode(), more.pop("earlier_sequences")
    sequences = (TokenSequence(*map(tuple, each.values())) for each in given)
    names = ("num_calls", "num_retries", "failure", "logged")
    (reward,) = (more.pop(n) for n in fields if n.endswith("reward"))  # older ones say whose
    episode = Episode(earlier, reward, tuple(sequences), *(more.pop(n) for n in names))
    origin = Origin(place, *(more.pop(n) for n in ("source", "is_drawn", "policy_version")))
    return Response(**{**more, "columns": columns, "episode": episode, "origin": origin})


def messages_after_prompt(response: Response, decode: Callable[..., str]) -> list[dict[str, Any]]:
    """The actor's turns, and what was said between them.

    A turn with tool calls, and any where the row has ``tools``, is parsed as by TRL; others are
    text as it was drawn. A bare JSON object is no call where the row has no tools.
    """
    turn = response.last_turn
    text, end = decode(list(turn), skip_special_tokens=True), len(turn)
    while end and not decode(list(turn[end - 1 : end]), skip_special_tokens=True):
        end -= 1  # special tokens that end it
    before = (*response.prompt, *response.tokens[: len(response.tokens) - len(turn)])
    in_thought = decode(list(before[-16:])).rstrip().endswith("<think>")
    said = parse_answer(decode(list(turn[:end])), in_thought=in_thought)
    has_tools = response.row.get("tools")
    if not has_tools and ("tool_calls" not in said or text.lstrip().startswith("{")):
        said = {"role": "assistant", "content": text}
    return [*json.loads(response.episode.earlier or b"[]"), said]


def as_messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prompt as messages; a text is one of a user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def prompt_of(row: dict[str, Any], text: str | None) -> Any:
    """The prompt as the row has it, text or messages; ``text`` where it has another shape.

    Of messages with answers it is what the model reads: all before the last answer.
    """
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return prompt
    given = prompt if isinstance(prompt, list) else []
    more = row.get("completion" if given else "messages")
    if not (given or isinstance(more, list)):
        return text
    messages = [*given, *(more if isinstance(more, list) else [])]
    answers = [n for n, each in enumerate(messages) if each.get("role") == "assistant"]
    return messages[: max(len(given), *answers[-1:])] if answers else messages
