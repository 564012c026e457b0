"""The options of each stage, composed of groups."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from dschat_lora.config.addons import addon_options, groups_of, provided_name, value_names
from dschat_lora.config.data import DataConfig, DataKind, parse_variables
from dschat_lora.config.groups import (
    BatchConfig,
    Dtype,
    LoadConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    require,
    require_numbers,
)
from dschat_lora.config.options import (
    ELSEWHERE,
    accepted,
    command_line,
    flatten,
    given_options,
    group,
    hidden,
    option,
)
from dschat_lora.config.roles import MODEL, Role, Task


@dataclass(frozen=True)
class PairConfig:
    section = "preferences"

    num_padding_at_beginning: int = accepted(1, "; nothing is guessed from padding")
    share_prompt: bool = option(
        True,
        help="compute the common prompt of a pair once (no-: once per answer)",
    )


@dataclass(frozen=True)
class RewardConfig:
    section = "preferences"

    reward_loss: Literal["bradley_terry", "per_token"] = option(
        "bradley_terry",
        help="loss of the reward model; bradley_terry compares the scores at the ends of the two "
        "answers; per_token is DeepSpeed-Chat's loss\nwhich compares them at each token from "
        "the first difference on",
    )
    center_rewards_coefficient: float = option(
        0.0,
        help="coefficient of the squared sum of a pair's scores, which keeps scores centered "
        "around 0",
    )

    def __post_init__(self) -> None:
        require_numbers(self, ">= 0", "center_rewards_coefficient")
        if self.center_rewards_coefficient and self.reward_loss == "per_token":
            raise ValueError(
                f"--center_rewards_coefficient {self.center_rewards_coefficient:g} is for "
                "--reward_loss bradley_terry"
            )


_DPO = ("sigmoid", "ipo", "hinge")
PAIR_LOSSES = (*_DPO, "orpo", "simpo")
# Losses of single answers that are good or bad, all of them with a reference.
ANSWER_LOSSES = value_names("answer_loss")
_WITH_REFERENCE = (*_DPO, *ANSWER_LOSSES)
if TYPE_CHECKING:
    LossType = str
else:
    LossType = Literal[(*PAIR_LOSSES, *ANSWER_LOSSES)]
SIMPO_BETA = 2.0
# Losses that an option is for, where it is not for all of them.
LOSSES_OF_OPTION: Mapping[str, tuple[str, ...]] = {
    "label_smoothing": ("sigmoid", "simpo"),
    "length_normalization": _DPO,
    "rpo_alpha": (*_DPO, "simpo"),
    "simpo_gamma": ("simpo",),
    "share_prompt": PAIR_LOSSES,
    "precompute_ref_log_probs": _WITH_REFERENCE,
    "offload_reference_model": _WITH_REFERENCE,
}


@dataclass(frozen=True)
class DpoConfig:
    section = "preferences"

    beta: float = option(
        0.1,
        help="strength of the KL constraint to the reference; a larger beta keeps the policy "
        "closer\norpo: weight of the odds ratio; simpo: scale of the rewards, by default "
        f"{SIMPO_BETA:g}",
    )
    loss_type: LossType = option(
        "sigmoid",
        help="loss of pairs, where sigmoid is DPO's original"
        + "".join(f", or of single answers: {name}" for name in ANSWER_LOSSES)
        + "\nipo is IPO's squared loss, hinge that of SLiC; orpo and simpo use no reference"
        + "".join(f"; {name} takes single answers labelled good or bad" for name in ANSWER_LOSSES),
    )
    label_smoothing: float = option(
        0.0,
        help="label smoothing: assumed fraction of wrong labels (conservative DPO, simpo), in [0, "
        "0.5)",
    )
    simpo_gamma: float = option(
        0.5, help="simpo: target margin between the rewards of the chosen and the rejected answer"
    )
    length_normalization: bool = option(
        False,
        help="compare log-ratios per token instead of per answer; ipo, orpo and simpo always do",
    )
    rpo_alpha: float = option(
        0.0, help="weight of the chosen answer's per-token NLL loss, added to the pair's loss"
    )
    precompute_ref_log_probs: bool = option(
        True,
        help="compute the reference's log-probabilities once before training (no-: at each step)",
    )
    offload_reference_model: bool = accepted(False, "; the reference is never a second model")

    def __post_init__(self) -> None:
        require_numbers(self, "> 0", "beta")
        require_numbers(self, ">= 0", "rpo_alpha", "simpo_gamma")
        # Of what is installed.
        provided_name("answer_loss", self.loss_type, shown=f"--loss_type {self.loss_type}")
        smoothing = self.label_smoothing
        require(0 <= smoothing < 0.5, "label_smoothing", smoothing, "in [0, 0.5)")

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with the model before training."""
        return self.loss_type in _WITH_REFERENCE

    @property
    def is_unpaired(self) -> bool:
        """Whether the loss is of single answers, and not of pairs."""
        return self.loss_type in ANSWER_LOSSES


