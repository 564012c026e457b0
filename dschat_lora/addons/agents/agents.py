"""Agents: programs that play episodes, and ask the actor over HTTP as often as they like."""

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from dschat_lora.addons.agents import agent_programs
from dschat_lora.addons.agents.addon import TIMED_OUT
from dschat_lora.addons.agents.agent_programs import (
    CALL_NUMBER,
    NoRewardError,
    Program,
    reward_and_metrics,
)
from dschat_lora.addons.agents.conversations import (
    MODEL_NAME,
    OVER,
    AgentEpisode,
    AgentModel,
    Call,
    Conversation,
    PromptTokens,
)
from dschat_lora.addons.serving.endpoint.answers import AnswerResponse, RequestAnswers
from dschat_lora.addons.serving.endpoint.errors import (
    ApiError,
    BusyError,
    StoppedError,
    TooLongError,
    UnsupportedError,
    invalid,
)
from dschat_lora.addons.serving.endpoint.guard import read_json
from dschat_lora.addons.serving.endpoint.http_server import HttpServer, make_app
from dschat_lora.addons.serving.endpoint.requests import AnswerOptions, parsed_request
from dschat_lora.addons.serving.endpoint.sockets import address_of, listen
from dschat_lora.addons.serving.endpoint.sources import Emit, fitting
from dschat_lora.addons.serving.endpoint.text import TextStream
from dschat_lora.addons.serving.endpoint.turns import Kind, Piece, Turn
from dschat_lora.algos.seeds import stream_seed
from dschat_lora.data.messages import Message
from dschat_lora.engine.distributed import data_world_size, max_over_ranks, tensor_rank
from dschat_lora.generation.sampling import undrawn_reason
from dschat_lora.report.terminal import note
from dschat_lora.rl.draw.player import AskedTurn, Draw, Key, Player
from dschat_lora.rl.response.coroutines import start
from dschat_lora.rl.response.errors import UserFunctionError
from dschat_lora.rl.response.response import DecodedTurn, Response

HOST = "127.0.0.1"
# Seconds that a round waits for episodes that neither ask nor end, once another one has asked.
PATIENCE = 5.0
# Seconds without a further call after which all calls of a round are thought to have come.
QUIET = 0.02


class AgentFailedError(UserFunctionError):
    """All episodes of an agent failed; the cause is the first one's error. Raised on every rank."""

    what = "an agent"


@dataclass(frozen=True)
class AgentLimits:
    """What an episode may take."""

    seconds: float  # in which no answer is waited for
    retries: int  # further attempts at an episode that failed
    calls: int  # most answers
    calls_at_a_time: int  # answered, of all episodes


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
        max_new_tokens: int,
        end_of_text: Callable[[Sequence[str], Sequence[int]], int | None],
    ) -> None:
        """Prepare to play.

        ``end_of_text`` says after how many tokens their text has one of the strings that end it,
        and ``max_new_tokens`` bounds an answer.
        """
        self.program, self.to, self.limits = program, to, limits
        self.max_new_tokens, self._end_of_text = max_new_tokens, end_of_text
        self.changed = threading.Condition()
        self.episodes: dict[str, AgentEpisode] = {}  # by secret
        self._server: AgentServer | None = None  # from the first episode on
        self._arrived = 0.0  # when the last call came
        self._first_failed: AgentEpisode | None = None  # of the latest rollout
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
        draw = replace(draw, asks_once=True, keep_logprobs=True)  # programs may ask for them
        self._first_failed = None
        with self.changed:
            current = [
                self._begin(task, (*key, *divmod(task.origin.place, draw.num_generations)))
                for task in (tasks if tensor_rank() == 0 else ())
            ]
        try:
            while max_over_ranks(float(self._goes_on(current))):
                calls = self._round(current)
                with self.changed:
                    conversations = [c.episode.conversations.continued_by(c.prompt) for c in calls]
                turns = draw.ask([*map(_asked, calls, conversations)])()
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
        unknown = ("stop_token_ids", "ignore_eos", "prompt_logprobs")
        asked = [] if options.grammar is None else [options.grammar.field]
        for field in (*asked, *(name for name in unknown if getattr(options, name))):
            raise UnsupportedError(f"{field} is not supported while the actor is trained", field)
        if options.logprobs:
            field = "top_logprobs"
            raise UnsupportedError("the log-probabilities of other tokens are not kept", field)
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
                    f"the episode has used up its {self.limits.calls} answers (--agent_max_calls)"
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

    def _begin(self, blank: Response, key: Key, attempt: int = 0) -> AgentEpisode:
        if self._server is None:
            self._server = AgentServer(self)
        own_key = (*key, "attempt", attempt) if attempt else key
        episode = AgentEpisode(blank, own_key, attempt)
        self.episodes[episode.secret] = episode
        address = f"{self._server.address}/{episode.secret}/v1"
        episode.task = start(self._run(episode, blank.row, address))
        return episode

    async def _run(self, episode: AgentEpisode, row: dict[str, Any], address: str) -> None:
        """Play an episode, on the event loop of programs."""
        failure, caught = "", None
        try:
            try:
                given = await self.program.run(row, address, episode.secret)
            except NoRewardError:
                if episode.posted is None:
                    raise
            if episode.posted is not None:
                given = episode.posted
            episode.reward, episode.logged = reward_and_metrics(given)
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

    def _goes_on(self, current: list[AgentEpisode]) -> bool:
        """Whether an episode is not over yet, those that failed begun again as they may."""
        with self.changed:
            self._retry(current)
            return any(not each.is_over for each in current)

    def _round(self, current: list[AgentEpisode]) -> list[Call]:
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
            calls = [each for own in asking for each in sorted(own.calls, key=Call.order)]
            return calls[: self.limits.calls_at_a_time]

    def _expire(self, current: Sequence[AgentEpisode]) -> float:
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

    def _retry(self, current: list[AgentEpisode]) -> None:
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

    def _answer(
        self,
        calls: Sequence[Call],
        conversations: Sequence[Conversation],
        turns: Sequence[DecodedTurn],
        is_end: Callable[[int], bool],
    ) -> None:
        """Give the answers to the programs, and keep their tokens."""
        with self.changed:
            answers = zip(calls, conversations, turns[: len(calls)], strict=True)
            for call, conversation, decoded in answers:
                episode = call.episode
                if call not in episode.calls:  # its program did not wait
                    conversation.is_asked = False
                    continue
                turn = decoded.cut(is_end, partial(self._end_of_text, call.options.stop))
                conversation.add(call.prompt[len(conversation) :], turn)
                if call.allowed >= episode.most_allowed:
                    episode.most_allowed, episode.ended = call.allowed, turn.ended
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
        stop, tokenizer = call.options.stop, call.model.tokenizer
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


