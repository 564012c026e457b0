"""vLLM that a run starts beside itself: a server in an environment of its own, which ends with it.

In the processes that train it could not be imported, since vLLM needs an older transformers.
"""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from dschat_lora.addons.engines.checks import vllm_rank
from dschat_lora.addons.engines.completion_pool import LOAD_SECONDS
from dschat_lora.addons.engines.completions import CompletionServer, ServerError
from dschat_lora.addons.engines.server_engine import server_engine
from dschat_lora.config.staging import check_place, open_in_place
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.children import end_with_parent, variables_of_no_launch, visible_gpu
from dschat_lora.engine.distributed import device, gather_texts, local_rank, rank
from dschat_lora.engine.rendezvous import is_one_host, usable_port
from dschat_lora.rl.draw.engine import EngineDecoder, EngineSite
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.engines import EngineError
from dschat_lora.rl.options.inputs import Sources
from dschat_lora.runtime.run import OpenRun

END_SECONDS = 15.0  # that a server has to end by itself
_POLL = 0.25


def vllm_engine(site: EngineSite) -> EngineDecoder:
    """The engine of the servers that were started."""
    servers = cast(Sequence[CompletionServer], site.started)
    return server_engine(site, servers, sleeps=sleeps(site.config))


def start_vllm(
    config: RlhfConfig, sources: Sources, run: OpenRun[Any]
) -> tuple[CompletionServer, ...]:
    """Start vLLM on each GPU that trains, or once for all processes without GPUs; on every rank.

    When this returns the servers have answered and, where they :func:`sleep <sleeps>`, given their
    memory back. The end of the ``run`` ends them.

    Raises:
        ValueError: on several machines.
        OSError: if a server does not start; on every rank.
    """
    if not is_one_host():
        raise ValueError(
            "--rollout_engine vllm starts servers on one machine, but this run uses several: "
            "start them yourself and give their addresses"
        )
    home, outcome = run.directory, {"address": "", "failure": ""}
    assert home is not None, "a dry run starts nothing"
    dtype = str(DTYPES[resolve_dtype(config.load.dtype)]).removeprefix("torch.")
    timeout, on_gpu = config.addons.engines.rollout_timeout, device().type == "cuda"
    if on_gpu or local_rank() == 0:
        port, sleeping = usable_port(None), sleeps(config)
        outcome["address"] = f"http://127.0.0.1:{port}"
        server = CompletionServer(outcome["address"], timeout, log=_log(home, rank()))
        command = serve_command(
            config, sources.of("actor").base, dtype=dtype, port=port, sleeps=sleeping
        )
        gpu = visible_gpu(local_rank()) if on_gpu else None
        try:
            process = ServerProcess(server, command, serve_environment(gpu, sleeps=sleeping))
            run.closing.callback(process.close)
            process.wait(timeout)
            if sleeping:
                server.ask_once("/sleep?level=1", {}, LOAD_SECONDS)
        except (OSError, ServerError, EngineError) as error:
            outcome["failure"] = f"--rollout_engine vllm: {error}"
    outcomes = [json.loads(text) for text in gather_texts(json.dumps(outcome))]
    for each in outcomes:
        if each["failure"]:
            raise OSError(each["failure"])
    servers = tuple(
        CompletionServer(each["address"], timeout, log=_log(home, number))
        for number, each in enumerate(outcomes)
        if each["address"]
    )
    run.log.say(f"  rollouts     vLLM answers at {', '.join(each.address for each in servers)}")
    return servers


def sleeps(config: RlhfConfig) -> bool:
    """Whether vLLM gives its memory back while the actor trains, and draws nothing."""
    return device().type == "cuda" and not config.addons.engines.rollouts_ahead


def serve_command(
    config: RlhfConfig, base: str, *, dtype: str, port: int, sleeps: bool
) -> list[str]:
    """The command of a server for ``base``, with room for the run's adapters and tokens."""
    own, actor = config.addons.engines, config.actor
    options = {
        "host": "127.0.0.1",
        "port": port,
        "dtype": dtype,
        "max-model-len": config.data.max_seq_len,
        "max-lora-rank": vllm_rank(max(actor.lora_dim, actor.expert_lora_dim or 0)),
        "max-loras": own.rollouts_ahead + 1,
        "gpu-memory-utilization": own.vllm_gpu_memory_utilization,
        "logprobs-mode": "processed_logprobs",
        "uvicorn-log-level": "warning",
    }
    switches = ["--enable-lora"]
    switches += ["--enable-sleep-mode"] if sleeps else []
    switches += ["--trust-remote-code"] if config.load.trust_remote_code else []
    typed = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*shlex.split(own.vllm_command or "vllm serve"), base, *typed, *switches]


def serve_environment(gpu: str | None, *, sleeps: bool) -> dict[str, str]:
    """The environment of a server, which sees one GPU alone, or all there are (None)."""
    # What leads to modules of this environment's Python is not for another's.
    aside = ("PYTHONPATH", "PYTHONHOME", "VLLM_API_KEY")
    kept = {n: value for n, value in variables_of_no_launch().items() if n not in aside}
    kept["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if sleeps:
        kept["VLLM_SERVER_DEV_MODE"] = "1"  # for /sleep and /wake_up
    if key := os.environ.get("ROLLOUT_API_KEY", "").strip():
        kept["VLLM_API_KEY"] = key
    return kept if gpu is None else {**kept, "CUDA_VISIBLE_DEVICES": gpu}


class ServerProcess:
    """A server as a child process, which the system ends where this process is killed.

    Args:
        server: which it is, with the log that it writes.
        command: that starts it.
        environment: of the child.

    Raises:
        OSError: if there is no such program.
    """

    def __init__(
        self, server: CompletionServer, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        assert server.log is not None
        self._server = server
        check_place(server.log)
        server.log.parent.mkdir(exist_ok=True)
        with open_in_place(server.log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the run, which saves first
                preexec_fn=end_with_parent,
            )

    def wait(self, seconds: float) -> None:
        """Wait until the server answers.

        Raises:
            OSError: if it has ended, or does not answer within so many seconds.
        """
        end = time.monotonic() + seconds
        while (code := self._process.poll()) is None:
            with suppress(ServerError, EngineError):
                self._server.base_limit()
                return
            if time.monotonic() > end:
                raise OSError(
                    f"no answer after {seconds:g} seconds; raise --rollout_timeout to wait "
                    f"longer{self._server.last_words()}"
                )
            time.sleep(_POLL)
        raise OSError(f"it ended with exit code {code}{self._server.last_words()}")

    def close(self) -> None:
        """End the server, and what it has started."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _log(home: Path, number: int) -> Path:
    return home / "vllm" / f"{number}.log"
