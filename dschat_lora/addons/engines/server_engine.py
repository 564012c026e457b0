"""The engine of servers, which get the actor's adapter at run time."""

import gc
import hashlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dschat_lora.addons.engines.completion_pool import CompletionPool
from dschat_lora.addons.engines.completions import CompletionServer
from dschat_lora.addons.engines.facts import server_addresses
from dschat_lora.checkpoint.adapter import write_adapter
from dschat_lora.engine.distributed import broadcast_string, gather_texts, rank
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.generation.sampling import Sampling
from dschat_lora.lora.model import adapter_layout, adapter_parameters
from dschat_lora.models.build import AdaptedModel
from dschat_lora.models.fingerprint import weights_fingerprint
from dschat_lora.rl.draw.engine import (
    Asked,
    Drawn,
    EngineDecoder,
    EngineSite,
    NotFiniteError,
    Pending,
    RolloutError,
)
from dschat_lora.rl.options.engines import EngineError

RolloutServer, RolloutServers = CompletionServer, CompletionPool  # their former names


def engine_of_addresses(site: EngineSite) -> EngineDecoder:
    """The engine of the servers whose addresses ``--rollout_engine`` has."""
    addresses = server_addresses(site.config.batch.rollout_engine)
    timeout = site.config.addons.engines.rollout_timeout
    return server_engine(site, [CompletionServer(each, timeout) for each in addresses])


def server_engine(
    site: EngineSite, servers: Sequence[CompletionServer], *, sleeps: bool = False
) -> EngineDecoder:
    """The engine of these servers; ``sleeps`` as :class:`ServerEngine` has it."""
    return EngineDecoder(ServerEngine(site, servers, sleeps=sleeps), site)


class ServerEngine:
    """Draws responses with servers, which get the actor's adapter through a directory.

    An adapter is known by its values: one that has not changed is not handed over again. The
    directory is below ``--rollout_adapter_dir``, or in memory where the system has that;
    :meth:`close` removes it.

    Args:
        servers: that are asked.
        sleeps: whether the servers take the memory of these processes while they draw, and
            sleep else.
    """

    def __init__(
        self, site: EngineSite, servers: Sequence[CompletionServer], *, sleeps: bool
    ) -> None:
        config, say = site.config, site.run.log.say
        self._servers = CompletionPool(
            servers,
            in_flight=config.batch.per_device_generation_batch_size,
            say=lambda words: say(f"  note         --rollout_engine: {words}"),
            ends=site.ends,
            vocabulary_size=int(site.actor.model.config.vocab_size),
        )
        shared = config.addons.engines.rollout_adapter_dir
        self._directory = None if shared is None else Path(shared).expanduser().resolve()
        self._base, self._sleeps = site.base, sleeps
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._run = secrets.token_hex(4)  # servers may have other runs' adapters
        self._name = ""
        self._waited_for: list[str] = []  # adapters that responses are being drawn with
        self._fingerprint = ""  # of the base's files, once it is needed

    def publish(self, actor: AdaptedModel, version: int) -> None:
        """Hand the actor's adapter over; call on every rank.

        Raises:
            RolloutError: if no server takes it.
            NotFiniteError: if it is not finite.
        """
        tensors = gather_to_cpu(adapter_parameters(actor.model))
        if self._sleeps:
            gc.collect()
            torch.cuda.empty_cache()
            gather_texts("")  # all have, before any server takes that memory
        outcome: dict[str, Any] = {}
        if rank() == 0:
            try:
                outcome = self._hand_over(actor, tensors)
            except EngineError as error:
                outcome = {"failure": str(error)}
            except OSError as error:
                where = self._directory or "/dev/shm"
                outcome["failure"] = (
                    f"the adapter cannot be written where servers read it, {where}: {error}; set "
                    "--rollout_adapter_dir to a shared directory with enough space"
                )
            except ValueError as error:
                outcome = {"mistake": str(error)}
        told = json.loads(broadcast_string(json.dumps(outcome)))
        if "failure" in told:
            raise RolloutError from OSError(told["failure"])
        if "mistake" in told:
            raise NotFiniteError(told["mistake"])
        self._name = told.pop("name")
        self._servers.adopt(**told)

    def pause(self) -> None:
        """Have servers that sleep give their memory back; call on every rank."""
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

    def _hand_over(self, actor: AdaptedModel, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
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
                actor.lora,
                layout=adapter_layout(actor.model),
                base_model_name_or_path=self._base,
                base_bits=actor.base_bits,
                base_fingerprint=self._fingerprint,
            )
        adapters = {each: path for each, path in known.items() if each in self._waited_for}
        adapters[name] = str(path)
        self._servers.load(adapters)
        for each in known.keys() - adapters.keys():
            shutil.rmtree(known[each], ignore_errors=True)
        return {"name": name, "adapters": adapters, "lost": self._servers.lost}

    def draw(self, asked: Sequence[Asked], sampling: Sampling) -> Pending[list[Drawn]]:
        """Begin on responses by the adapter of the latest :meth:`publish`; other work may go on.

        Raises:
            EngineError: if a server's log-probabilities are others than those of what it draws
                from; likewise what is returned, if no server is left, or one refuses a request.
        """
        drawn = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
        if sampling.do_sample:
            drawn = {name: getattr(sampling, name) for name in drawn}
        bodies = [
            {
                "model": self._name,
                "prompt": row.prompt,
                "max_tokens": row.limit,
                "seed": row.seed,
                **drawn,
                # Not the options of sampling, nor the ends, that the base's files may hold.
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "ignore_eos": True,
                "stop_token_ids": sorted(self._servers.ends),
                "logprobs": 0,
                "return_token_ids": True,
            }
            for row in asked
        ]
        is_plain = drawn == {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        if bodies and asked[0].keeps_logprobs and sampling.do_sample and not is_plain:
            self._servers.check_logprobs(bodies[0])
        wait, name = self._servers.begin(bodies), self._name
        self._waited_for.append(name)

        def responses() -> list[Drawn]:
            self._waited_for.remove(name)
            return [Drawn(each.tokens, each.logprobs) for each in wait()]

        return responses
