"""Answers to requests of many clients, decoded by one thread in one batch for each base."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from random import Random
from typing import NamedTuple

import torch

from dschat_lora.addons.serving.endpoint.errors import BusyError, StoppedError, UnsupportedError
from dschat_lora.addons.serving.endpoint.requests import AnswerOptions
from dschat_lora.addons.serving.endpoint.sources import Emit, fitting
from dschat_lora.addons.serving.endpoint.text import TextStream
from dschat_lora.addons.serving.endpoint.turns import Finish, Piece
from dschat_lora.addons.serving.grammars import GrammarError
from dschat_lora.addons.serving.models import BaseBatch, ServedModel
from dschat_lora.algos.segments import to_device
from dschat_lora.generation.sampling import (
    NO_TOKEN,
    Sampling,
    keep_top,
    sample_each,
    undrawn_reason,
)

# Tokens, padding included, of prompts that are read between two steps of the running rows.
PROMPT_TOKENS = 8192
STOPPING = "the server is stopping"


class TokenLogprobs(NamedTuple):
    """Log-probabilities in nats of a token and of the most probable ones in its place."""

    chosen: float
    best: tuple[tuple[int, float], ...]


class RunningAnswer:
    """One answer that is decoded; pieces of it are given to ``emit`` on the decoder's thread.

    Attributes:
        left: the client wants no more of it.
    """

    def __init__(
        self, model: ServedModel, prompt: Sequence[int], options: AnswerOptions, emit: Emit
    ) -> None:
        self.model, self.prompt, self.options = model, prompt, options
        self.left = False
        self.sampling = sampling_of(options)
        self._emit = emit
        self._random = Random(options.seed)  # of the system's entropy where there is none
        self._ends = frozenset(options.stop_token_ids)
        if not options.ignore_eos:
            self._ends |= model.end_ids
        self._text = TextStream(model.tokenizer, options.stop, strip=options.strip)
        self._count = 0
        self.last_token = -1
        grammar = options.grammar
        self.grammar = None if grammar is None else model.grammars.start(grammar)
        self.cached = 0  # tokens of the prompt that were not computed again
        self.prompt_logprobs: list[float] = []  # of its tokens but the first, if asked for
        self._new_ids: list[int] = []  # since the last piece
        self._new_logprobs: list[TokenLogprobs] = []

    @property
    def room(self) -> int:
        """Tokens that may follow the next one."""
        return self.options.max_new_tokens - self._count - 1

    def uniform(self) -> float:
        """The next number in (0, 1] to draw a token by."""
        return 1.0 - self._random.random() if self.sampling.do_sample else 1.0

    def push(self, token: int, logprobs: "TokenLogprobs | None" = None) -> bool:
        """Take the next token; returns whether it was the last one.

        Raises:
            GrammarError: if its grammar cannot go on.
        """
        self._count, self.last_token = self._count + 1, token
        self._new_ids.append(token)
        if logprobs is not None:
            self._new_logprobs.append(logprobs)
        is_whole = self.grammar is not None and self.grammar.take(token)
        text = ""
        finish: Finish | None = None
        if token in self._ends:
            finish = "stop"
        else:
            text = self._text.add(token)
            if self._text.stopped or is_whole:
                finish = "stop"
            elif self._count == self.options.max_new_tokens:
                finish = "length"
        if finish is not None:
            text += self._text.finish()
        if text or finish is not None:
            if self._text.stopped:
                finish = "stop"
            self._emit(
                Piece(
                    text,
                    self._count,
                    finish,
                    ids=tuple(self._new_ids),
                    logprobs=tuple(each.chosen for each in self._new_logprobs),
                    top_logprobs=tuple(each.best for each in self._new_logprobs),
                    cached=self.cached,
                    prompt_logprobs=self.prompt_logprobs if finish is not None else [],
                )
            )
            self._new_ids, self._new_logprobs = [], []
        return finish is not None

    def fail(self, reason: object, *, stopped: bool = False) -> None:
        """End it with an error, which is its request's where its grammar cannot be followed."""
        grammar = self.options.grammar
        param = grammar.field if grammar and isinstance(reason, GrammarError) else None
        words = str(reason) if param is None else f"{param}: {reason}"
        self._emit(Piece("", self._count, error=words, stopped=stopped, param=param))