def _asked(call: Call, conversation: Conversation) -> AskedTurn:
    number = conversation.num_answers + 1
    key = (*call.episode.key, *conversation.key)
    seed = stream_seed(*key, *(("turn", number) if number > 1 else ()))
    # All but the last token that the actor chose were computed.
    known, limit = len(conversation) - 1, call.options.max_new_tokens
    return AskedTurn(call.prompt, seed, limit, repr(key), known)


def _where(episode: AgentEpisode) -> str:
    """Why an episode failed, and where in the program."""
    if episode.error is None or episode.error.__traceback__ is None:
        return episode.failure
    frames = traceback.extract_tb(episode.error.__traceback__)
    own = [each for each in frames if "site-packages" not in each.filename] or frames
    frame = own[-1]
    if frame.filename == agent_programs.__file__:  # of a command, or of what it gave
        return episode.failure
    return f"{episode.failure} ({frame.filename}:{frame.lineno})"


class AgentServer:
    """Serves the episodes of :class:`Agents` in a thread, on a free port of this machine alone.

    Attributes:
        address: of the server, without a slash at its end.
    """

    def __init__(self, agents: Agents) -> None:
        """Start to listen."""
        self._agents = agents
        self.temperature, self.top_p, self.top_k = 1.0, 1.0, 0  # which the options of the run say
        self.max_new_tokens = agents.max_new_tokens
        listening = listen(HOST, 0)
        self.address = address_of(listening)
        # A program may think in between.
        self._server = HttpServer(
            make_app(self._routes(), host=HOST, token=None), backlog=4096, timeout_keep_alive=3600
        )
        serve = partial(self._server.run, sockets=[listening])
        self._thread = threading.Thread(target=serve, name="agents", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait for the end of open connections for a moment."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(5)

    def _routes(self) -> list[Route]:
        base = "/{episode}/v1"
        return [
            Route(f"{base}/chat/completions", partial(self._answer, kind="chat"), methods=["POST"]),
            Route(f"{base}/completions", partial(self._answer, kind="text"), methods=["POST"]),
            Route(f"{base}/models", self._models),
            Route("/{episode}/reward", self._reward, methods=["POST"]),
        ]

    def _episode(self, request: Request) -> AgentEpisode:
        episode = self._agents.episodes.get(request.path_params["episode"])
        if episode is None or episode.is_over:
            raise ApiError(404, OVER, code="episode_over")
        return episode

    async def _answer(self, request: Request, kind: Kind) -> AnswerResponse:
        number = request.headers.get(CALL_NUMBER, "")
        order = int(number) if number.isdecimal() and len(number) < 20 else 0
        model = AgentModel(self._episode(request), self._agents.to, order)
        body = await read_json(request)
        if isinstance(body, dict):
            body["model"] = MODEL_NAME  # whatever a program calls it
            # A program may ask for more than this model has room for.
            for name in ("max_tokens", "max_completion_tokens"):
                if isinstance(body.get(name), int) and body[name] > model.limit:
                    body[name] = model.limit
        asked = await parsed_request(body, kind, {MODEL_NAME: model}, self, self._agents.changed)
        return AnswerResponse(RequestAnswers(asked, self._agents), kind)

    async def _models(self, request: Request) -> JSONResponse:
        self._episode(request)
        entry = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "dschat_lora"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def _reward(self, request: Request) -> JSONResponse:
        episode, body = self._episode(request), await read_json(request)
        try:
            reward_and_metrics(body)
        except ValueError as error:
            raise invalid(str(error)) from error
        episode.posted = body
        return JSONResponse({}, status_code=201)
