"""Players of a rollout, and how they draw the actor's turns."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Protocol

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.data.samples import PromptSample
from dschat_lora.engine.distributed import first_of_model
from dschat_lora.rl.response.response import Beside, DecodedTurn, Response

Key = tuple[int | str, ...]


class AskedTurn(NamedTuple):
    """A turn of the actor that is asked for."""

    ids: tuple[int, ...]  # that it follows
    seed: int
    limit: int | None = None  # of its tokens; None: as sampling says
    # The sequence that it goes on with, and how many of its tokens were computed before.
    sequence: int | str = -1
    known: int = 0
    group: int = 0  # whose equal turns are read once


@dataclass
class Draw:
    """Draws turns of the actor, all that are asked for at once; call as often on every rank.

    Args:
        decode: called as a decoder is; what it returns waits for what was drawn.
        key: of the rollout's random numbers, of which each turn of a response has its own.
        num_generations: responses to a prompt.
        max_tokens: of a response.
        keep_logprobs: whether they are kept.
        is_end: whether a token ends a turn.
        find_end: after how many tokens the text of a turn ends, if it does.
        asks_once: whether the first of the processes that hold one model between them asks.
    """

    decode: Callable[..., Callable[[], list[DecodedTurn]]]
    key: Key
    num_generations: int
    max_tokens: int
    keep_logprobs: bool
    is_end: Callable[[int], bool]
    find_end: Callable[[Sequence[int]], int | None]
    asks_once: bool = False
    _num_turns: dict[int, int] = field(default_factory=dict)  # by place
    # What was drawn last, by sequence: the decoder's row, and all tokens.
    _drawn: dict[int | str, tuple[int, list[int]]] = field(default_factory=dict)

    def __call__(
        self, responses: Sequence[Response], limits: Sequence[int] | None = None
    ) -> list[Response]:
        """The responses with a further turn of the actor each, of at most so many tokens.

        Those without room for a token stay as they are.
        """
        return self.begin(responses, limits)()

    def begin(
        self, responses: Sequence[Response], limits: Sequence[int] | None = None
    ) -> Callable[[], list[Response]]:
        """The same, once what is returned is called; drawing goes on meanwhile."""
        open_ones = {n: r for n, r in enumerate(responses) if len(r.tokens) < self.max_tokens}
        asked = []
        for n, each in open_ones.items():
            place, copy = each.origin.place, each.origin.place % self.num_generations
            turn = self._num_turns[place] = self._num_turns.get(place, 0) + 1
            own = (place // self.num_generations, copy, *(("turn", turn) if turn > 1 else ()))
            limit = self.max_tokens - len(each.tokens) if each.tokens else None
            if limits is not None:
                limit = min(limits[n], self.max_tokens - len(each.tokens))
            # All but the last token that the actor chose.
            known = len(each.prompt) + each.last_chosen if each.last_chosen >= 0 else 0
            ids, seed = (*each.prompt, *each.tokens), stream_seed(*self.key, *own)
            asked.append(AskedTurn(ids, seed, limit, place, known, each.group))
        wait = self.ask(asked)

        def drawn() -> list[Response]:
            turns = wait()
            whole = dict(enumerate(responses))
            for (n, each), turn in zip(open_ones.items(), turns, strict=True):
                whole[n] = each.with_turn(turn.cut(self.is_end, self.find_end))
            return [*whole.values()]

        return drawn

    def ask(self, asked: Sequence[AskedTurn]) -> Callable[[], list[DecodedTurn]]:
        """What waits for the turns as they are decoded.

        Turns of a group with equal tokens before them are read once, where each comes as often.
        """
        if self.asks_once:
            shared: list[Any] = first_of_model([*asked])
            asked = [AskedTurn(tuple(ids), *more) for ids, *more in shared]
        places: dict[Any, list[int]] = {}
        for n, each in enumerate(asked):
            places.setdefault((each.group, each.ids, each.limit), []).append(n)
        prefixes = [each for each in map(self._prefix, asked) if each is not None]
        if len({len(own) for own in places.values()}) > 1 or prefixes:
            places = {n: [n] for n in range(len(asked))}
        first = [asked[own[0]] for own in places.values()]
        order = [*chain.from_iterable(places.values())]
        options: dict[str, Any] = {"keep_logprobs": self.keep_logprobs}
        if any(each.limit is not None for each in first):
            limits = (each.limit for each in first)
            options["limits"] = [self.max_tokens if n is None else n for n in limits]
        if prefixes and len(prefixes) == len(first):
            options["prefixes"] = prefixes
        wait = self.decode(
            [list(each.ids) for each in first],
            seeds=[[asked[n].seed for n in own] for own in places.values()],
            **options,
        )

        def drawn() -> list[DecodedTurn]:
            turns = dict(zip(order, wait(), strict=True))
            self._drawn = {
                asked[n].sequence: (row, [*asked[n].ids, *turns[n].tokens])
                for row, n in enumerate(order)
            }
            return [turns[n] for n in range(len(asked))]

        return drawn

    def _prefix(self, turn: AskedTurn) -> tuple[int, int] | None:
        """The row that was drawn last and how many of its tokens the turn goes on with."""
        row, before = self._drawn.get(turn.sequence, (0, list[int]()))
        known = turn.known
        # The last token of the sequence was not computed.
        if 0 < known < len(before) and [*turn.ids[:known]] == before[:known]:
            return row, known
        return None


class AsksForColumns(Protocol):
    """What may ask for columns of the data."""

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse data without them.

        Raises:
            ValueError: naming both.
        """


class Player(Protocol):
    """Makes the responses of a rollout; a class that names it has all but :meth:`play`.

    Attributes:
        several_turns: whether turns follow each other, so that what was computed of the ones
            before is kept.
        in_batches: whether no more than a batch is played at a time, whatever draws the turns.
    """

    several_turns: ClassVar[bool] = True
    in_batches: ClassVar[bool] = False

    @property
    def reward_name(self) -> str | None:
        """The name of the reward that it gives; None if it gives none."""
        return None

    @property
    def beside(self) -> Beside | None:
        """What reward functions see beside each response of this process."""
        return None

    @property
    def asks(self) -> Sequence[AsksForColumns]:
        """What may ask for columns of the data."""
        return ()

    def begin(
        self, prompts: Sequence[PromptSample], mine: Iterable[int], num_generations: int, key: Key
    ) -> list[PromptSample]:
        """The prompts of a rollout, of which this process plays ``mine``; on every rank."""
        return list(prompts)

    def play(self, tasks: Sequence[Response], draw: Draw, *, key: Key) -> list[Response]:
        """The responses of this rank, by turns that ``draw`` gives; call on every rank.

        ``tasks`` are responses of which nothing is drawn, all those to each of some prompts.
        """

    def checked(self, responses: list[Response]) -> list[Response]:
        """All ranks' responses; those of which nothing can be learnt are refused."""
        return responses


class OneTurn(Player):
    """Draws a single turn for each response."""

    several_turns = False

    def play(self, tasks: Sequence[Response], draw: Draw, *, key: Key) -> list[Response]:
        """The responses, each of a turn."""
        return draw(tasks)
