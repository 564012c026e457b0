"""Environments behind OpenEnv servers."""

import atexit
import json
from collections.abc import Mapping
from functools import cache
from typing import Any
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

from openenv.core import GenericEnvClient

from dschat_lora.data.messages import Message
from dschat_lora.rl.response.coroutines import run_together


class OpenEnv:
    """An environment behind an OpenEnv server, over a WebSocket for each episode at a time.

    The query of its address may name the ``field`` of an action that takes the answer, and the one
    of an ``observation`` that is shown. Episode ``n`` begins as ``reset(seed=n)`` does.
    """

    def __init__(self, address: str) -> None:
        """Ask the server what its actions and observations look like.

        Raises:
            ValueError: if it cannot be asked, or no field of an action takes a text.
        """
        url, self._field, self._shown = _openenv_fields(address)
        self._client = GenericEnvClient(base_url=url)
        self._where = f"--environment openenv:{address}"
        self.reward_name = "openenv"
        atexit.register(lambda: run_together([self._client.close()]))

    async def reset(self, episode: int) -> str:
        """The first observation.

        Raises:
            RuntimeError: if the server has no room for another session, or fails.
        """
        try:
            result = await self._client.reset(seed=episode)
        except Exception as error:
            raise RuntimeError(
                f"{self._where}: reset failed: {error}; the server must allow as many sessions "
                "(max_concurrent_envs) as concurrent episodes"
            ) from error
        return self._text(result.observation)

    async def step(self, message: Message) -> tuple[str | None, float]:
        """The next observation and the reward; None for the observation ends the episode."""
        result = await self._client.step({self._field: message["content"].strip()})
        return None if result.done else self._text(result.observation), float(result.reward or 0)

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._shown is None:
            return json.dumps(observation, ensure_ascii=False)
        return str(observation[self._shown])


@cache
def _openenv_fields(address: str) -> tuple[str, str, str | None]:
    """A server's address, the field of its actions for text, and the one of observations.

    The last is None where several hold text: all are shown then.
    """
    where, parts = f"--environment openenv:{address}", urlsplit(address)
    url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{where}: an address must begin with http:// or https://")
    try:
        with urlopen(f"{url}/schema", timeout=30) as answer:
            schema = json.load(answer)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: {url}/schema gives no description: {error}") from error
    asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
    taking, showing = (_text_fields(schema[kind]) for kind in ("action", "observation"))
    field = asked.get("field") or (taking[0] if len(taking) == 1 else None)
    if field not in taking:
        raise ValueError(
            f"{where}: the text fields of an action are {', '.join(taking) or '(none)'}; name one "
            "by ?field=NAME"
        )
    shown = asked.get("observation") or (showing[0] if len(showing) == 1 else None)
    if shown is not None and shown not in schema["observation"]["properties"]:
        raise ValueError(
            f"{where}: an observation has no field {shown}; it has "
            f"{', '.join(schema['observation']['properties'])}"
        )
    return url, field, shown


def _text_fields(schema: Mapping[str, Any]) -> list[str]:
    """Fields of a JSON schema that hold text: those that must be there, if there are any."""
    fields = [
        name
        for name, field in schema["properties"].items()
        if any(
            kind.get("type") == "string" and "enum" not in kind
            for kind in (field, *field.get("anyOf", ()))
        )
    ]
    return [name for name in fields if name in schema.get("required", ())] or fields