class AnswerDecoder:
    """Decodes answers on a thread of its own, from :meth:`start` until :meth:`close`.

    Args:
        batches: the bases of the models that will be asked.
        max_batch_size: answers of one base at a time.
        max_queue: answers that may wait.

    Attributes:
        failure: why the thread has ended, if it did so by itself.
    """

    def __init__(
        self, batches: Iterable[BaseBatch], *, max_batch_size: int, max_queue: int
    ) -> None:
        self._running: dict[BaseBatch, list[RunningAnswer]] = {batch: [] for batch in batches}
        self._waiting: deque[RunningAnswer] = deque()
        self._leaving = set[BaseBatch]()
        self._max_batch_size, self._max_queue = max_batch_size, max_queue
        self._changed = threading.Condition()
        self.failure: str | None = None
        self._deadline: float | None = None  # of the answers that run when it is closed
        self._thread = threading.Thread(target=self._work, name="decoder", daemon=True)
        self._on_failure: Callable[[], None] = lambda: None

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Start the thread, which calls ``on_failure`` where it cannot go on."""
        self._on_failure = on_failure
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it decodes what is submitted."""
        return self._thread.is_alive() and self._deadline is None

    def submit(
        self, model: ServedModel, prompt: Sequence[int], options: AnswerOptions, emit: Emit
    ) -> RunningAnswer:
        """Have a prompt of tokens answered.

        Raises:
            TooLongError: if the model has no room for it and its answer.
            UnsupportedError: if it cannot follow its grammar, or the model is removed.
            BusyError: if too many wait.
            StoppedError: after :meth:`close`.
        """
        answer = RunningAnswer(model, prompt, fitting(model, prompt, options), emit)
        with self._changed:
            if not self.is_alive:
                raise StoppedError(self.failure or STOPPING)
            if model.batch not in self._running or model.batch in self._leaving:
                raise UnsupportedError(f"{model.name} was unloaded", "model")
            # Those that have left make room when the next token comes.
            running = sum(not other.left for other in self._running[model.batch])
            waiting = sum(not other.left for other in self._waiting)
            if waiting >= self._max_queue + max(0, self._max_batch_size - running):
                raise BusyError(f"{waiting} requests are waiting; try again later")
            self._waiting.append(answer)
            self._changed.notify()
        return answer

    def add(self, batch: BaseBatch) -> None:
        """Decode for further models."""
        with self._changed:
            self._running[batch] = []

    def remove(self, batch: BaseBatch) -> None:
        """Decode no more for the models of :meth:`add` once their answers have ended."""
        with self._changed:
            self._leaving.add(batch)
            self._changed.notify()

    @property
    def load(self) -> tuple[int, int]:
        """Number of answers that run, and that wait."""
        return sum(map(len, self._running.values())), len(self._waiting)

    def leave(self, answer: RunningAnswer) -> None:
        """Stop decoding an answer that nobody reads; nothing more of it is emitted."""
        answer.left = True

    def close(self, patience: float = 0.0) -> None:
        """Refuse new requests and those that wait; end running ones after ``patience`` seconds."""
        with self._changed:
            self._deadline = min(self._deadline or float("inf"), time.monotonic() + patience)
            self._changed.notify()

    def join(self) -> None:
        """Wait for the end after :meth:`close`."""
        self._thread.join()

    def _work(self) -> None:
        try:
            self._decode()
        except BaseException as error:  # noqa: BLE001 - nobody waits for a thread's exceptions
            self.failure = f"decoding ended: {_in_short(error)}"
        with self._changed:
            self._deadline = time.monotonic()
        self._end(self._taken_from_queue(), self.failure or STOPPING, stopped=True)
        for running in self._running.values():
            self._end(running, self.failure or "the server was stopped", stopped=True)
        if self.failure is not None:
            self._on_failure()

    def _decode(self) -> None:
        with torch.inference_mode(), ExitStack() as stack:
            kernels: dict[BaseBatch, ExitStack] = {}
            while self._has_work():
                for batch, running in list(self._running.items()):
                    if batch not in kernels:
                        kernels[batch] = stack.enter_context(ExitStack())
                        kernels[batch].enter_context(batch.rows.kernels())
                    if batch in self._leaving and self._is_left(batch):
                        kernels.pop(batch).close()
                        continue
                    try:
                        self._advance(batch, running)
                    except Exception as error:  # noqa: BLE001 - ends this batch, not the others
                        batch.rows.clear()
                        self._end(running, f"the model failed: {_in_short(error)}")

    def _is_left(self, batch: BaseBatch) -> bool:
        """Forget a batch of which no answer runs or waits."""
        with self._changed:
            if self._running[batch] or any(a.model.batch is batch for a in self._waiting):
                return False
            self._leaving.remove(batch)
            del self._running[batch]
            return True

    def _has_work(self) -> bool:
        """Wait for something to do; False after the end."""
        with self._changed:
            while not (self._waiting or any(self._running.values()) or self._leaving):
                if self._deadline is not None:
                    return False
                self._changed.wait()
            if self._deadline is None:
                return True
        self._end(self._taken_from_queue(), STOPPING, stopped=True)
        return any(self._running.values()) and time.monotonic() < self._deadline

    def _taken_from_queue(self) -> list[RunningAnswer]:
        with self._changed:
            answers = list(self._waiting)
            self._waiting.clear()
        return answers

    def _end(self, answers: list[RunningAnswer], reason: str, *, stopped: bool = False) -> None:
        for answer in answers:
            if not answer.left:
                answer.fail(reason, stopped=stopped)
        answers.clear()

    def _advance(self, batch: BaseBatch, running: list[RunningAnswer]) -> None:
        """One token for each running answer, after new ones have joined."""
        self._drop(batch, running, [answer.left for answer in running])
        joining = self._joining(batch, len(running))
        if joining:
            for answer in joining:
                if answer.options.prompt_logprobs:
                    scores = batch.rows.prompt_logprobs(answer.prompt, answer.model.adapter)
                    answer.prompt_logprobs = scores
            running += joining
            prompts = [answer.prompt for answer in joining]
            logits, cached = batch.rows.join(prompts, [a.model.adapter for a in joining])
            for answer, tokens in zip(joining, cached, strict=True):
                answer.cached = tokens
            first = len(running) - len(joining)
            ended = [False] * first + _push(joining, logits)
            self._drop(batch, running, ended)
        if running:
            logits = batch.rows.step([answer.last_token for answer in running])
            self._drop(batch, running, _push(running, logits))

    def _joining(self, batch: BaseBatch, running: int) -> list[RunningAnswer]:
        """Take the answers from the queue that can join a batch."""
        joining: list[RunningAnswer] = []
        with self._changed:
            longest = 0
            for answer in list(self._waiting):
                if answer.left:
                    self._waiting.remove(answer)
                elif answer.model.batch is batch:
                    longest = max(longest, len(answer.prompt))
                    if joining and longest * (len(joining) + 1) > PROMPT_TOKENS:
                        break
                    if running + len(joining) == self._max_batch_size:
                        break
                    joining.append(answer)
                    self._waiting.remove(answer)
        return joining

    def _drop(self, batch: BaseBatch, running: list[RunningAnswer], ended: Sequence[bool]) -> None:
        """Drop rows; as in the batch, the last one takes the place of each."""
        for row in reversed(range(len(running))):
            if ended[row]:
                batch.rows.leave(row)
                running[row] = running[-1]
                running.pop()


