"""Options of the models of step 3, and errors that name them."""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

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
    require,
    require_numbers,
)
from dschat_lora.config.options import accepted, hidden, option
from dschat_lora.config.when import no_effect
from dschat_lora.rl.options.names import is_remote

LARGE_MODEL = 1_000_000_000  # parameters from which on the default rate of adapters is doubtful


def as_in(config: type[LoraConfig | ModelConfig], name: str, **different: Any) -> Any:
    """An option that another group has too, among the other options of its role."""
    own = config.__dataclass_fields__[name]
    return field(default=own.default, metadata={**own.metadata, **different})


def _base_rate_note(value: Callable[[str], Any]) -> str:
    """A message where a role's rate is of base weights, and its adapter alone trains."""
    rate, own, role = map(value, ("learning_rate", "lora_learning_rate", "role"))
    if not (value("lora_dim") and value("only_optimize_lora")) or rate in ("auto", own):
        return ""
    why = f": the adapter alone trains, at --{role}_lora_learning_rate {own:g}"
    return no_effect(f"{role}_learning_rate", why)


@dataclass(frozen=True)
class RoleConfig:
    """A model that trains: the actor or the critic."""

    role: str = hidden("actor")
    model_name_or_path: str | None = option(
        None,
        help="the model that answers: output of SFT, model directory or hub name",
    )
    lora_dim: int = option(
        0,
        help="rank of a new adapter; 0 trains all weights",
        settled=DEFAULT_RANK,
    )
    lora_alpha: float = as_in(LoraConfig, "lora_alpha")
    use_rslora: bool = of_adapters(False, help="scale by lora_alpha / sqrt(lora_dim)")
    expert_lora_dim: int | None = as_in(LoraConfig, "expert_lora_dim")
    expert_lora_alpha: float | None = as_in(LoraConfig, "expert_lora_alpha")
    target_modules: tuple[str, ...] = as_in(LoraConfig, "target_modules", when="lora_dim")
    lora_module_name: str | None = as_in(LoraConfig, "lora_module_name", when="lora_dim")
    learning_rate: Rate = option(
        9.65e-6,
        help="peak rate of the adapter (unless given 5e-4) or of base weights\nof the adapter "
        "where it alone trains, but in the script of training/; auto: by published rules for "
        "width and stage, that of the adapter too",
        when=_base_rate_note,
    )
    lora_learning_rate: float = of_adapters(5e-4, help="peak rate of the adapter")
    expert_learning_rate: float | None = option(
        None, help="peak rate of experts' adapters in a mixture; default: that of the adapter"
    )
    weight_decay: float = option(0.0, help="decoupled weight decay; biases and norms exempt")
    zero_stage: Literal[0, 1, 2, 3] | None = option(
        None, help="ZeRO stage of this role; default: --zero_stage"
    )
    gradient_checkpointing: Switch = as_in(ModelConfig, "gradient_checkpointing", section=None)
    dropout: float = accepted(0.0, "; old and new log-probabilities need one network")

    # of base weights and of the adapter, by auto; None until the model is known
    ruled: tuple[float, float] | None = hidden(None)

    def __post_init__(self) -> None:
        with option_errors_for(self.role):
            self.lora(only_optimize_lora=True)
            self.optim(ScheduleConfig())
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
            f"{parameters / 1e9:.1f} billion parameters start at 1e-4 or below, and raise it as "
            "long as kl rises slowly"
        )

    def lora(self, only_optimize_lora: bool) -> LoraConfig:
        """Its adapter, without dropout: old and new log-probabilities need one network."""
        own = {n: getattr(self, n) for n in LoraConfig.__dataclass_fields__ if hasattr(self, n)}
        return LoraConfig(**own, only_optimize_lora=only_optimize_lora)

    def model(self, load: LoadConfig) -> ModelConfig:
        """Options of loading its model, without dropout."""
        return ModelConfig(**vars(load), model_name_or_path=self.model_name_or_path)

    def optim(self, schedule: ScheduleConfig) -> OptimConfig:
        """Options of its optimizer."""
        base, adapter = self.ruled or (self.learning_rate, self.lora_learning_rate)
        return OptimConfig(
            **vars(schedule),
            learning_rate=base,
            lora_learning_rate=adapter,
            expert_learning_rate=self.expert_learning_rate,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True)
class CriticConfig(RoleConfig):
    """The critic, and the reward model."""

    model_name_or_path: str | None = option(
        None,
        help="reward model (output of its training), which scores answers; the critic starts from "
        "it",
    )


