"""Engines that draw responses in the place of our own: transformers in this process, or servers.

A decoder is called as :class:`dschat_lora.generation.generate.Decoder` is: with prompts, options of
sampling and the seeds of responses. It gives their tokens, up to and including an end, and their
log-probabilities in the distribution that they were drawn from.
"""

import gc
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
from dschat_lora.models.fingerprint import weights_fingerprint
from dschat_lora.rl.draw.rollout_servers import EngineError, RolloutServers, ServerAnswer
from dschat_lora.rl.response.errors import UserFunctionError


class RolloutError(UserFunctionError):
    """Responses could not be drawn; the cause says why. Raised on every rank."""

    what = "--rollout_engine"


def raise_on_every_rank(failure: str) -> None:
    """Raise a :class:`RolloutError` of the first rank that has a failure; call on every rank."""
    for first in filter(None, map(json.loads, gather_texts(json.dumps(failure)))):
        raise RolloutError from OSError(first)


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
        sleeps: whether the servers take the memory of these processes while they draw, and
            sleep else.
    """

    def __init__(
        self,
        servers: RolloutServers,
        actor: AdaptedModel,
        *,
        base: str,
        directory: Path | None,
        sleeps: bool = False,
    ) -> None:
        self._servers, self._actor, self._base = servers, actor, base
        self._sleeps, self._directory = sleeps, directory
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._run = secrets.token_hex(4)  # servers may have other runs' adapters
        self._name = ""
        self._waited_for: list[str] = []  # adapters that responses are being drawn with
        self._fingerprint = ""  # of the base's files, once it is needed

    @contextmanager
    def decoding(self) -> Iterator[Callable[..., Drawn]]:
        """Within, a decoder with the present adapter; call on every rank.

        Raises:
            RolloutError: if no server takes it.
            ValueError: if it is not finite.
        """
        tensors = gather_to_cpu(adapter_parameters(self._actor.model))
        if self._sleeps:
            gc.collect()
            torch.cuda.empty_cache()
            gather_texts("")  # all have, before any server takes that memory
        outcome = ""
        if rank() == 0:
            try:
                outcome = json.dumps(self._hand_over(tensors))
            except EngineError as error:
                outcome = json.dumps({"failure": str(error)})
            except OSError as error:
                where = self._directory or "/dev/shm"
                words = (
                    f"the adapter cannot be written where servers read it, {where}: {error}; give "
                    "--rollout_adapter_dir a directory with room that they see"
                )
                outcome = json.dumps({"failure": words})
            except ValueError as error:
                outcome = json.dumps({"mistake": str(error)})
        found = json.loads(broadcast_string(outcome))
        if "failure" in found:
            raise RolloutError from OSError(found["failure"])
        if "mistake" in found:
            raise ValueError(found["mistake"])
        self._name = found.pop("name")
        self._servers.adopt(**found)
        yield self._decode
        if self._sleeps:
            if rank() == 0:  # all have their responses
                self._servers.set_awake(False)
            broadcast_string("")

    def close(self) -> None:
        """End what is being drawn, and remove adapters from servers and disk; on any rank."""
        if self._home is None:
            self._servers.adapters = {}  # another rank's to remove
        self._servers.close()
        if self._home is not None:
            self._home.cleanup()

    def _hand_over(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Have the servers load the adapter; its name, all they have, and which are lost."""
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
            if self._directory is not None:  # servers may be another user's
                Path(self._home.name).chmod(0o755)
            self._fingerprint = weights_fingerprint(self._base)
        if self._sleeps:
            self._servers.set_awake(True)
        path, known = Path(self._home.name) / name, self._servers.adapters
        if name not in known:
            write_adapter(
                path,
                tensors,
                self._actor.lora,
                layout=adapter_layout(self._actor.model),
                base_model_name_or_path=self._base,
                base_bits=self._actor.base_bits,
                base_fingerprint=self._fingerprint,
            )
        adapters = {each: path for each, path in known.items() if each in self._waited_for}
        adapters[name] = str(path)
        self._servers.load(adapters)
        for each in known.keys() - adapters.keys():
            shutil.rmtree(known[each], ignore_errors=True)
        return {"name": name, "adapters": adapters, "lost": self._servers.lost}

    def _decode(self, *args: Any, **options: Any) -> DrawnResponses:
        """What :meth:`begin` draws, at once; call equally often on every rank.

        Raises:
            RolloutError: if no server is left, or one refuses a request.
        """
        return self.begin(*args, **options)()

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[Sequence[int]],
        limits: Sequence[int] | None = None,
        prefixes: Sequence[tuple[int, int]] | None = None,
        keep_logprobs: bool = False,
        keep_going: Callable[[bool], bool] | None = None,
        needed: int | None = None,
    ) -> Callable[[], DrawnResponses]:
        """Begin on as many responses to each prompt as it has seeds, prompt after prompt.

        They are drawn by the adapter of the latest :meth:`decoding`, while other work goes on. What
        is returned waits for them, see :meth:`_decode`. Servers find prefixes by themselves.
        As soon as ``needed`` prompts are answered the others are given up, and have no tokens.
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
        size = max(map(len, seeds), default=1)
        wait: Callable[[], list[ServerAnswer | None]] = list
        failure, name = "", self._name
        try:
            if bodies and keep_logprobs and sampling.do_sample and not is_plain:
                self._servers.check_logprobs(bodies[0])
            wait = self._servers.begin(bodies, group_size=size, needed=needed)
        except EngineError as error:
            failure = str(error)
        self._waited_for.append(name)

        def responses() -> DrawnResponses:
            nonlocal failure
            self._waited_for.remove(name)
            answers: list[ServerAnswer | None] = []
            try:
                answers = wait()
            except EngineError as error:
                failure = failure or str(error)
            raise_on_every_rank(failure)
            drawn = [((), ()) if a is None else (a.tokens, a.logprobs) for a in answers]
            return DrawnResponses(drawn, sampling)

        return responses
