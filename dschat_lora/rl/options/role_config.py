"""Options of the models of step 3, and errors that name them."""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from dschat_lora.config.groups import (
    DEFAULT_RANK,
    LoadConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    Rate,
    ScheduleConfig,
    Switch,
    of_adapters,
    require_numbers,
)
from dschat_lora.config.options import accepted, hidden, option
from dschat_lora.config.roles import Role, Task
from dschat_lora.config.when import no_effect

if TYPE_CHECKING:
    from dschat_lora.models.loading import Tokenizer
    from dschat_lora.runtime.run import OpenRun
    from dschat_lora.runtime.validation import Sources

LARGE_MODEL = 1_000_000_000  # parameters from which on the default rate of adapters is doubtful


def as_in(config: type[LoraConfig | ModelConfig], name: str, **different: str | None) -> Any:
    """An option that another group has too, among the other options of its role."""
    own = config.__dataclass_fields__[name]
    return field(default=own.default, metadata={**own.metadata, **different})


def _base_rate_note(value: Callable[[str], Any]) -> str:
    """A message where a role's rate is of base weights, and its adapter alone trains."""
    rate, own, role = map(value, ("learning_rate", "lora_learning_rate", "role"))
    if not (value("lora_dim") and value("only_optimize_lora")) or rate in ("auto", own):
        return ""
    why = f": only the adapter is trained, at --{role}_lora_learning_rate {own:g}"
    return no_effect(f"{role}_learning_rate", why)


@dataclass(frozen=True)
class RoleConfig:
    """A model that trains: the actor or the critic."""

    task: ClassVar[Task] = "CAUSAL_LM"
    role: str = hidden("actor")
    model_name_or_path: str | None = option(
        None, help="model to train: output of SFT, model directory or hub name"
    )
    lora_dim: int = option(
        0, help="LoRA rank of a new adapter; 0 trains all weights", settled=DEFAULT_RANK
    )
    lora_alpha: float = as_in(LoraConfig, "lora_alpha")
    use_rslora: bool = of_adapters(False, help="scale by lora_alpha / sqrt(lora_dim)")
    expert_lora_dim: int | None = as_in(LoraConfig, "expert_lora_dim")
    expert_lora_alpha: float | None = as_in(LoraConfig, "expert_lora_alpha")
    target_modules: tuple[str, ...] = as_in(LoraConfig, "target_modules", when="lora_dim")
    lora_module_name: str | None = as_in(LoraConfig, "lora_module_name", when="lora_dim")
    learning_rate: Rate = option(
        9.65e-6,
        help="peak learning rate\nof the adapter if only it is trained, except in the script of "
        "training/; auto: by published rules for width and stage, for the adapter too",
        settled="{lora_learning_rate} for the adapter, {learning_rate} for base weights",
        when=_base_rate_note,
    )
    lora_learning_rate: float = of_adapters(5e-4, help="peak learning rate of the adapter")
    expert_learning_rate: float | None = option(
        None, help="peak learning rate of the adapters of MoE experts; default: that of the adapter"
    )
    weight_decay: float = option(
        0.0, help="decoupled weight decay, not applied to biases and norms"
    )
    zero_stage: Literal[0, 1, 2, 3] | None = option(
        None, help="ZeRO stage of this role; default: --zero_stage"
    )
    gradient_checkpointing: Switch = as_in(ModelConfig, "gradient_checkpointing", section=None)
    dropout: float = accepted(0.0, "; old and new log-probabilities need one network")

    # of base weights and of the adapter, by auto; None until the model is known
    ruled: tuple[float, float] | None = hidden(None)

    def __post_init__(self) -> None:
        with option_errors_for(self.role):
            self.as_role(LoadConfig(), ScheduleConfig(), only_optimize_lora=True)
            require_numbers(self, "in [0, 1)", "dropout")

    def rate_warning(self, parameters: int, *, given: Collection[str]) -> str | None:
        """A warning where the adapter of a model of so many parameters trains at the default rate.

        ``given`` are the options that were typed.
        """
        name = f"{self.role}_lora_learning_rate"
        if self.lora_dim == 0 or parameters < LARGE_MODEL or name in given or self.ruled:
            return None
        return (
            f"--{name} {self.lora_learning_rate:g}, the default, was chosen on small models; with "
            f"{parameters / 1e9:.1f} billion parameters start at 1e-4 or below, and raise it "
            "while kl rises slowly"
        )

    def as_role(
        self, load: LoadConfig, schedule: ScheduleConfig, *, only_optimize_lora: bool
    ) -> Role:
        """The role, without dropout: old and new log-probabilities need one network."""
        loading = {n: getattr(self, n) for n in ("model_name_or_path", "gradient_checkpointing")}
        lora = {n: getattr(self, n) for n in LoraConfig.__dataclass_fields__ if hasattr(self, n)}
        base, adapter = self.ruled or (self.learning_rate, self.lora_learning_rate)
        optim = OptimConfig(
            **vars(schedule),
            learning_rate=base,
            lora_learning_rate=adapter,
            expert_learning_rate=self.expert_learning_rate,
            weight_decay=self.weight_decay,
        )
        return Role(
            f"{self.role}_",
            self.task,
            ModelConfig(**vars(load), **loading),
            LoraConfig(**lora, only_optimize_lora=only_optimize_lora),
            optim,
            self.zero_stage,
        )


@dataclass(frozen=True)
class CriticConfig(RoleConfig):
    """The critic, and the reward model."""

    task: ClassVar[Task] = "SEQ_CLS"
    model_name_or_path: str | None = option(
        None,
        help="reward model (output of step 2) that scores responses; the critic is initialised "
        "from it",
    )


class ReferenceOptions(Protocol):
    """Options of an add-on by which an algorithm has another reference than the actor as it was."""

    role: ClassVar[str]  # what a run calls it, which the options of its model begin with
    rates: ClassVar[tuple[str, float]]  # the stage whose rule of rates holds, and its factor

    @property
    def model_name(self) -> str | None:
        """Of its model, or a server; None: it is the actor as it was."""

    @property
    def bits(self) -> int | None:
        """Of its base; None: as others."""

    @property
    def is_served(self) -> bool:
        """Whether it is not among the roles, but gives log-probabilities by itself."""

    @property
    def own_prompts(self) -> str:
        """The option by which it reads other prompts than the actor; empty: there is none."""

    @property
    def unweighed(self) -> str:
        """The option of a loss that importance weights have no part in; empty: there is none."""

    def model(self, load: LoadConfig) -> ModelConfig:
        """Options of loading its model."""

    def logit_bytes(self, config: Any) -> int | None:
        """Bytes for each logit of a chunk that a loss of its own takes; None: it has no such."""

    def scorer(self) -> object:
        """The :class:`~dschat_lora.rl.score.scores.Scorer` of runs that nothing else scores."""

    def load(
        self, config: Any, tokenizer: "Tokenizer", sources: "Sources", run: "OpenRun[Any]"
    ) -> object:
        """The :class:`~dschat_lora.rl.learn.reference.Reference` of a run; call on every rank.

        ``config`` is an ``RlhfConfig``, ``sources`` are those of its models.
        """


@contextmanager
def option_errors_for(role: str) -> Iterator[None]:
    """Name the options of this role in ValueErrors of the block, such as --actor_lora_dim."""
    try:
        yield
    except ValueError as error:
        words = str(error)
        for name in RoleConfig.__dataclass_fields__:
            words = re.sub(rf"--{name}\b", f"--{role}_{name}", words)
        raise ValueError(words) from error