_FIXED_OF_ROLES = (
    *("lora_dim", "lora_alpha", "use_rslora", "target_modules", "lora_module_name"),
    *("expert_lora_dim", "expert_lora_alpha"),
)
# What the state means depends on these; their values cannot change on the way.
_FIXED = frozenset(
    (
        *_FIXED_OF_ROLES,
        *("train_bias", "modules_to_save", "enable_lora", "only_optimize_lora"),
        *("add_eot_token", "eot_token", "base_bits", "rope_scaling"),
        *("max_seq_len", "overlong", "bad_rows", "train_on_prompt", "packing", "data_split"),
        "train_empty_think",
        *("chat_template_kwargs", "data_weights", "columns", "unpaired_rows", "eval_ratio"),
        *("seed", "tokens_per_device", "max_source_rows"),
        *("label_smooth", "correct_bias", "decay_after_update", "scheduler_counts_micro_steps"),
        *("reward_loss", "center_rewards_coefficient", "share_prompt"),
        *("beta", "loss_type", "label_smoothing", "length_normalization", "rpo_alpha"),
        "simpo_gamma",
        *(f"{role}_{name}" for role in ("actor", "critic") for name in _FIXED_OF_ROLES),
        *("max_prompt_seq_len", "max_answer_seq_len", "num_generations", "ppo_epochs", "algorithm"),
        *("reward_function", "reward_scaling", "unsupervised_dataset_name", "enable_ema"),
    )
)


_BY_MICRO_BATCH = (
    *("dropout", "lora_dropout", "neftune_noise_alpha", "router_aux_loss_coef"),
    "scheduler_counts_micro_steps",
)


def too_long(length: int, limit: int) -> str:
    """The message where ``--max_seq_len`` is more than the positions of the model."""
    return f"--max_seq_len is {length}, but the model has {limit} positions"


