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
        help="command that starts the server of --rollout_engine vllm, such as "
        "`/envs/vllm/bin/vllm serve` for vLLM in another environment, with further options if "
        "needed; default: `vllm serve`",
        runs="code",
    )
    vllm_gpu_memory_utilization: float = of_vllm(
        0.3,
        help="fraction of GPU memory (of host memory without a GPU) that --rollout_engine vllm "
        "uses while it generates; on a GPU it sleeps during training",
    )
    rollout_adapter_dir: str | None = option(
        None,
        help="directory, shared with the servers of --rollout_engine, from which they load the "
        "adapter; default: one in memory, for servers on this machine",
        when="not rollout_engine=own",
    )
    rollout_timeout: float = option(
        600.0,
        help="timeout in seconds for a response of a rollout or teacher server, and for vllm to "
        "start",
        when=_timeout_note,
    )
    rollouts_ahead: int = option(
        0,
        help="number of iterations that the servers of --rollout_engine generate ahead of "
        "training, with an adapter at most this many iterations old; --rollout_correction "
        "corrects for it; 0: synchronous",
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
                f"--rollout_engine {batch.rollout_engine} generates in the training processes: "
                "give the address of a server, such as `dschat-lora serve "
                "--allow_runtime_lora_updating` in another process"
            )
            raise ValueError(
                f"--rollouts_ahead {ahead} has servers generate whole responses while this "
                f"process trains, but {with_turns if config.players else in_process}"
            )
        if ahead and not (batch.do_sample and config.ppo.rollout_correction != "none"):
            off = "--rollout_correction none" if batch.do_sample else "--no-do_sample"
            raise ValueError(
                f"--rollouts_ahead {ahead} trains on responses of older adapters, which "
                f"--rollout_correction corrects for, but {off} turns that off: remove one of them"
            )

    def first_lines(self, config: "RlhfConfig") -> Iterator[str]:
        """What the start of a run says of its rollouts."""
        if config.batch.rollout_engine == "vllm":
            most = f"up to {self.vllm_gpu_memory_utilization:.0%} of each GPU's memory"
            while_drawing = "" if self.rollouts_ahead else " while it draws"
            yield f"  rollouts     vLLM takes {most}{while_drawing}, or of the host's"
        if self.rollouts_ahead:
            weighs = f"with --rollout_correction {config.ppo.rollout_correction or 'tis'}"
            if (own := config.reference) is not None and own.unweighed:
                weighs = f"not corrected, because of {own.unweighed}"
            yield (
                f"  rollouts     up to {self.rollouts_ahead} iterations ahead, with adapters of "
                f"that age, {weighs}"
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
