"""Answers as HTTP responses: one JSON object, or events while they are decoded."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from dschat_lora.addons.serving.endpoint.errors import (
    ApiError,
    BusyError,
    StoppedError,
    TooLongError,
    UnsupportedError,
    invalid,
)
from dschat_lora.addons.serving.endpoint.requests import AnswerRequest
from dschat_lora.addons.serving.endpoint.sources import AnswerSource
from dschat_lora.addons.serving.endpoint.text import MediaPrompt
from dschat_lora.addons.serving.endpoint.turns import Delta, Kind, Piece, Turn


class RequestAnswers:
    """The answers of one request, from a decoder's thread to the event loop.

    Raises:
        ApiError: if the decoder does not take all of them.
    """

    def __init__(self, request: AnswerRequest, decoder: AnswerSource) -> None:
        loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._decoder, self._answers = decoder, list[Any]()
        self._open = len(request.prompts) * request.n
        self.request, self.tokens, self._cached = request, [0] * self._open, [0] * self._open

        def emit(index: int, piece: Piece) -> None:
            with suppress(RuntimeError):  # the loop has been closed: nobody reads
                loop.call_soon_threadsafe(self._pieces.put_nowait, (index, piece))

        try:
            for index in range(self._open):
                options = request.options
                if options.seed is not None:  # answers to one prompt differ
                    options = replace(options, seed=options.seed + index % request.n)
                prompt = request.prompts[index // request.n]
                answer = decoder.submit(request.model, prompt, options, partial(emit, index))
                self._answers.append(answer)
        except (TooLongError, UnsupportedError, BusyError, StoppedError) as error:
            self.leave()
            if isinstance(error, UnsupportedError):
                raise invalid(str(error), error.param) from error
            if isinstance(error, TooLongError):
                raise invalid(str(error), code="context_length_exceeded") from error
            is_busy = isinstance(error, BusyError)
            status, code = (429, "queue_full") if is_busy else (503, "stopped")
            raise ApiError(status, str(error), code=code) from error

    def leave(self) -> None:
        """Stop decoding what has not ended."""
        for answer in self._answers:
            self._decoder.leave(answer)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """The pieces as they come, each with its answer's number.

        Raises:
            ApiError: if an answer ends with an error.
        """
        while self._open:
            index, piece = await self._pieces.get()
            self.tokens[index] = piece.tokens
            self._cached[index] = max(self._cached[index], piece.cached)
            if piece.error is not None:
                self.leave()
                if piece.param is not None:
                    raise invalid(piece.error, piece.param)
                status, code = (503, "stopped") if piece.stopped else (500, None)
                raise ApiError(status, piece.error, code=code)
            self._open -= piece.is_last
            yield index, piece

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt with several answers counts once."""
        prompt, answers = sum(map(len, self.request.prompts)), sum(self.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached[:: self.request.n])},
        }