def sampling_of(options: AnswerOptions) -> Sampling:
    """Options of sampling; those of answers that differ in length alone are equal."""
    if options.temperature == 0:
        return Sampling(1, do_sample=False)
    return Sampling(1, temperature=options.temperature, top_p=options.top_p, top_k=options.top_k)


def _push(answers: Sequence[RunningAnswer], logits: torch.Tensor) -> list[bool]:
    """Choose the next token of each answer by (B, V) logits; returns which ended with it."""
    failed = dict[int, object]()
    allowed = _allowed(answers, logits, failed)
    tokens = sample_each(
        allowed, [answer.sampling for answer in answers], [answer.uniform() for answer in answers]
    )
    logprobs = _logprobs(answers, logits, tokens)
    ended = []
    for row, (answer, token) in enumerate(zip(answers, tokens, strict=True)):
        if token == NO_TOKEN:
            failed.setdefault(row, undrawn_reason(answer.model.batch.broken_weights))
        try:
            ended.append(row in failed or answer.push(token, logprobs.get(row)))
        except GrammarError as error:
            failed[row] = error
            ended.append(True)
        if row in failed:
            answer.fail(failed[row])
    return ended


def _allowed(
    answers: Sequence[RunningAnswer], logits: torch.Tensor, failed: dict[int, object]
) -> torch.Tensor:
    """(B, V) logits, -inf where a grammar excludes a token.

    Rows whose grammar allows none are kept as they are, and noted in ``failed``.
    """
    grammars = {row: a.grammar for row, a in enumerate(answers) if a.grammar is not None}
    if not grammars:
        return logits
    masks = torch.ones(logits.shape, dtype=torch.bool)
    for row, grammar in grammars.items():
        try:
            masks[row] = grammar.allowed(logits.shape[1])
        except GrammarError as error:
            failed[row] = error
    return logits.masked_fill(~to_device(masks, logits.device), -torch.inf)


def _logprobs(
    answers: Sequence[RunningAnswer], logits: torch.Tensor, tokens: Sequence[int]
) -> dict[int, TokenLogprobs]:
    """Log-probabilities of the rows that ask for them, by row.

    They are the model's own: at temperature 1, before a grammar, top-k and top-p; of those that ask
    for processed ones at their temperature, after top-k and top-p.
    """
    counts = {row: n for row, a in enumerate(answers) if (n := a.options.logprobs) is not None}
    if not counts:
        return {}
    rows = [*counts]
    table = logits[to_device(torch.tensor(rows), logits.device)].float()
    for at, row in enumerate(rows):
        sampling = answers[row].sampling
        if answers[row].options.processed_logprobs and sampling.do_sample:
            table[at] = keep_top(table[at : at + 1] / sampling.temperature, sampling)[0]
    table = table.log_softmax(-1)
    own = to_device(torch.tensor([max(0, tokens[row]) for row in rows]), logits.device)
    chosen = table.gather(1, own[:, None])[:, 0].tolist()
    best = table.topk(min(max(counts.values()), table.shape[1]), sorted=True)
    values, ids = best.values.tolist(), best.indices.tolist()
    by_row = {}
    for at, (row, count) in enumerate(counts.items()):
        top = zip(ids[at][:count], values[at][:count], strict=True)
        by_row[row] = TokenLogprobs(chosen[at], tuple(top))
    return by_row


def _in_short(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__
