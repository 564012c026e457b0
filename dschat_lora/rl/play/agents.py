"""Episodes of agents: programs that ask the actor over HTTP as often as they like."""

import concurrent.futures
import hashlib
import json
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.data.messages import Message
from dschat_lora.endpoint.answers import (
    BusyError,
    Emit,
    StoppedError,
    TooLongError,
    UnsupportedError,
    fitting,
)
from dschat_lora.endpoint.requests import AnswerOptions
from dschat_lora.endpoint.text import TextStream
from dschat_lora.endpoint.turns import Piece, Turn
from dschat_lora.engine.distributed import (
    data_world_size,
    max_over_ranks,
    tensor_rank,
)
from dschat_lora.generation.sampling import undrawn_reason
from dschat_lora.report.terminal import note
from dschat_lora.rl.draw.player import AskedTurn, Draw, Key, Player
from dschat_lora.rl.play import agent_programs
from dschat_lora.rl.play.agent_programs import (
    MODEL_NAME,
    NoRewardError,
    Program,
    reward_and_metrics,
)
from dschat_lora.rl.play.conversations import Conversation, Conversations, PromptTokens
from dschat_lora.rl.response.coroutines import start
from dschat_lora.rl.response.errors import UserFunctionError
from dschat_lora.rl.response.response import (
    TIMED_OUT,
    DecodedTurn,
    Response,
    as_messages,
    prompt_of,
)

# Seconds that a round waits for episodes that neither ask nor end, once another one has asked.
PATIENCE = 5.0
# Seconds without a further call after which all calls of a round are thought to have come.
QUIET = 0.02
OVER = "the episode is over"


class AgentFailedError(UserFunctionError):
    """All episodes of an agent failed; the cause is the first one's error. Raised on every rank."""

    what = "an agent"


class Server(Protocol):
    """What programs ask, in threads of its own.

    Attributes:
        address: of the server, without a slash at its end.
    """

    address: str

    def close(self) -> None:
        """Stop."""


@dataclass(frozen=True)
class AgentLimits:
    """What an episode may take."""

    seconds: float  # in which no answer is waited for
    retries: int  # further attempts at an episode that failed
    calls: int  # most answers
    calls_at_a_time: int  # answered, of all episodes


class Episode:
    """An attempt at an episode: its program, its calls and what has become of it.

    Attributes:
        calls: those that wait for an answer.
        is_over: whether the program has ended, in whatever way.
        ended: whether the last answer ended by itself, of those that were allowed the most tokens:
            a short ``max_tokens`` of a request beside others cuts off no episode.
    """

    def __init__(self, blank: Response, key: Key, attempt: int) -> None:
        self.blank, self.key, self.attempt = blank, key, attempt
        self.secret = secrets.token_hex(16)
        self.conversations = Conversations(blank.prompt)
        self.calls: list[Call] = []
        self.num_calls = 0
        self.posted: Any = None  # a reward that came by POST
        self.refusal = ""  # why the last call that was refused was
        self.reward: float | None = None
        self.logged: dict[str, float] = {}
        self.error: BaseException | None = None
        self.failure = ""
        self.undrawn = self.is_over = self.is_slow = self.ended = False
        self._most_allowed = 0
        self.task: concurrent.futures.Future[Any] | None = None
        self._spent, self._since = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        """In which the program did not wait for an answer."""
        return self._spent + (0.0 if self.calls else time.monotonic() - self._since)

    @property
    def answered(self) -> list[Conversation]:
        """Conversations that had an answer."""
        return [each for each in self.conversations.all if each.num_answers]

    def ask(self, call: "Call") -> None:
        """Take a call, which waits for its answer from here on."""
        self._spent = self.seconds
        self.calls.append(call)
        self.num_calls += 1
        self.is_slow = False

    def answer(self, call: "Call", *, ended: bool) -> None:
        """Take note of whether the answer to a call ended by itself."""
        if call.allowed >= self._most_allowed:
            self._most_allowed, self.ended = call.allowed, ended

    def drop(self, call: "Call") -> None:
        """Let go of a call that has its answer, or that nobody waits for."""
        if call in self.calls:
            self.calls.remove(call)
            if not self.calls:
                self._since = time.monotonic()

    def end(self, failure: str = "", error: BaseException | None = None) -> None:
        """Take no further calls; those that wait are refused."""
        if self.is_over:
            return
        self.is_over, self.failure, self.error = True, failure, error
        for call in self.calls:
            call.emit(Piece("", 0, error=OVER, stopped=True))
        self.calls.clear()
        if self.task is not None:
            self.task.cancel()

    def response(self) -> Response:
        """The episode as a response; one that failed has no tokens."""
        episode = replace(
            self.blank.episode,
            num_calls=self.num_calls,
            num_retries=self.attempt,
            failure=self.failure,
        )
        if self.failure:
            return replace(self.blank, undrawn=self.undrawn, episode=episode)
        *earlier, last = self.answered
        before = self._before(last)
        return replace(
            self.blank,
            prompt=last.prompt,
            tokens=tuple(last.tokens),
            actor_mask=tuple(last.actor_mask),
            ended=self.ended,
            logprobs=tuple(x for each in (*earlier, last) for x in each.logprobs),
            sampler_logprobs=tuple(x for each in (*earlier, last) for x in each.sampler_logprobs),
            undrawn=self.undrawn,
            episode=replace(
                episode,
                earlier=json.dumps(before, ensure_ascii=False).encode() if before else b"",
                reward=self.reward,
                earlier_sequences=tuple(each.sequence for each in earlier),
                logged=self.logged,
            ),
        )

    def _before(self, last: Conversation) -> list[Message]:
        """Messages before the last answer, without the prompt of the row."""
        asked = [{n: v for n, v in m.items() if v is not None} for m in last.messages]
        own = as_messages(prompt_of(self.blank.row, None) or [])
        return asked[len(own) :] if asked[: len(own)] == own else asked


