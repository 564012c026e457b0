"""Answers as HTTP responses: one JSON object, or events while they are decoded."""

import asyncio
import json
import secrets
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from dschat_lora.serving.decoder import (
    AnswerDecoder,
    BusyError,
    Piece,
    RunningAnswer,
    StoppedError,
    TooLongError,
)
from dschat_lora.serving.guard import ApiError, invalid
from dschat_lora.serving.requests import AnswerRequest

Kind = Literal["chat", "text"]


class RequestAnswers:
    """The answers of one request, from a decoder's thread to the event loop.

    Raises:
        ApiError: if the decoder does not take all of them.
    """

    def __init__(self, request: AnswerRequest, decoder: AnswerDecoder) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._decoder, self._answers = decoder, list[RunningAnswer]()
        self._open = len(request.prompts) * request.n
        self.request, self.tokens = request, [0] * self._open
        try:
            for index in range(self._open):
                self._submit(index)
        except (TooLongError, BusyError, StoppedError) as error:
            self.leave()
            raise _refusal(error) from error

    def _submit(self, index: int) -> None:
        request, options = self.request, self.request.options
        if options.seed is not None:  # answers to one prompt differ
            options = replace(options, seed=options.seed + index % request.n)

        def emit(piece: Piece) -> None:
            with suppress(RuntimeError):  # the loop has been closed: nobody reads
                self._loop.call_soon_threadsafe(self._pieces.put_nowait, (index, piece))

        prompt = request.prompts[index // request.n]
        self._answers.append(self._decoder.submit(request.model, prompt, options, emit))

    def leave(self) -> None:
        """Stop decoding what has not ended."""
        for answer in self._answers:
            self._decoder.leave(answer)

    async def next(self) -> tuple[int, Piece] | None:
        """The next piece and its answer's number; None after the last one.

        Raises:
            ApiError: if an answer ends with an error.
        """
        if not self._open:
            return None
        index, piece = await self._pieces.get()
        self.tokens[index] = piece.tokens
        if piece.error is not None:
            self.leave()
            status, code = (503, "stopped") if piece.stopped else (500, None)
            raise ApiError(status, piece.error, code=code)
        self._open -= piece.is_last
        return index, piece

    @property
    def usage(self) -> dict[str, int]:
        """Tokens so far."""
        prompt = sum(map(len, self.request.prompts))
        answers = sum(self.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answers."""
        try:
            whole = (
                self._stream(send) if self._request.stream else self._whole(scope, receive, send)
            )
            await _unless_left(receive, whole)
        finally:
            self._answers.leave()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts, finishes = [""] * len(self._answers.tokens), [""] * len(self._answers.tokens)
        try:
            while (found := await self._answers.next()) is not None:
                index, piece = found
                texts[index] += piece.text
                finishes[index] = piece.finish or ""
        except ApiError as error:
            await JSONResponse(error.body, error.status)(scope, receive, send)
            return
        pairs = enumerate(zip(texts, finishes, strict=True))
        choices = [self._choice(index, text, finish) for index, (text, finish) in pairs]
        kind = "chat.completion" if self._kind == "chat" else "text_completion"
        body = {**self._head, "object": kind, "choices": choices, "usage": self._answers.usage}
        await JSONResponse(body)(scope, receive, send)

    def _choice(self, index: int, text: str, finish: str) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        if self._kind == "chat":
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **said, "logprobs": None, "finish_reason": finish}

    async def _stream(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            if self._kind == "chat":
                for index in range(len(self._answers.tokens)):
                    delta = {"role": "assistant", "content": ""}
                    await _send_event(send, self._chunk(index, delta, None))
            while (found := await self._answers.next()) is not None:
                index, piece = found
                if piece.text:
                    await _send_event(send, self._chunk(index, {"content": piece.text}, None))
                if piece.finish is not None:
                    await _send_event(send, self._chunk(index, {}, piece.finish))
            if self._request.include_usage:
                usage = {"choices": [], "usage": self._answers.usage}
                await _send_event(send, {**self._chunk_head(), **usage})
            await _send_event(send, "[DONE]")
        except ApiError as error:
            await _send_event(send, error.body)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _chunk(self, index: int, delta: dict[str, str], finish: str | None) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": delta}
        if self._kind == "text":
            said = {"text": delta.get("content", "")}
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish}
        return {**self._chunk_head(), "choices": [choice]}

    def _chunk_head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        head = {**self._head, "object": kind}
        return {**head, "usage": None} if self._request.include_usage else head


async def _send_event(send: Send, content: dict[str, Any] | str) -> None:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    body = f"data: {text}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _unless_left(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do ``work`` until the client leaves."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
    finally:
        worker.cancel()
        watcher.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _refusal(error: TooLongError | BusyError | StoppedError) -> ApiError:
    if isinstance(error, TooLongError):
        return invalid(str(error), code="context_length_exceeded")
    if isinstance(error, BusyError):
        return ApiError(429, str(error), code="queue_full")
    return ApiError(503, str(error), code="stopped")
