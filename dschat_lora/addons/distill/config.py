"""Options of a teacher and of what is learnt from it, and their checks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from dschat_lora.config.groups import LoadConfig, ModelConfig, require, require_numbers
from dschat_lora.config.options import option
from dschat_lora.rl.options.names import is_remote

if TYPE_CHECKING:
    from dschat_lora.rl.options.config import RlhfConfig

DistillLoss = Literal["reverse_kl", "forward_kl", "jsd", "sampled_reverse_kl"]


@dataclass(frozen=True)
class TeacherConfig:
    """The teacher of ``--algorithm distill``, and what is learnt from it."""

    role: ClassVar[str] = "teacher"
    # Of its rule of rates: tinker-cookbook's recipe has 1e-4 on Qwen3-8B, by this times SFT's.
    rates: ClassVar[tuple[str, float]] = ("distill", 0.21)

    teacher_model_name_or_path: str | None = option(
        None,
        help="teacher: a model, run or adapter, or a server's http://HOST:PORT/v1; default: the "
        "initial actor, with --teacher_system_prompt\nused by --algorithm distill; a run, an "
        "adapter, a model directory or a hub name, with the actor's tokenizer; an adapter on "
        "the actor's base shares its weights; a server is vLLM or `dschat-lora serve`, with "
        "#NAME if it has several models",
    )
    teacher_bits: Literal[16, 4] | None = option(
        None, help="bits of the teacher's base, 16 or 4 (NF4); default: as for --base_bits"
    )
    teacher_system_prompt: str | None = option(
        None,
        help="system message put before each prompt for the teacher, but not for the actor",
    )
    distill_loss: DistillLoss = option(
        "reverse_kl",
        help="divergence from the teacher\nper token over the whole vocabulary: reverse_kl, "
        "forward_kl or jsd (generalised, GKD); or sampled_reverse_kl, estimated from the "
        "sampled tokens and used as their advantage",
    )
    jsd_beta: float = option(
        0.5,
        help="interpolation coefficient of --distill_loss jsd: the teacher's weight in the "
        "mixture, in (0, 1)",
        when="distill_loss=jsd",
    )
    distill_top_k: int = option(
        0,
        help="number of the teacher's most likely tokens over which the divergence is computed; "
        "all others are treated as one token; 0: the whole vocabulary",
    )
    on_policy_share: float = option(
        1.0,
        help="fraction of the responses that the actor generates, in [0, 1]\nthe others are "
        "completions from the data (GKD's lambda)",
    )

    def __post_init__(self) -> None:
        require(0 < self.jsd_beta < 1, "jsd_beta", self.jsd_beta, "in (0, 1)")
        require_numbers(self, "in [0, 1]", "on_policy_share")
        require_numbers(self, ">= 0", "distill_top_k")
        if self.distill_top_k and self.beta is None:
            raise ValueError(
                f"--distill_top_k {self.distill_top_k} applies to divergences over the "
                "vocabulary, not to --distill_loss sampled_reverse_kl; remove one of them"
            )
        if self.on_policy_share < 1 and self.beta is None:
            raise ValueError(
                f"--on_policy_share {self.on_policy_share:g} trains on answers that the actor did "
                "not sample, which --distill_loss sampled_reverse_kl does not support: use "
                f"{', '.join(get_args(DistillLoss)[:3])}"
            )
        if self.on_policy_share < 1 and self.teacher_system_prompt is not None:
            raise ValueError(
                f"--on_policy_share {self.on_policy_share:g} and --teacher_system_prompt cannot "
                "be combined: the teacher's prompts are built for answers that the actor samples; "
                "remove one of them"
            )
        if self.server is not None and self.beta is not None:
            raise ValueError(
                f"--distill_loss {self.distill_loss} needs the teacher's whole vocabulary, and "
                f"the server {self.server[0]} returns probabilities of the sampled tokens only: "
                "use sampled_reverse_kl"
            )
        if self.server is not None and self.teacher_bits is not None:
            raise ValueError(
                f"--teacher_bits {self.teacher_bits} applies to a teacher in memory, not to that "
                f"of the server {self.server[0]}: remove it"
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
        """That of ``divergence.generalized_jsd``; None: none is used."""
        return {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": self.jsd_beta}.get(self.distill_loss)

    def model(self, load: LoadConfig) -> ModelConfig:
        """Options of loading the teacher, without dropout."""
        options = vars(load) | ({"base_bits": self.teacher_bits} if self.teacher_bits else {})
        return ModelConfig(**options, model_name_or_path=self.teacher_model_name_or_path)

    @property
    def model_name(self) -> str | None:
        return self.teacher_model_name_or_path

    @property
    def bits(self) -> int | None:
        return self.teacher_bits

    @property
    def is_served(self) -> bool:
        return self.server is not None

    @property
    def own_prompts(self) -> str:
        return "" if self.teacher_system_prompt is None else "--teacher_system_prompt"

    @property
    def unweighed(self) -> str:
        return "" if self.beta is None else f"--distill_loss {self.distill_loss}"

    def logit_bytes(self, config: "RlhfConfig") -> int | None:
        """Of tables in fp32, as torch's profiler counts them.

        They are those of both models, their logarithms, and what the backward pass makes.
        """
        if self.beta is None:
            return None
        return 4 * (9 + 4 * (0 < self.beta < 1) + 3 * (config.ppo.entropy_coef > 0))
