"""Responses on their way between processes: as a table of numbers, or as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from dschat_lora.rl.response.response import Response, TokenSequence


def from_row(row: Tensor, blank: Response, width: int) -> Response:
    """The response to ``blank``'s prompt of a row of :func:`as_table`."""
    return replace(
        blank,
        tokens=tuple(row[4 : 4 + int(row[1])].long().tolist()),
        ended=bool(row[3] > 0),
        undrawn=bool(row[3] < 0),
        logprobs=tuple(row[4 + width :][: int(row[2])].tolist()),
        sampler_logprobs=tuple(row[4 + 2 * width :][: int(row[2])].tolist()),
    )


def as_table(own: Mapping[int, Response], width: int) -> Tensor:
    """(n, 4 + 3 width) fp64: numbers, tokens and fp32 values, which are exact in it."""
    table = torch.full((len(own), 4 + 3 * width), -1, dtype=torch.float64)
    for row, (number, each) in zip(table, own.items(), strict=True):
        drawn = torch.tensor([each.logprobs, each.sampler_logprobs])
        sizes = [number, len(each.tokens), drawn.shape[1], each.ended - each.undrawn]
        row[:4] = torch.tensor(sizes, dtype=torch.float64)
        row[4 : 4 + len(each.tokens)] = torch.tensor(each.tokens)
        row[4 + width :].view(2, width)[:, : drawn.shape[1]] = drawn
    return table


def responses_as_json(responses: Mapping[int, Response]) -> str:
    """Responses of episodes by number, without their prompts' columns."""
    fields = {n: asdict(replace(each, columns=b"")) for n, each in responses.items()}
    return json.dumps(fields, default=bytes.decode)


def response_from_json(fields: dict[str, Any], columns: bytes) -> Response:
    """A response of :func:`responses_as_json`."""

    def fixed(found: dict[str, Any]) -> dict[str, Any]:
        return {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}

    earlier = tuple(TokenSequence(**fixed(each)) for each in fields["earlier_sequences"])
    changed = {"columns": columns, "earlier": fields["earlier"].encode()}
    return Response(**{**fixed(fields), **changed, "earlier_sequences": earlier})