DistillLoss = Literal["reverse_kl", "forward_kl", "jsd", "sampled_reverse_kl"]


@dataclass(frozen=True)
class TeacherConfig:
    """The teacher of ``--algorithm distill``, and what is learnt from it."""

    section = "distillation"

    teacher_model_name_or_path: str | None = option(
        None,
        help="the teacher: a model, run or adapter, or a server's http://HOST:PORT/v1; default: "
        "the actor as it was, with --teacher_system_prompt\nof --algorithm distill; a run, an "
        "adapter, a model directory or a hub name, of the actor's tokenizer; an adapter on the "
        "actor's base shares its weights; a server of vLLM or `dschat-lora serve`, with #NAME "
        "where it has several models",
    )
    teacher_bits: Literal[16, 4] | None = option(
        None, help="bits of the teacher's base, 16 or 4 (NF4); default: as for --base_bits"
    )
    teacher_system_prompt: str | None = option(
        None,
        help="system message that the teacher reads before each prompt, and the actor does not",
    )
    distill_loss: DistillLoss = option(
        "reverse_kl",
        help="divergence from the teacher\nat each token, over the whole vocabulary: reverse_kl, "
        "forward_kl or jsd (generalised, GKD); or sampled_reverse_kl, that of the tokens drawn, as "
        "their advantage",
    )
    jsd_beta: float = option(
        0.5,
        help="the teacher's share in the mixture of --distill_loss jsd, in (0, 1)",
        when="distill_loss=jsd",
    )
    distill_top_k: int = option(
        0,
        help="tokens, the teacher's likeliest at each position, that a divergence tells apart; all "
        "others count as one; 0: the whole vocabulary",
    )
    on_policy_share: float = option(
        1.0,
        help="share of the responses that the actor draws, in [0, 1]\nthe others are answers of "
        "the data (GKD's lambda)",
    )

    def __post_init__(self) -> None:
        require(0 < self.jsd_beta < 1, "jsd_beta", self.jsd_beta, "in (0, 1)")
        require_numbers(self, "in [0, 1]", "on_policy_share")
        require_numbers(self, ">= 0", "distill_top_k")
        if self.distill_top_k and self.beta is None:
            raise ValueError(
                f"--distill_top_k {self.distill_top_k} is of divergences over the vocabulary, "
                "which --distill_loss sampled_reverse_kl has not; drop one of them"
            )
        if self.on_policy_share < 1 and self.beta is None:
            raise ValueError(
                f"--on_policy_share {self.on_policy_share:g} learns from answers that the actor "
                "did not draw, which --distill_loss sampled_reverse_kl cannot: use "
                f"{', '.join(get_args(DistillLoss)[:3])}"
            )
        if self.on_policy_share < 1 and self.teacher_system_prompt is not None:
            raise ValueError(
                f"--on_policy_share {self.on_policy_share:g} and --teacher_system_prompt: the "
                "teacher's prompts are made for answers that the actor draws; drop one of them"
            )
        if self.server is not None and self.beta is not None:
            raise ValueError(
                f"--distill_loss {self.distill_loss} needs the teacher's whole vocabulary, and the "
                f"server {self.server[0]} gives probabilities of the tokens drawn alone: use "
                "sampled_reverse_kl"
            )
        if self.server is not None and self.teacher_bits is not None:
            raise ValueError(
                f"--teacher_bits {self.teacher_bits} is of a teacher in memory, and that of the "
                f"server {self.server[0]} has its own: drop it"
            )

    @property
    def server(self) -> tuple[str, str] | None:
        """Address of the teacher's server without ``/v1``, and its model, or an empty name."""
        name = self.teacher_model_name_or_path or ""
        if not is_remote(name):
            return None
        address, _, model = name.partition("#")
        return address.rstrip("/").removesuffix("/v1").rstrip("/"), model

    @property
    def beta(self) -> float | None:
        """That of :func:`~dschat_lora.algos.distillation.generalized_jsd`; None: none is used."""
        return {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": self.jsd_beta}.get(self.distill_loss)

    def model(self, load: LoadConfig) -> ModelConfig:
        """Options of loading the teacher, without dropout."""
        options = vars(load) | ({"base_bits": self.teacher_bits} if self.teacher_bits else {})
        return ModelConfig(**options, model_name_or_path=self.teacher_model_name_or_path)


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
