"""Requests that were accepted, and what they have given."""

import json
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import torch

from dschat_lora.addons.tinker.formats import JSON, PROTOBUF
from dschat_lora.addons.tinker.processes import FULL
from dschat_lora.addons.tinker.samplers import SampleRequest
from dschat_lora.addons.tinker.store import Facts
from dschat_lora.addons.tinker.worker import SampleBody
from dschat_lora.report.terminal import note

Category = Literal["user", "server"]


class NotFoundError(Exception):
    """Nothing of this name is here."""


@dataclass(frozen=True)
class Result:
    """What a request has given; an ``error`` has a category."""

    body: bytes
    media_type: str = JSON
    error: Category | None = None

    @classmethod
    def of(cls, content: Facts, error: Category | None = None) -> "Result":
        """A JSON object."""
        return cls(json.dumps(content).encode(), error=error)

    @classmethod
    def failure(cls, error: object, category: Category) -> "Result":
        """A request that failed."""
        return cls.of({"error": " ".join(str(error).split()), "category": category}, category)

    @property
    def kind(self) -> str:
        """As which it is kept."""
        return "error" if self.error else "pb" if self.media_type == PROTOBUF else "json"

    @classmethod
    def kept(cls, kind: str, body: bytes) -> "Result":
        """One that was kept."""
        media_type = PROTOBUF if kind == "pb" else JSON
        return cls(body, media_type, "user" if kind == "error" else None)


@dataclass(frozen=True, eq=False)
class Job:
    """A request that was accepted."""

    request_id: str
    kind: str
    body: bytes
    future: "Future[Result]" = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class SampleJob:
    """A request for samples that was accepted, parsed and as it came."""

    request_id: str
    sample: SampleRequest
    body: SampleBody
    future: "Future[Result]" = field(default_factory=Future)


def failed(what: str, error: Exception, advice: str, option: str) -> Result:
    """The result of a request that ended in an error; what is beside the advice is an option."""
    if isinstance(error, ValueError | NotFoundError):
        return Result.failure(error, "user")
    if FULL in str(error):
        torch.cuda.empty_cache()
        words = f"out of GPU memory: {advice}, or start the service with a smaller --{option}"
        return Result.failure(words, "server")
    note(f"error: {what} failed: {type(error).__name__}: {error}")
    return Result.failure(f"{what} failed: {type(error).__name__}", "server")