@dataclass(eq=False)
class Call:
    """A request of an episode for an answer."""

    episode: Episode
    model: "AgentModel"
    prompt: tuple[int, ...]
    options: AnswerOptions
    allowed: int  # tokens of the answer, were there any room
    emit: Emit

    @property
    def order(self) -> tuple[int, str]:
        """Of calls that came together, in whatever order they were received."""
        return self.model.number, hashlib.sha256(repr(self.prompt).encode()).hexdigest()


@dataclass(frozen=True)
class AgentModel:
    """The actor as a request of one episode sees it."""

    episode: Episode
    to: PromptTokens
    number: int = 0  # by which calls that came together are put in order
    name: str = MODEL_NAME
    asked: list[tuple[Sequence[Message], Mapping[str, Any]]] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """Most tokens of prompt and answer."""
        return self.to.limit

    @property
    def vocabulary_size(self) -> int:
        """Tokens are below it."""
        return self.to.vocabulary_size

    @property
    def tokenizer(self) -> Any:
        """Of the actor."""
        return self.to.tokenizer

    def prompt_ids(self, prompt: str) -> list[int]:
        """Tokens of a prompt as a text."""
        return self.to.encoder.encode([prompt])[0]

    def chat_ids(self, messages: Sequence[Message], columns: Mapping[str, Any]) -> list[int]:
        """Tokens of messages, of earlier answers those that were drawn.

        Raises:
            ValueError: if the chat template refuses them.
        """
        self.asked.append((messages, columns))
        return self.episode.conversations.prompt_ids(messages, columns, self.to)