@dataclass(frozen=True)
class StageConfig:
    """Options of every stage: how long it trains, on how many processes, and where it writes."""

    when: ClassVar[Mapping[str, str]] = {}  # in place of what options and groups say
    stage: ClassVar[str]  # its name: of its runs, its directory and its command
    phase: ClassVar[int] = 1  # of --data_split
    text_column: ClassVar[str | None] = None  # that texts alone are in, in Python
    micro_batch: ClassVar[str] = "per_device_train_batch_size"  # option of its rows

    optim: ScheduleConfig = group(ScheduleConfig)
    parallel: ParallelConfig = group(ParallelConfig)
    run: RunConfig = group(RunConfig)
    batch: Any = hidden(None)  # each stage's own
    given: frozenset[str] = given_options()
    # the checkpoint to resume from; "" for a fresh start, None until it is resolved
    checkpoint: str | None = hidden(None)
    rejected: tuple[str, ...] = hidden(())  # damaged checkpoints that were passed over

    @property
    def fixed(self) -> frozenset[str]:
        """Options that cannot change on resuming, those of add-ons in ``fixed`` of their class."""
        return _FIXED.union(*(own.fixed for own in groups_of(self, "fixed")))

    @property
    def rows(self) -> Mapping[str, tuple[str, ...]]:
        """Options whose product with the processes a resumed run keeps, by name in its identity.

        They are the rows of a process, if rows are counted, and how often.
        """
        raise NotImplementedError

    @property
    def kind(self) -> DataKind:
        """What it makes of rows."""
        return "samples"

    if TYPE_CHECKING:  # fields, or properties, of each stage

        @property
        def load(self) -> LoadConfig:
            """How all models are loaded."""

        @property
        def data(self) -> Any:
            """The rows: a ``DataConfig`` or a ``PromptConfig``."""

    @cached_property
    def roles(self) -> Mapping[str, Role]:
        """The models that have options of training, by name."""
        raise NotImplementedError

    @property
    def trained(self) -> Mapping[str, Role]:
        """Those of the ``roles`` that train in this run; the first is the one that answers."""
        return self.roles

    def model_of(self, role: str) -> ModelConfig:
        """Options of loading the model of a role, trained or not."""
        return self.roles[role].model

    def fitted(self, limit: int) -> Self:
        """With lengths of rows that models of so many positions have room for.

        Raises:
            ValueError: if longer ones were typed.
        """
        raise NotImplementedError

    @property
    def rule_of_rates(self) -> tuple[str, float | None]:
        """The stage whose published rule of rates holds, and its factor if that has none."""
        return self.stage, None

    def logit_bytes(self, role: str) -> int | None:
        """Bytes for each logit of a chunk, of a loss over whole distributions; None: of others."""
        return None

    def naming_options_of(self, role: str) -> AbstractContextManager[None]:
        """A context in which ValueErrors name the options of a role as this stage calls them."""
        return nullcontext()

    @property
    def micro_batch_size(self) -> int:
        """Rows of a micro-batch on a device."""
        rows: int = getattr(self.batch, self.micro_batch)
        return rows

    @property
    def max_row_tokens(self) -> int:
        """Most tokens of a row: of one sample or, where pairs are compared, of two sequences."""
        return self.data.max_seq_len * (2 if self.kind == "pairs" else 1)

    @property
    def bound_to_micro_batches(self) -> str | None:
        """The option by which a step is another one where its rows are divided otherwise, if any.

        With it numbers are drawn, means are taken, or a schedule is counted by micro-batches.
        """
        return None


@dataclass(frozen=True)
class SupervisedConfig(StageConfig):
    """Options of a supervised stage: model, data, optimizer and output."""

    everyday: ClassVar[Sequence[str]] = ()
    stage: ClassVar[str] = "sft"
    text_column: ClassVar[str | None] = "text"
    task: ClassVar[Task] = "CAUSAL_LM"  # of the model
    starts_from: ClassVar[tuple[Task, ...]] = ("CAUSAL_LM",)
    model: ModelConfig = group(ModelConfig)
    lora: LoraConfig = group(LoraConfig)
    data: DataConfig = group(DataConfig)
    batch: BatchConfig = group(BatchConfig)
    optim: OptimConfig = group(OptimConfig)
    addons: Any = group(addon_options("sft", vars(), StageConfig))

    @property
    def load(self) -> ModelConfig:
        return self.model

    @cached_property
    def roles(self) -> Mapping[str, Role]:
        """The one model."""
        stage = self.parallel.zero_stage
        return {MODEL: Role("", self.task, self.model, self.lora, self.optim, stage)}

    @property
    def rows(self) -> Mapping[str, tuple[str, ...]]:
        """The rows of an optimizer step, or its micro-batches of so many tokens."""
        if self.batch.tokens_per_device:
            return {"rows_per_step": ("gradient_accumulation_steps",)}
        return {"rows_per_step": ("per_device_train_batch_size", "gradient_accumulation_steps")}

    @property
    def bound_to_micro_batches(self) -> str | None:
        """Dropout and noise, means over experts or unpaired answers, and NLG's schedule."""
        values = flatten(self)
        if self.kind == "unpaired":
            return "loss_type"
        return next((name for name in _BY_MICRO_BATCH if values.get(name)), None)

    def fitted(self, limit: int) -> Self:
        length = self.data.max_seq_len
        if length > limit and "max_seq_len" in self.given:
            raise ValueError(too_long(length, limit))
        return replace(self, data=replace(self.data, max_seq_len=min(length, limit)))

    def settled(self) -> Self:
        """With what its own options settle among themselves.

        Raises:
            ValueError: where they contradict each other.
        """
        return self


_SFT_ONLY = (
    *("train_on_prompt", "sft_only_data_path", "unpaired_rows"),
    *("router_aux_loss_coef", "neftune_noise_alpha"),
)


