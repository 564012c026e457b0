"""Engines that draw responses in the place of our own: transformers in this process, or servers.

A decoder is called as :class:`dschat_lora.generation.generate.Decoder` is: with prompts, options of
sampling and the seeds of responses. It gives their tokens, up to and including an end, and their
log-probabilities in the distribution that they were drawn from.
"""

import hashlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dschat_lora.checkpoint.adapter import write_adapter
from dschat_lora.engine.distributed import broadcast_string, gather_texts, rank
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.generation.sampling import Sampling
from dschat_lora.generation.transformers_engine import DrawnResponses, asked_responses
from dschat_lora.lora.model import adapter_layout, adapter_parameters
from dschat_lora.models.build import AdaptedModel
from dschat_lora.rl.rewards import UserFunctionError
from dschat_lora.rl.rollout_servers import EngineError, RolloutServers, ServerAnswer


class RolloutError(UserFunctionError):
    """Responses could not be drawn; the cause says why. Raised on every rank."""

    what = "--rollout_engine"


class Drawn(Protocol):
    """Responses that were drawn, as :class:`dschat_lora.generation.sampling.Responses` are read."""

    def tokens(self) -> list[list[int]]: ...
    def undrawn(self) -> list[bool]: ...
    def logprobs(self) -> list[list[float]]: ...
    def sampler_logprobs(self) -> list[list[float]]: ...


class ServerEngine:
    """Draws responses with servers, which get the actor's adapter through a directory.

    An adapter is known by its values: one that has not changed is not handed over again.

    Args:
        servers: that are asked.
        actor: whose adapter it is, with ``base`` under it.
        directory: that the servers see; it is made, and removed by :meth:`close`. None: one in
            memory where the system has that.
    """

    def __init__(
        self, servers: RolloutServers, actor: AdaptedModel, *, base: str, directory: Path | None
    ) -> None:
        self._servers, self._actor, self._base = servers, actor, base
        self._directory = directory
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._run = secrets.token_hex(4)  # servers may have other runs' adapters
        self._name = ""

    @contextmanager
    def decoding(self) -> Iterator[Callable[..., Drawn]]:
        """Within, a decoder with the present adapter; call on every rank.

        Raises:
            RolloutError: if no server takes it.
            ValueError: if it is not finite.
        """
        tensors = gather_to_cpu(adapter_parameters(self._actor.model))
        outcome = ""
        if rank() == 0:
            try:
                outcome = json.dumps(self._hand_over(tensors))
            except (EngineError, OSError) as error:
                outcome = json.dumps({"failure": str(error)})
            except ValueError as error:
                outcome = json.dumps({"mistake": str(error)})
        found = json.loads(broadcast_string(outcome))
        if "failure" in found:
            raise RolloutError from OSError(found["failure"])
        if "mistake" in found:
            raise ValueError(found["mistake"])
        self._servers.adopt(**found)
        self._name = found["name"]
        yield self._decode

    def close(self) -> None:
        """Have servers forget the adapter, and remove its directory; on any rank."""
        if self._home is not None:
            self._servers.unload()
            self._home.cleanup()

    def _hand_over(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Have the servers load the adapter; its name and path, and which servers are lost."""
        digest = hashlib.blake2b(digest_size=6)
        for tensor in tensors.values():
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        name = f"rollouts-{self._run}-{digest.hexdigest()}"
        if self._home is None:
            shared = self._directory or Path("/dev/shm")
            where = shared if shared.is_dir() or self._directory else None
            if where is not None:
                where.mkdir(parents=True, exist_ok=True)
            self._home = tempfile.TemporaryDirectory(prefix="dschat_lora-rollouts-", dir=where)
        path = Path(self._home.name) / name
        if name != self._name:
            write_adapter(
                path,
                tensors,
                self._actor.lora,
                layout=adapter_layout(self._actor.model),
                base_model_name_or_path=self._base,
                base_bits=self._actor.base_bits,
            )
        self._servers.load(name, str(path))
        if self._name and name != self._name:
            shutil.rmtree(path.with_name(self._name), ignore_errors=True)
        return {"name": name, "path": str(path), "lost": self._servers.lost}

    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[Sequence[int]],
        limits: Sequence[int] | None = None,
        prefixes: Sequence[tuple[int, int]] | None = None,
        keep_logprobs: bool = False,
        keep_going: Callable[[bool], bool] | None = None,
    ) -> DrawnResponses:
        """As many responses to each prompt as it has seeds, prompt after prompt.

        Servers find prefixes by themselves. Call equally often on every rank.

        Raises:
            RolloutError: if no server is left, or one refuses a request.
        """
        drawn = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
        if sampling.do_sample:
            drawn = {name: getattr(sampling, name) for name in drawn}
        bodies = [
            {
                "model": self._name,
                "prompt": row.prompt,
                "max_tokens": row.limit,
                "seed": row.seed % 2**63,
                **drawn,
                # Not the options of sampling, nor the ends, that the base's files may hold.
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "ignore_eos": True,
                "stop_token_ids": sorted(self._servers.ends),
                "logprobs": 0,
                "return_token_ids": True,
            }
            for row in asked_responses(prompts, sampling, seeds=seeds, limits=limits)
        ]
        is_plain = drawn == {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        checks = keep_logprobs and sampling.do_sample and not is_plain
        answers, failure = list[ServerAnswer](), ""
        try:
            if checks and bodies:
                self._servers.check_logprobs(bodies[0])
            answers = self._servers.answers(bodies)
        except EngineError as error:
            failure = str(error)
        for first in filter(None, map(json.loads, gather_texts(json.dumps(failure)))):
            raise RolloutError from OSError(first)
        return DrawnResponses([(each.tokens, each.logprobs) for each in answers], sampling)
