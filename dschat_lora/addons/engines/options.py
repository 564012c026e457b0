"""Options of engines and of rollouts ahead, and what step 3 asks of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dschat_lora.config.groups import require, require_numbers
from dschat_lora.config.options import option
from dschat_lora.config.when import no_effect

if TYPE_CHECKING:
    from dschat_lora.rl.draw.generator import Rollouts
    from dschat_lora.rl.loop.sampler import RolloutSampler
    from dschat_lora.rl.options.config import RlhfConfig

of_vllm = partial(option, when="rollout_engine=vllm")


def _timeout_note(value: Callable[[str], Any]) -> str:
    """A message where no server draws responses, nor is the reference."""
    own = value("reference")
    asks = not value("engine").in_process or (own is not None and own.is_served)
    return "" if asks else no_effect("rollout_timeout", " without a server")


@dataclass(frozen=True)
class EngineOptions:
    """Servers that draw responses, and when they do."""

    vllm_command: str | None = of_vllm(
        None,
        help="what starts the server of --rollout_engine vllm: vLLM of another environment such as "
        "`/envs/vllm/bin/vllm serve`, with further options if you like; default: `vllm serve`",
        runs="code",
    )
    vllm_gpu_memory_utilization: float = of_vllm(
        0.3,
        help="share of the memory of a GPU, or of a host without GPUs, that --rollout_engine vllm "
        "takes while it draws; on a GPU it sleeps while the actor trains",
    )
    rollout_adapter_dir: str | None = option(
        None,
        help="directory that the servers of --rollout_engine see too, in which they find the "
        "adapter; default: one in memory, for servers on this machine",
        when="not rollout_engine=own",
    )
    rollout_timeout: float = option(
        600.0,
        help="seconds that a server of --rollout_engine, or a teacher's, may take for a response, "
        "and vllm to start",
        when=_timeout_note,
    )
    rollouts_ahead: int = option(
        0,
        help="have the servers of --rollout_engine draw the responses of so many further "
        "iterations while one trains, by adapters that are at most so many iterations old; "
        "--rollout_correction weighs for that; 0: they wait for each other",
    )

    def __post_init__(self) -> None:
        require_numbers(self, "> 0", "rollout_timeout")
        require_numbers(self, "in [0, 16]", "rollouts_ahead")
        share = self.vllm_gpu_memory_utilization
        require(0 < share < 1, "vllm_gpu_memory_utilization", share, "between 0 and 1")

    def check(self, config: "RlhfConfig") -> None:
        """Refuse rollouts ahead where the engine or other options rule them out.

        Raises:
            ValueError: naming the options.
        """
        batch, ahead = config.batch, self.rollouts_ahead
        if ahead and (config.players or not batch.engine.can_run_ahead):
            with_turns = "an --environment or agent waits for each turn"
            in_process = (
                f"--rollout_engine {batch.rollout_engine} draws in the processes that train: give "
                "the address of a server, such as `dschat-lora serve "
                "--allow_runtime_lora_updating` in another process"
            )
            raise ValueError(
                f"--rollouts_ahead {ahead} has servers draw whole responses while this process "
                f"trains, and {with_turns if config.players else in_process}"
            )
        if ahead and not (batch.do_sample and config.ppo.rollout_correction != "none"):
            off = "--rollout_correction none" if batch.do_sample else "--no-do_sample"
            raise ValueError(
                f"--rollouts_ahead {ahead} learns from responses of older adapters, for which "
                f"--rollout_correction weighs, and {off} leaves no weights: leave one out"
            )

    def first_lines(self, config: "RlhfConfig") -> Iterator[str]:
        """What the start of a run says of its rollouts."""
        if config.batch.rollout_engine == "vllm":
            most = f"up to {self.vllm_gpu_memory_utilization:.0%} of each GPU's memory"
            while_drawing = "" if self.rollouts_ahead else " while it draws"
            yield f"  rollouts     vLLM takes {most}{while_drawing}, or of the host's"
        if self.rollouts_ahead:
            weighs = f"weighed by --rollout_correction {config.ppo.rollout_correction or 'tis'}"
            if (own := config.reference) is not None and own.unweighed:
                weighs = f"for which {own.unweighed} has no weights"
            yield (
                f"  rollouts     up to {self.rollouts_ahead} iterations ahead, by adapters as old, "
                f"{weighs}"
            )

    def rollouts(self, sampler: "RolloutSampler") -> "Rollouts | None":
        """What begins on responses before their iteration; None where nothing does."""
        if not self.rollouts_ahead:
            return None
        from dschat_lora.addons.engines.rollouts_ahead import RolloutsAhead

        return RolloutsAhead(
            self.rollouts_ahead,
            lambda: sampler.schedule.num_iterations,
            iteration=lambda: sampler.progress.iteration,
            draws_of=sampler.draws_of,
            begin=sampler.begin,
        )