class AnswerResponse(Response):
    """The response to a request for answers; a client that leaves ends them."""

    def __init__(self, answers: RequestAnswers, kind: Kind) -> None:
        super().__init__()
        self._answers, self._kind, self._request = answers, kind, answers.request
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self._request.model.name,
        }
        options, n = self._request.options, self._request.n
        self._turns = [
            Turn(
                self._request.model.tokenizer,
                kind,
                prompt=prompt,
                reads_calls=self._request.reads_calls,
                parallel_calls=self._request.parallel_calls,
                stop=options.stop,
                logprobs=options.logprobs,
            )
            for prompt in self._request.prompts
            for _ in range(n)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answers, until the client leaves."""
        whole = self._stream(send) if self._request.stream else self._whole(scope, receive, send)

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        worker, watcher = asyncio.ensure_future(whole), asyncio.ensure_future(left())
        try:
            await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if worker.done():
                worker.result()
        finally:
            worker.cancel()
            watcher.cancel()
            self._answers.leave()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        wholes, of_prompts = [Delta() for _ in self._turns], dict[int, Sequence[float]]()
        try:
            async for index, piece in self._answers.pieces():
                wholes[index] = _joined(wholes[index], self._turns[index].add(piece))
                of_prompts[index] = piece.prompt_logprobs
        except ApiError as error:
            await JSONResponse(error.body, error.status)(scope, receive, send)
            return
        is_chat, choices, top = self._kind == "chat", [], dict[str, Any]()
        for index, whole in enumerate(wholes):
            content: dict[str, Any] = {"text": whole.text}
            if is_chat:
                said = None if whole.calls and not whole.text else whole.text
                content = {"message": {"role": "assistant", "content": said, "refusal": None}}
                if whole.calls:
                    content["message"]["tool_calls"] = whole.calls
            ended: dict[str, Any] = {"logprobs": whole.logprobs, "finish_reason": whole.finish}
            prompt = self._request.prompts[index // self._request.n]
            if self._request.options.prompt_logprobs:  # as vLLM: nothing of the first token
                scored = zip(prompt[1:], of_prompts[index], strict=True)
                described = [{str(n): {"logprob": max(x, -9999.0)}} for n, x in scored]
                ended["prompt_logprobs"] = [None, *described]
            if self._request.options.return_token_ids:
                ended["token_ids"] = list(whole.ids)
                shown = prompt.shown if isinstance(prompt, MediaPrompt) else prompt
                (top if is_chat else ended)["prompt_token_ids"] = list(shown)  # as vLLM
            choices.append({"index": index, **content, **ended})
        kind = "chat.completion" if is_chat else "text_completion"
        top |= {"object": kind, "choices": choices, "usage": self._answers.usage}
        body = {**self._head, **top}
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        async def send_event(text: str) -> None:
            body = f"data: {text}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            if self._kind == "chat":
                for index in range(len(self._answers.tokens)):
                    await send_event(self._chunk(index, {"role": "assistant", "content": ""}))
            async for index, piece in self._answers.pieces():
                delta = self._turns[index].add(piece)
                for event in self._delta_events(index, delta):
                    await send_event(event)
            if self._request.include_usage:
                await send_event(self._event(usage=self._answers.usage, choices=[]))
            await send_event("[DONE]")
        except ApiError as error:
            await send_event(json.dumps(error.body, ensure_ascii=False))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _delta_events(self, index: int, delta: Delta) -> list[str]:
        """Text, calls and the end, each as a chunk; log-probabilities come with the first."""
        logprobs, events = delta.logprobs, []
        if delta.text:
            events.append(self._chunk(index, {"content": delta.text}, logprobs=logprobs))
            logprobs = None
        for number, call in enumerate(delta.calls):
            called = {"tool_calls": [{"index": number, **call}]}
            events.append(self._chunk(index, called, logprobs=logprobs))
            logprobs = None
        if delta.finish is not None:
            events.append(self._chunk(index, {}, delta.finish, logprobs=logprobs))
        return events

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        *,
        logprobs: dict[str, Any] | None = None,
    ) -> str:
        content: dict[str, Any] = {"delta": delta}
        if self._kind == "text":
            content = {"text": delta.get("content", "")}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._request.include_usage else {}
        return self._event(**usage, choices=[choice])

    def _event(self, **fields: object) -> str:
        kind = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        return json.dumps({**self._head, "object": kind, **fields}, ensure_ascii=False)


def _joined(whole: Delta, new: Delta) -> Delta:
    """An answer so far with what is new."""
    logprobs = whole.logprobs or new.logprobs
    if whole.logprobs is not None and new.logprobs is not None:
        logprobs = {
            name: values and values + new.logprobs[name] for name, values in whole.logprobs.items()
        }
    calls = [*whole.calls, *new.calls]
    ids = whole.ids + new.ids
    return Delta(whole.text + new.text, calls, logprobs, new.finish or whole.finish, ids)
