"""Options of warnings, and the part of a run that warns."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dschat_lora.config.groups import require_numbers
from dschat_lora.config.options import option

if TYPE_CHECKING:
    from dschat_lora.addons.diagnostics.diagnostics import Diagnostics
    from dschat_lora.rl.loop.setup import RlhfSetup
    from dschat_lora.rl.options.config import RlhfConfig


@dataclass(frozen=True)
class DiagnosticsOptions:
    """What a run does where it spoils the model."""

    section = "algorithm"

    guard: Literal["warn", "stop", "off"] = option(
        "warn",
        help="what to do when the entropy collapses, responses double or halve in length or stop "
        "ending, the reward rises while the judge's or the held-out reward falls, or "
        "--kl_budget is exceeded: warn, stop with a checkpoint, or nothing (off)",
    )
    kl_budget: float = option(
        0.0,
        help="KL divergence from the reference that --guard allows, in nats per response; 0: no "
        "limit",
    )

    def __post_init__(self) -> None:
        require_numbers(self, ">= 0", "kl_budget")

    def check(self, config: "RlhfConfig") -> None:
        """Refuse a budget of what nothing watches.

        Raises:
            ValueError: naming both options.
        """
        teaches = config.ppo.rules.learns_from_rewards
        if self.kl_budget and (self.guard == "off" or not teaches):
            other = "--guard off" if teaches else f"--algorithm {config.ppo.algorithm}"
            raise ValueError(
                f"--kl_budget {self.kl_budget:g} limits the divergence from the reference, which "
                f"{other} does not monitor: remove one of them"
            )

    def made_parts(self, setup: "RlhfSetup", progress: object) -> "list[Diagnostics]":
        """What warns of failures."""
        from dschat_lora.addons.diagnostics.diagnostics import Diagnostics

        config = setup.config
        watching = Diagnostics(
            setup.models.settings["actor"].dtype,
            samples_tokens=config.batch.draws_from_policy and setup.data.answers is None,
            engine=config.batch.engine,
            samplers_logprobs=config.ppo.use_rollout_logprobs,
            learns_from_rewards=config.ppo.rules.learns_from_rewards,
            guard=self.guard,
            kl_budget=self.kl_budget,
        )
        return [watching]