class Agents(Player):
    """Plays episodes of programs that ask the actor by OpenAI's interface.

    Calls are answered in rounds, those of all episodes at once: a round begins when every episode
    asks or has ended, or after :data:`PATIENCE` seconds without those that do neither.

    Attributes:
        changed: held by whoever uses episodes or the tokenizer.
    """

    in_batches = True

    def __init__(
        self,
        program: Program,
        to: PromptTokens,
        limits: AgentLimits,
        *,
        serve: Callable[["Agents"], Server],
        max_new_tokens: int,
        end_of_text: Callable[[Sequence[str], Sequence[int]], int | None],
    ) -> None:
        """Prepare to play.

        ``serve`` starts the server, when the first episode begins. ``end_of_text`` says after how
        many tokens their text has one of the strings that end it, and ``max_new_tokens`` bounds an
        answer.
        """
        self.program, self.to, self.limits = program, to, limits
        self.max_new_tokens, self._end_of_text = max_new_tokens, end_of_text
        self._serve, self.changed = serve, threading.Condition()
        self.episodes: dict[str, Episode] = {}  # by secret
        self._server: Server | None = None
        self._arrived = 0.0  # when the last call came
        self._first_failed: Episode | None = None  # of the latest rollout
        self._has_noted = False

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
            self._server = None

    @property
    def reward_name(self) -> str:
        """The program's."""
        return self.program.label

    @property
    def asks(self) -> Sequence[Program]:
        """The program."""
        return (self.program,)

    def play(self, tasks: Sequence[Response], draw: Draw, *, key: Key) -> list[Response]:
        """Episodes of this process's rows; call on every rank.

        Processes that hold one model between them play once, and the others return nothing.
        """
        own = tasks if tensor_rank() == 0 else ()
        draw = replace(draw, asks_once=True, keep_logprobs=True)  # programs may ask for them
        self._first_failed = None
        with self.changed:
            current = [
                self._begin(task, (*key, *divmod(task.origin.place, draw.num_generations)))
                for task in own
            ]
        try:
            while max_over_ranks(float(self._goes_on(current))):
                calls = self._round(current)
                with self.changed:
                    conversations = [c.episode.conversations.continued_by(c.prompt) for c in calls]
                turns, _ = draw.ask([*map(self._asked, calls, conversations)])()
                self._answer(calls, conversations, turns, draw.is_end)
        finally:
            with self.changed:
                for each in current:
                    each.end(OVER)
                    self.episodes.pop(each.secret, None)
        return [each.response() for each in current]

    def checked(self, responses: list[Response]) -> list[Response]:
        """The responses, of which one episode at least was played to its end.

        Raises:
            AgentFailedError: whose cause is the first error.
        """
        if all(each.episode.failure for each in responses):
            reason = f"{self.program.option}: {responses[0].episode.failure}"
            first = self._first_failed
            raise AgentFailedError from (first and first.error) or RuntimeError(reason)
        return responses

    # Called by the server's threads.

    def submit(
        self, model: AgentModel, prompt: Sequence[int], options: AnswerOptions, emit: Emit
    ) -> Call:
        """Have a prompt answered at the next round.

        Raises:
            TooLongError: if the model has no room for it.
            UnsupportedError: for what would change the distribution that tokens are drawn from.
            BusyError: if the episode has had its calls.
            StoppedError: if it is over.
        """
        if options.grammar is not None:
            field = options.grammar.field
            raise UnsupportedError(f"{field} is not followed while the actor is trained", field)
        for field in ("stop_token_ids", "ignore_eos", "prompt_logprobs"):
            if getattr(options, field):
                raise UnsupportedError(f"{field} is not followed while the actor is trained", field)
        if options.logprobs:
            field = "top_logprobs"
            raise UnsupportedError("no other tokens' log-probabilities are kept", field)
        most = min(options.max_new_tokens, self.max_new_tokens)
        try:
            options = fitting(model, prompt, replace(options, max_new_tokens=most, cut=True))
        except TooLongError as error:
            model.episode.refusal = str(error)
            raise
        call = Call(model.episode, model, tuple(prompt), options, most, emit)
        with self.changed:
            episode = model.episode
            if episode.is_over:
                raise StoppedError(OVER)
            if episode.num_calls == self.limits.calls:
                raise BusyError(
                    f"the episode has had its {self.limits.calls} answers (--agent_max_calls)"
                )
            episode.ask(call)
            self._arrived = time.monotonic()
            self.changed.notify()
        return call

    def leave(self, call: Call) -> None:
        """Forget a call whose client has gone."""
        with self.changed:
            call.episode.drop(call)

    # Called by the thread that trains.

    def _begin(self, blank: Response, key: Key, attempt: int = 0) -> Episode:
        if self._server is None:
            self._server = self._serve(self)
        own_key = (*key, "attempt", attempt) if attempt else key
        episode = Episode(blank, own_key, attempt)
        self.episodes[episode.secret] = episode
        address = f"{self._server.address}/{episode.secret}/v1"
        episode.task = start(self._run(episode, blank.row, address))
        return episode

    async def _run(self, episode: Episode, row: dict[str, Any], address: str) -> None:
        """Play an episode, on the event loop of programs."""
        failure, caught = "", None
        try:
            try:
                found = await self.program.run(row, address, episode.secret)
            except NoRewardError:
                if episode.posted is None:
                    raise
            if episode.posted is not None:
                found = episode.posted
            episode.reward, episode.logged = reward_and_metrics(found)
            if not episode.answered:
                failure = episode.refusal or "it asked nothing"
        except BaseException as error:
            if episode.is_over:  # cancelled for that
                raise
            words = " ".join(str(error).split())
            failure, caught = f"{type(error).__name__}: {words:.400}", error
        with self.changed:
            episode.end(failure, caught)
            self.changed.notify()

    def _goes_on(self, current: list[Episode]) -> bool:
        """Whether an episode is not over yet, those that failed begun again as they may."""
        with self.changed:
            self._retry(current)
            return any(not each.is_over for each in current)

    def _round(self, current: list[Episode]) -> list[Call]:
        """The calls to answer next; waits for the programs.

        Episodes that failed are begun again in ``current`` as long as they may. Other ranks are
        not kept waiting by one on which nobody asks.
        """
        with self.changed:
            start, began = time.monotonic(), None
            while True:
                wait = self._expire(current)
                self._retry(current)
                live = [each for each in current if not each.is_over]
                if not live:
                    return []
                asking = [each for each in live if each.calls]
                if asking:
                    now = time.monotonic()
                    began = began or now
                    absent = [each for each in live if not each.calls and not each.is_slow]
                    patience = began + PATIENCE if absent else self._arrived + QUIET
                    if now >= patience:
                        for each in absent:
                            each.is_slow = True
                        break
                    wait = min(wait, patience - now)
                elif data_world_size() > 1:
                    if (rest := start + PATIENCE - time.monotonic()) <= 0:
                        return []
                    wait = min(wait, rest)
                self.changed.wait(wait)
            calls = [
                call for each in asking for call in sorted(each.calls, key=attrgetter("order"))
            ]
            return calls[: self.limits.calls_at_a_time]

    def _expire(self, current: Sequence[Episode]) -> float:
        """End episodes whose time is over; seconds until the next one's is."""
        left = [60.0]
        for each in current:
            if each.is_over or each.calls:
                continue
            if (rest := self.limits.seconds - each.seconds) > 0:
                left.append(rest)
            else:
                each.end(f"{TIMED_OUT} after {self.limits.seconds:g} seconds (--agent_timeout)")
        return min(left)

    def _retry(self, current: list[Episode]) -> None:
        for number, each in enumerate(current):
            if not (each.is_over and each.failure) or each.secret not in self.episodes:
                continue
            del self.episodes[each.secret]
            if self._first_failed is None:
                self._first_failed = each
                if not self._has_noted:
                    row, copy = each.key[-2:]  # the first to fail is no retry
                    note(
                        f"an episode of {self.program.option} failed (prompt {row} of the batch, "
                        f"copy {copy}): {_where(each)}"
                    )
                self._has_noted = True
            if each.attempt < self.limits.retries:
                key = each.key[:-2] if each.attempt else each.key
                current[number] = self._begin(each.blank, key, each.attempt + 1)

    def _asked(self, call: Call, conversation: Conversation) -> AskedTurn:
        number = conversation.num_answers + 1
        key = (*call.episode.key, *conversation.key)
        seed = stream_seed(*key, *(("turn", number) if number > 1 else ()))
        # All but the last token that the actor chose were computed.
        known, limit = len(conversation) - 1, call.options.max_new_tokens
        return AskedTurn(call.prompt, seed, limit, repr(key), known)

    def _answer(
        self,
        calls: Sequence[Call],
        conversations: Sequence[Conversation],
        found: Sequence[DecodedTurn],
        is_end: Callable[[int], bool],
    ) -> None:
        """Give the answers to the programs, and keep their tokens."""
        with self.changed:
            answers = zip(calls, conversations, found[: len(calls)], strict=True)
            for call, conversation, decoded in answers:
                episode = call.episode
                if call not in episode.calls:  # its program did not wait
                    conversation.is_asked = False
                    continue
                turn = decoded.cut(is_end, partial(self._end_of_text, call.options.stop))
                conversation.add(call.prompt[len(conversation) :], turn)
                episode.answer(call, ended=turn.ended)
                messages, columns = call.model.asked[-1] if call.model.asked else ((), {})
                piece, answer = self._piece(call, turn, columns)
                episode.conversations.answered(conversation, messages, columns, answer)
                if turn.undrawn:
                    episode.undrawn = True
                    piece = Piece("", len(turn.tokens), error=undrawn_reason(()))
                episode.drop(call)
                call.emit(piece)

    def _piece(
        self, call: Call, turn: DecodedTurn, columns: Mapping[str, Any]
    ) -> tuple[Piece, Message]:
        """The whole answer to a call, and the message that it is."""
        stop, tokenizer = call.options.stop, self.to.tokenizer
        stream = TextStream(tokenizer, stop, strip=call.options.strip)
        text = "".join([*map(stream.add, turn.tokens), stream.finish()])
        piece = Piece(
            text,
            len(turn.tokens),
            "stop" if turn.ended else "length",
            ids=tuple(turn.tokens),
            logprobs=tuple(turn.logprobs),
        )
        said = Turn(tokenizer, "chat", reads_calls=bool(columns.get("tools")), stop=stop).add(piece)
        return piece, {"role": "assistant", "content": said.text, "tool_calls": said.calls}


def _where(episode: Episode) -> str:
    """Why an episode failed, and where in the program."""
    if episode.error is None or episode.error.__traceback__ is None:
        return episode.failure
    frames = traceback.extract_tb(episode.error.__traceback__)
    own = [each for each in frames if "site-packages" not in each.filename] or frames
    frame = own[-1]
    if frame.filename == agent_programs.__file__:  # of a command, or of what it gave
        return episode.failure
    return f"{episode.failure} ({frame.filename}:{frame.lineno})"
