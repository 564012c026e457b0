"""Answers as HTTP responses: one JSON object, or events while they are decoded."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
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
        loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._decoder, self._answers = decoder, list[RunningAnswer]()
        self._open = len(request.prompts) * request.n
        self.request, self.tokens = request, [0] * self._open

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
        except (TooLongError, BusyError, StoppedError) as error:
            self.leave()
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
            if piece.error is not None:
                self.leave()
                status, code = (503, "stopped") if piece.stopped else (500, None)
                raise ApiError(status, piece.error, code=code)
            self._open -= piece.is_last
            yield index, piece

    @property
    def usage(self) -> dict[str, int]:
        """Tokens so far."""
        prompt, answers = sum(map(len, self.request.prompts)), sum(self.tokens)
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
        texts, finishes = [""] * len(self._answers.tokens), [""] * len(self._answers.tokens)
        try:
            async for index, piece in self._answers.pieces():
                texts[index] += piece.text
                finishes[index] = piece.finish or ""
        except ApiError as error:
            await JSONResponse(error.body, error.status)(scope, receive, send)
            return
        is_chat, choices = self._kind == "chat", []
        for index, (text, finish) in enumerate(zip(texts, finishes, strict=True)):
            content: dict[str, Any] = {"text": text}
            if is_chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": finish})
        kind = "chat.completion" if is_chat else "text_completion"
        body = {**self._head, "object": kind, "choices": choices, "usage": self._answers.usage}
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
                if piece.text:
                    await send_event(self._chunk(index, {"content": piece.text}))
                if piece.finish is not None:
                    await send_event(self._chunk(index, {}, piece.finish))
            if self._request.include_usage:
                await send_event(self._event(usage=self._answers.usage, choices=[]))
            await send_event("[DONE]")
        except ApiError as error:
            await send_event(json.dumps(error.body, ensure_ascii=False))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _chunk(self, index: int, delta: dict[str, str], finish: str | None = None) -> str:
        content: dict[str, Any] = {"delta": delta}
        if self._kind == "text":
            content = {"text": delta.get("content", "")}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish}
        usage = {"usage": None} if self._request.include_usage else {}
        return self._event(**usage, choices=[choice])

    def _event(self, **fields: object) -> str:
        kind = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        return json.dumps({**self._head, "object": kind, **fields}, ensure_ascii=False)
