"""A teacher behind a server, which gives log-probabilities of a prompt's tokens."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any, cast

from dschat_lora.addons.engines.completion_pool import CompletionPool
from dschat_lora.addons.engines.completions import (
    Body,
    CompletionServer,
    ServerAnswer,
    ServerError,
    are_logprobs,
)
from dschat_lora.engine.distributed import broadcast_string, rank
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.options.engines import EngineError
from dschat_lora.rl.response.errors import UserFunctionError
from dschat_lora.rl.response.response import Response

_OPTION = "--teacher_model_name_or_path"
# Tokenizers of different families cut it at different places.
PROBE = "Let's compare: 1,234.5 tokens\n\n\tnaïve Übergröße 你好 😀 def f(x): return x**2"


class TeacherError(UserFunctionError):
    """A teacher's server does not answer; the cause says why. Raised on every rank."""

    what = _OPTION


def score_body(model: str, prompt: str | Sequence[int]) -> Body:
    """A request for log-probabilities of a prompt; the token that has to be drawn is not used."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }


def read_prompt_logprobs(reply: Any) -> tuple[list[int], list[float]]:
    """Tokens of a prompt but the first, and their log-probabilities in nats.

    Raises:
        ServerError: if the reply has none.
    """
    try:
        (choice,) = reply["choices"]
        _, *entries = choice["prompt_logprobs"]
        scored = [next(iter(entry.items())) for entry in entries]
        tokens = [int(token) for token, _ in scored]
        logprobs = [each["logprob"] for _, each in scored]
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise ServerError(
            "its reply has no choices with prompt_logprobs, which the servers that --help names "
            f"give: {repr(reply)[:200]}"
        ) from error
    if not are_logprobs(logprobs):
        raise ServerError("its prompt_logprobs are not log-probabilities")
    return tokens, [float(value) for value in logprobs]


class _Pool(CompletionPool):
    """Servers that score prompts in the place of answering them."""

    def _answer(
        self, server: CompletionServer, connection: HTTPConnection, body: Body
    ) -> ServerAnswer:
        tokens, logprobs = read_prompt_logprobs(server.ask(connection, "/v1/completions", body))
        if tokens != body["prompt"][1:]:
            raise ServerError(f"it scored {len(tokens)} tokens other than those sent to it")
        return ServerAnswer(tokens, logprobs, stopped=False)

    def _none_left(self) -> EngineError:
        return EngineError(f"{_OPTION} {'; '.join(map(': '.join, self.lost.items()))}")


@dataclass(frozen=True)
class ServedTeacher:
    """A teacher that the first rank asks.

    Attributes:
        model: its name there.
        limit: most tokens of prompt and response; None where the server does not say.
    """

    model: str
    limit: int | None
    pool: CompletionPool

    def begin(self, responses: Sequence[Response]) -> Callable[[], list[list[float]]]:
        """Have all ranks' responses scored; gives what waits for that. Call both on every rank.

        What is returned gives the log-probabilities of each response's tokens, in nats, after the
        prompt that the teacher reads, and raises a TeacherError if the server is lost.
        """
        read = [each for each in responses if each.tokens] if rank() == 0 else []
        wait = self.pool.begin(
            [
                score_body(self.model, [*(each.reference_prompt or each.prompt), *each.tokens])
                for each in read
            ]
        )

        def logprobs() -> list[list[float]]:
            outcome: dict[str, Any] = {}
            try:
                outcome["rows"] = [None if each is None else each.logprobs for each in wait()]
            except EngineError as error:
                outcome["failure"] = str(error)
            outcome = json.loads(broadcast_string(json.dumps(outcome)))
            if "failure" in outcome:
                raise TeacherError from OSError(outcome["failure"])
            rows = iter(outcome["rows"])
            return [next(rows)[-len(each.tokens) :] if each.tokens else [] for each in responses]

        return logprobs


def open_teacher(
    address: str,
    model: str,
    tokenizer: Tokenizer,
    *,
    max_seq_len: int,
    timeout: float,
    in_flight: int,
    say: Callable[[str], None],
) -> ServedTeacher:
    """The teacher at an address; call on every rank.

    Args:
        address: of the server, without the path ``/v1``.
        model: its name there; empty: the only one that there is.
        tokenizer: that the teacher must have.
        max_seq_len: most tokens of prompt and response.
        timeout: seconds that it may take for a response.
        in_flight: responses that it gets at a time.
        say: told that the server is lost.

    Raises:
        ValueError: if it cannot be used, naming the option.
    """
    server, teacher = CompletionServer(address, timeout), dict[str, Any]()
    if rank() == 0:
        try:
            teacher["limit"] = limit = server.base_limit()
            listed = cast("Body", server.ask_once("/v1/models"))
            names = [each.get("id") for each in listed["data"]]
            if model not in names and (model or len(names) != 1):
                shown = ", ".join(map(str, names))
                raise ServerError(
                    f"it serves the models {shown}: name one, as in {address}/v1#NAME"
                )
            teacher["model"] = model or names[0]
            if limit is not None and limit <= max_seq_len:
                raise ServerError(
                    f"its context is {limit} tokens, but --max_prompt_seq_len and "
                    f"--max_answer_seq_len add up to {max_seq_len}, and it needs one more"
                )
            body = score_body(teacher["model"], PROBE)
            theirs, _ = read_prompt_logprobs(server.ask_once("/v1/completions", body))
            own = [
                tokenizer(PROBE, add_special_tokens=adds).input_ids[1:] for adds in (True, False)
            ]
            if theirs not in own:
                raise ServerError(
                    "it has a different tokenizer: choose a teacher of the actor's family"
                )
        except (ServerError, EngineError) as error:
            teacher["mistake"] = f"{_OPTION} {address} cannot be used: {error}"
    teacher = json.loads(broadcast_string(json.dumps(teacher)))
    if "mistake" in teacher:
        raise ValueError(teacher["mistake"])
    pool = _Pool(
        [server], in_flight=in_flight, say=say, ends=frozenset(), vocabulary_size=len(tokenizer)
    )
    return ServedTeacher(teacher["model"], teacher["limit"], pool)
