"""Options of step 3: two trained roles, rollouts, rewards and the update."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from dschat_lora.config.data import DataConfig, SourceConfig
from dschat_lora.config.groups import (
    LoadConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ScheduleConfig,
    Switch,
    require,
    require_numbers,
)
from dschat_lora.config.options import group, hidden, option
from dschat_lora.config.stages import StageConfig
from dschat_lora.rlhf.algorithms import (
    ALGORITHMS,
    Algorithm,
    AlgorithmName,
    KlEstimator,
    KlPlace,
    LossNormalization,
    by_algorithm,
)
from dschat_lora.rlhf.builtin_rewards import builtin_function, is_builtin

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class RoleConfig:
    """A model that trains: the actor or the critic."""

    role: str = hidden("actor")
    model_name_or_path: str | None = option(
        None,
        help="the actor: output of SFT, a model directory or hub name; the critic: output of the "
        "reward model's training, which scores answers and is where the critic starts",
    )
    lora_dim: int = option(
        0, help="rank of a new adapter; an adapter that is there is continued; 0 trains all weights"
    )
    lora_alpha: float = option(32.0, help="the update is scaled by lora_alpha / lora_dim")
    use_rslora: bool = option(False, help="scale by lora_alpha / sqrt(lora_dim)")
    target_modules: tuple[str, ...] = option(
        ("all-linear",),
        help="layers to adapt: all-linear, name endings, or one regular expression",
    )
    lora_module_name: str | None = option(
        None, help="adapt the linear layers whose name contains this (DeepSpeed-Chat's rule)"
    )
    learning_rate: float = option(9.65e-6, help="peak rate of base weights, where they train")
    lora_learning_rate: float = option(5e-4, help="peak rate of the adapter")
    weight_decay: float = option(0.0, help="decoupled weight decay; biases and norms exempt")
    zero_stage: Literal[0, 1, 2, 3] | None = option(
        None, help="ZeRO stage of this role; default: --zero_stage"
    )
    gradient_checkpointing: Switch = option(
        "auto",
        help="recompute activations in the backward pass instead of keeping them; without a value "
        "on, auto: where they would not fit the memory by estimate",
    )
    dropout: float = option(
        0.0, help="accepted from DeepSpeed-Chat; old and new log-probabilities need one network"
    )

    def __post_init__(self) -> None:
        role = self.role
        require(self.lora_dim >= 0, f"{role}_lora_dim", self.lora_dim, ">= 0 (0 disables LoRA)")
        require(bool(self.target_modules), f"{role}_target_modules", (), "one name or more")
        rates = ("learning_rate", "lora_learning_rate")
        require_numbers(self, "> 0", "lora_alpha", *rates, prefix=f"{role}_")
        require_numbers(self, ">= 0", "weight_decay", prefix=f"{role}_")
        require_numbers(self, "in [0, 1)", "dropout", prefix=f"{role}_")

    def lora(self, only_optimize_lora: bool) -> LoraConfig:
        """Its adapter, without dropout: old and new log-probabilities need one network."""
        return LoraConfig(
            lora_dim=self.lora_dim,
            lora_alpha=self.lora_alpha,
            use_rslora=self.use_rslora,
            target_modules=self.target_modules,
            lora_module_name=self.lora_module_name,
            only_optimize_lora=only_optimize_lora,
        )

    def model(self, load: LoadConfig) -> ModelConfig:
        """Options of loading its model, without dropout."""
        return ModelConfig(**vars(load), model_name_or_path=self.model_name_or_path)

    def optim(self, schedule: ScheduleConfig) -> OptimConfig:
        """Options of its optimizer."""
        return OptimConfig(
            **vars(schedule),
            learning_rate=self.learning_rate,
            lora_learning_rate=self.lora_learning_rate,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True)
class PromptConfig(SourceConfig):
    """Prompts and their length."""

    max_prompt_seq_len: int = option(256, help="longer prompts follow --overlong")
    max_answer_seq_len: int = option(256, help="most tokens of a response")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, ">= 1", "max_prompt_seq_len", "max_answer_seq_len")

    @property
    def max_seq_len(self) -> int:
        """Most tokens of prompt and response together."""
        return self.max_prompt_seq_len + self.max_answer_seq_len

    @property
    def data(self) -> DataConfig:
        """The prompts as data to prepare."""
        source = {name: getattr(self, name) for name in SourceConfig.__dataclass_fields__}
        return DataConfig(**source, max_seq_len=max(2, self.max_prompt_seq_len), packing=False)


@dataclass(frozen=True)
class RolloutConfig:
    """Number of responses, and sampling."""

    per_device_generation_batch_size: int = option(
        16, help="responses generated at a time on a device"
    )
    generation_batches: int = option(1, help="generation batches of one iteration")
    per_device_training_batch_size: int = option(
        16, help="responses per device and micro-batch of the update"
    )
    gradient_accumulation_steps: int = option(1, help="micro-batches per optimizer step")
    tokens_per_device: int = option(
        0,
        help="cut the responses of a step into micro-batches of up to so many tokens per device, "
        "instead of so many responses; 0: by responses",
    )
    num_generations: int = option(
        1,
        help="responses to each prompt; 2 or more but for ppo and reinforce_pp, which do not "
        "compare them",
    )
    merge_for_rollouts: bool = option(
        False,
        help="generate with the adapter added to copies of the weights it adapts: faster on a GPU, "
        "in exchange for their memory; sampler_error shows how far rounding moves the policy",
    )
    do_sample: bool = option(True, help="sample responses (no-: the likeliest token, greedy)")
    temperature: float = option(1.0, help="of sampling and of all log-probabilities")
    top_p: float = option(1.0, help="sample from the likeliest tokens of this probability mass")
    top_k: int = option(0, help="sample from this many likeliest tokens; 0: all")
    stop_tokens: tuple[str, ...] = option(
        (), help="tokens that end a response, beside those of tokenizer, template and model"
    )
    stop_strings: tuple[str, ...] = option(
        (), help="texts that end a response with the token that completes them"
    )

    def __post_init__(self) -> None:
        rollout = ("per_device_generation_batch_size", "generation_batches", "num_generations")
        update = ("per_device_training_batch_size", "gradient_accumulation_steps")
        require_numbers(self, ">= 1", *rollout, *update)
        require_numbers(self, ">= 0", "tokens_per_device")
        require(
            self.temperature > 0, "temperature", self.temperature, "> 0 (greedy: --no-do_sample)"
        )
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        require_numbers(self, ">= 0", "top_k")
        for name in ("stop_tokens", "stop_strings"):
            require(all(getattr(self, name)), name, "", "texts that are not empty")
        at_a_time = self.per_device_generation_batch_size
        if self.num_generations > at_a_time:
            raise ValueError(
                f"--num_generations {self.num_generations} responses to a prompt are generated at "
                f"a time: --per_device_generation_batch_size {at_a_time} must be as many"
            )
        own = at_a_time * self.generation_batches
        if own % self.num_generations:
            raise ValueError(
                f"--num_generations {self.num_generations} must divide the {own} responses of an "
                "iteration (--per_device_generation_batch_size x --generation_batches)"
            )


@dataclass(frozen=True)
class RewardsConfig:
    """Rewards of responses, and their scale."""

    reward_function: tuple[str, ...] = option(
        (),
        help="module:function that scores responses, one or several, instead of the reward model "
        "or added to it; builtin:NAME for one that comes along",
    )
    reward_weights: tuple[float, ...] = option(
        (),
        help="weight of each reward function in the sum of scores, and last that of the reward "
        "model, if there is one; 1 each by default",
    )
    reward_batch: Literal["all", "group"] = option(
        "all",
        help="responses of a call: all that a process has, or those to one prompt",
    )
    reward_retries: int = option(0, help="further calls of a reward function that failed")
    reward_timeout: float = option(
        0.0, help="seconds that a call of a reward function may take; 0: as many as it likes"
    )
    clip_reward_value: float = option(
        5.0, help="scores are clipped to this absolute value once they are scaled; 0: never"
    )
    reward_scaling: Literal["none", "running", "initial"] = option(
        "initial",
        help="running: divide scores by their standard deviation so far; initial: by that of the "
        "first iteration's scores, after subtracting their mean; the critic starts in these units "
        "(with none and running in those of the reward model)",
    )
    judge_function: str | None = option(
        None,
        help="module:function that judges held-out responses at evaluations; never trained on",
    )
    missing_eos_penalty: float = option(
        0.0, help="subtracted from the score of a response that was cut off"
    )
    soft_overlong_tokens: int = option(
        0,
        help="scores fall by up to 1 over this many last tokens of --max_answer_seq_len (DAPO's "
        "soft overlong punishment; dapo: a fifth of them); 0: never",
    )

    def __post_init__(self) -> None:
        require_numbers(self, ">= 0", "clip_reward_value", "missing_eos_penalty")
        require_numbers(self, ">= 0", "soft_overlong_tokens")
        require_numbers(self, ">= 0", "reward_retries", "reward_timeout")
        if isinstance(self.reward_function, str):
            object.__setattr__(self, "reward_function", (self.reward_function,))
        judges = () if self.judge_function is None else (self.judge_function,)
        self._check_names("reward_function", self.reward_function)
        self._check_names("judge_function", judges)
        count, weights = len(self.reward_function), self.reward_weights
        if weights and len(weights) not in (count, count + 1):
            raise ValueError(
                f"--reward_weights has {len(weights)} weights for {count} functions of "
                "--reward_function: give one for each, and last one for the reward model, if any"
            )
        require(all(map(math.isfinite, weights)), "reward_weights", weights, "finite numbers")

    def _check_names(self, option: str, names: tuple[str, ...]) -> None:
        for name in names:
            if is_builtin(name):
                builtin_function(name)
                continue
            usable = _FUNCTION.fullmatch(name) is not None
            require(usable, option, name, "module:function such as my_rewards:is_right")


@dataclass(frozen=True)
class PpoConfig:
    """The update: PPO, RLOO, GRPO and what came after them."""

    algorithm: AlgorithmName = option(
        "ppo",
        help="ppo has a critic; reinforce_pp has none; the others compare the responses to a "
        "prompt",
    )
    ppo_epochs: int = option(1, help="passes over the responses of an iteration")
    kl_coef: float = by_algorithm("weight of the divergence from the reference (0.1 or 0)")
    kl_estimator: KlEstimator = by_algorithm("estimator of the divergence at a token")
    kl_in: KlPlace = by_algorithm(
        "where the divergence is paid: in the reward of each token, or in the loss"
    )
    adaptive_kl_target: float = option(
        0.0, help="nats per response that kl_coef is steered towards; 0: kl_coef stays"
    )
    kl_horizon: int = option(10000, help="responses over which kl_coef adapts")
    gamma: float = option(1.0, help="discount of later rewards, in [0, 1]")
    lam: float = option(0.95, help="bias and variance of advantages (GAE), in [0, 1]")
    cliprange: float = by_algorithm(
        "bound on the change of a token's probability ratio, fall and rise alike (0.2)"
    )
    cliprange_low: float = by_algorithm("bound on the fall of the ratio, if not --cliprange")
    cliprange_high: float = by_algorithm("bound on the rise of the ratio, if not --cliprange")
    dual_clip: float = option(
        0.0, help="bound on the loss of a token with negative advantage A, -A times this; 0: none"
    )
    loss_normalization: LossNormalization = by_algorithm(
        "token: every token weighs alike; sequence: every response does; constant: divide by "
        "--max_answer_seq_len"
    )
    mask_truncated_completions: bool = by_algorithm(
        "leave responses that were cut off out of the loss (DAPO's overlong filter)"
    )
    dynamic_sampling: int = by_algorithm(
        "replace prompts whose responses all got one reward by further prompts, at most so many "
        "times an iteration; 0: never"
    )
    cliprange_value: float = option(0.2, help="bound on the change of a value")
    whiten_advantages: bool = option(
        True, help="advantages of an iteration get mean 0 and standard deviation 1"
    )
    entropy_coef: float = option(0.0, help="weight of the entropy bonus")
    target_kl: float = option(
        0.0,
        help="end an iteration's updates when the policy has moved this far from where it began "
        "(mean nats per token); 0: never",
    )

    def __post_init__(self) -> None:
        defaults = dict(vars(self.rules))
        if self.cliprange is not None:
            defaults |= {"cliprange_low": self.cliprange, "cliprange_high": self.cliprange}
        for name, field in type(self).__dataclass_fields__.items():
            if field.default is None and getattr(self, name) is None:
                object.__setattr__(self, name, defaults[name])
        require_numbers(self, ">= 1", "ppo_epochs")
        require_numbers(self, ">= 0", "kl_coef", "adaptive_kl_target", "entropy_coef", "target_kl")
        require_numbers(self, ">= 0", "dynamic_sampling")
        require_numbers(self, ">= 1", "kl_horizon")
        require_numbers(self, "in [0, 1]", "gamma", "lam")
        clips = ("cliprange", "cliprange_low", "cliprange_high", "cliprange_value")
        require_numbers(self, "> 0", *clips)
        require(not 0 < self.dual_clip <= 1, "dual_clip", self.dual_clip, "> 1, or 0 for none")
        if self.dual_clip and self.rules.loss == "cispo":
            raise ValueError(
                f"--dual_clip {self.dual_clip:g} is not of --algorithm cispo, which bounds every "
                "ratio by --cliprange_high"
            )
        if self.dynamic_sampling and not self.rules.compares:
            raise ValueError(
                f"--dynamic_sampling {self.dynamic_sampling} compares the responses to a prompt, "
                f"--algorithm {self.algorithm} does not: leave it out, or use dapo"
            )
        if self.adaptive_kl_target and not self.kl_coef:
            raise ValueError("--adaptive_kl_target scales --kl_coef, which is 0: give it a start")

    @property
    def rules(self) -> Algorithm:
        """What the algorithm is by its paper."""
        return ALGORITHMS[self.algorithm]


@dataclass(frozen=True)
class PretrainingConfig:
    """Pretraining text mixed into the update (PTX)."""

    unsupervised_dataset_name: str | None = option(
        None, help="text to mix in: files, a directory or a hub data set (name:configuration)"
    )
    unsupervised_dataset_config_name: str | None = option(
        None, help="configuration of a hub data set, as in name:configuration"
    )
    unsup_coef: float = option(27.8, help="weight of its loss per token beside the policy's")

    def __post_init__(self) -> None:
        require_numbers(self, "> 0", "unsup_coef")
        if self.unsupervised_dataset_config_name and not self.unsupervised_dataset_name:
            raise ValueError(
                f"--unsupervised_dataset_config_name {self.unsupervised_dataset_config_name} is "
                "of a data set: give its --unsupervised_dataset_name"
            )


@dataclass(frozen=True)
class ClassicConfig:
    """Further options of DeepSpeed-Chat, and of the log."""

    only_optimize_lora: bool = option(
        True, help="freeze base models that have an adapter (no-: train them too)"
    )
    enable_ema: bool = option(
        False, help="keep a moving average of the actor, written to actor_ema/"
    )
    ema_decay: float = option(0.992, help="share of the average that stays at a step")
    log_rollouts: int = option(
        128, help="responses of an iteration that are kept in rollouts.jsonl.gz; 0: none"
    )
    print_answers: bool = option(False, help="show a response at every iteration")
    print_answers_interval: int = option(10, help="iterations between shown responses; 0: never")
    enable_test_mode: bool = option(False, help="stop after --test_stop_step optimizer steps")
    test_stop_step: int = option(0, help="optimizer steps of --enable_test_mode")
    num_padding_at_beginning: int = option(
        1, help="accepted from DeepSpeed-Chat; nothing is guessed from padding"
    )
    align_overflow: bool = option(
        False, help="accepted from DeepSpeed-Chat; a loss that is not finite skips both steps"
    )
    offload_reference_model: bool = option(
        False, help="accepted from DeepSpeed-Chat; the reference shares the actor's base"
    )
    offload_reward_model: bool = option(
        False, help="accepted from DeepSpeed-Chat; the reward model shares the critic's base"
    )
    enable_hybrid_engine: bool = option(
        False, help="accepted from DeepSpeed-Chat; rollouts have a decode loop of their own"
    )
    unpin_actor_parameters: bool = option(
        False, help="accepted from DeepSpeed-Chat, for its hybrid engine"
    )
    release_inference_cache: bool = option(
        False,
        help="free the cache of keys and values before each update (by default it is kept on a "
        "GPU that has room for it)",
    )
    inference_tp_size: int = option(
        1,
        help="accepted from DeepSpeed-Chat, for its hybrid engine; 1, or --tensor_parallel_size: "
        "rollouts run on the processes that hold the model",
    )
    tp_gather_partition_size: int = option(
        8, help="accepted from DeepSpeed-Chat, for its hybrid engine"
    )
    enable_mixed_precision_lora: bool = option(
        False, help="accepted from DeepSpeed-Chat; --deepspeed_config sets quantised weights"
    )

    def __post_init__(self) -> None:
        require_numbers(self, "in [0, 1)", "ema_decay")
        require_numbers(self, ">= 0", "log_rollouts", "print_answers_interval", "test_stop_step")
        if self.enable_test_mode and not self.test_stop_step:
            raise ValueError("--enable_test_mode stops after --test_stop_step steps: give it")


@dataclass(frozen=True)
class RlhfConfig(StageConfig):
    """Options of step 3, which trains the actor on its own responses."""

    actor: RoleConfig = group(RoleConfig, flat=False, role="actor")
    critic: RoleConfig = group(RoleConfig, flat=False, role="critic", learning_rate=5e-6)
    load: LoadConfig = group(LoadConfig)
    data: PromptConfig = group(PromptConfig)
    batch: RolloutConfig = group(RolloutConfig)
    rewards: RewardsConfig = group(RewardsConfig)
    ppo: PpoConfig = group(PpoConfig)
    pretraining: PretrainingConfig = group(PretrainingConfig)
    classic: ClassicConfig = group(ClassicConfig)
    optim: ScheduleConfig = group(ScheduleConfig, num_warmup_steps=0)
    eval_prompts: int = option(
        64, help="held-out prompts answered at each evaluation, greedily and by sampling; 0: none"
    )

    def __post_init__(self) -> None:
        require_numbers(self, ">= 0", "eval_prompts")
        size, training = self.classic.inference_tp_size, self.parallel.tensor_parallel_size
        require(
            size in (1, training),
            "inference_tp_size",
            size,
            f"1 or that of --tensor_parallel_size ({training}): rollouts run on the processes that "
            "hold the model",
        )

    @property
    def free(self) -> frozenset[str]:
        """``tokens_per_device`` divides the same steps into other micro-batches."""
        return frozenset({"tokens_per_device"})

    @property
    def rows(self) -> dict[str, tuple[str, str]]:
        """The responses of an iteration and those of an optimizer step."""
        return {
            "responses": ("per_device_generation_batch_size", "generation_batches"),
            "rows_per_step": ("per_device_training_batch_size", "gradient_accumulation_steps"),
        }

    @property
    def has_critic(self) -> bool:
        """Whether a critic estimates values."""
        return self.ppo.rules.advantage == "gae"


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