@dataclass(frozen=True)
class RewardStageConfig(SupervisedConfig):
    """Options of step 2, which trains a reward model on pairs."""

    everyday: ClassVar[Sequence[str]] = ("reward_loss",)
    stage: ClassVar[str] = "reward"
    text_column: ClassVar[str | None] = None
    phase: ClassVar[int] = 2
    task: ClassVar[Task] = "SEQ_CLS"
    starts_from: ClassVar[tuple[Task, ...]] = ("CAUSAL_LM", "SEQ_CLS")
    when: ClassVar[Mapping[str, str]] = dict.fromkeys((*_SFT_ONLY, "sample_generations"), ELSEWHERE)
    data: DataConfig = group(DataConfig, packing=False)
    pairs: PairConfig = group(PairConfig)
    reward: RewardConfig = group(RewardConfig)
    addons: Any = group(addon_options("reward", vars(), SupervisedConfig))

    @property
    def kind(self) -> DataKind:
        return "pairs"


@dataclass(frozen=True)
class DpoStageConfig(SupervisedConfig):
    """Options of DPO, which trains a policy on pairs."""

    everyday: ClassVar[Sequence[str]] = ("loss_type", "beta")
    stage: ClassVar[str] = "dpo"
    text_column: ClassVar[str | None] = None
    phase: ClassVar[int] = 2
    when: ClassVar[Mapping[str, str]] = dict.fromkeys(_SFT_ONLY, ELSEWHERE)
    data: DataConfig = group(DataConfig, packing=False)
    optim: OptimConfig = group(OptimConfig, learning_rate=1e-6, default_lora_learning_rate=1e-5)
    pairs: PairConfig = group(PairConfig)
    dpo: DpoConfig = group(DpoConfig)
    addons: Any = group(addon_options("dpo", vars(), SupervisedConfig))

    @property
    def kind(self) -> DataKind:
        return "unpaired" if self.dpo.is_unpaired else "pairs"

    def settled(self) -> Self:
        """With the published beta of SimPO where none is given.

        Raises:
            ValueError: at an option that the loss has no use for, or if the reference would have
                to be a second model.
        """
        values, dpo = flatten(self), self.dpo
        for name, losses in LOSSES_OF_OPTION.items():
            is_off = values[name] == 0 and not isinstance(values[name], bool)
            if name in self.given and dpo.loss_type not in losses and not is_off:
                typed = " ".join(command_line({name: values[name]}))
                allowed = " or ".join([", ".join(losses[:-1])] * (len(losses) > 1) + [losses[-1]])
                raise ValueError(f"{typed} is for --loss_type {allowed}, not {dpo.loss_type}")
        adapter_alone = self.lora.lora_dim > 0 and self.lora.only_optimize_lora
        if not (dpo.precompute_ref_log_probs or adapter_alone):
            raise ValueError(
                "--no-precompute_ref_log_probs computes the reference with the initial adapter on "
                "the frozen base; if base weights are trained, use --precompute_ref_log_probs"
            )
        if dpo.loss_type == "simpo" and "beta" not in self.given:
            return replace(self, dpo=replace(dpo, beta=SIMPO_BETA))
        return self


@dataclass(frozen=True)
class InferenceConfig:
    """Loading of trained models that are not trained further, and their chat template."""

    dtype: Dtype = option("auto", help="compute dtype; auto: as in training")
    attn_implementation: Literal["auto", "sdpa", "eager"] = option(
        "auto",
        help="attention implementation of transformers; auto: sdpa if the model supports it, else "
        "eager",
    )
    base_bits: Literal[16, 4] | None = option(
        None,
        help="bits of the base weights: 16, or 4 (NF4); default: as the adapter was trained",
    )
    trust_remote_code: bool = option(False, help="allow running model code from a hub repository")
    chat_template: str | None = option(
        None, help="Jinja file with a chat template, instead of the tokenizer's own"
    )
    chat_template_kwargs: str | None = option(
        None, help="JSON object of variables for the chat template, as in training"
    )

    def __post_init__(self) -> None:
        parse_variables(self.chat_template_kwargs)

    def model(self, model_name_or_path: str | None = None) -> ModelConfig:
        """Options of loading this model."""
        own = {name: value for name, value in vars(self).items() if name != "chat_template_kwargs"}
        return ModelConfig(model_name_or_path=model_name_or_path, **own)
