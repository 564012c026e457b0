"""Options of step 3: rollouts, rewards, and all groups together."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, Self

from dschat_lora.config.addons import addon_options, groups_of, load, provided
from dschat_lora.config.classic import ClassicConfig
from dschat_lora.config.data import DataKind
from dschat_lora.config.groups import (
    LoadConfig,
    ModelConfig,
    ScheduleConfig,
    require,
    require_numbers,
)
from dschat_lora.config.options import ELSEWHERE, group, hidden, option
from dschat_lora.config.plurals import counted
from dschat_lora.config.prompts import PretrainingConfig, PromptConfig
from dschat_lora.config.roles import Role
from dschat_lora.config.stages import StageConfig
from dschat_lora.config.when import no_effect
from dschat_lora.rl.options.algorithms import PpoConfig, by_algorithm, where_rewards_teach
from dschat_lora.rl.options.engines import EngineFacts, check_engine, engine_facts, engines_help
from dschat_lora.rl.options.names import check_name, gives_one_reward
from dschat_lora.rl.options.role_config import (
    CriticConfig,
    ReferenceOptions,
    RoleConfig,
    option_errors_for,
)

GROUP_SIZE = 8  # responses to a prompt, of algorithms that compare them


of_sampling = partial(option, when="do_sample")
of_sum = partial(option, when="has_shaped_sum")
of_calls = partial(option, when="reward_function")


def _where_counted(value: Callable[[str], Any]) -> str:
    """A message where nothing here counts the responses that are decoded at a time."""
    engine, name = value("engine"), value("rollout_engine")
    if not engine.batches_itself or value("players"):
        return ""
    return no_effect("max_num_seqs", f" with --rollout_engine {name}, which batches them itself")


@dataclass(frozen=True)
class RolloutConfig:
    """Number of responses, and sampling."""

    section = "rollouts"

    per_device_generation_batch_size: int = option(
        16, help="generation batch size per device, in responses"
    )
    generation_batches: int = option(
        1,
        help="generation batches per iteration\nif no batch size is given, as many as make 64 "
        "responses over all processes",
    )
    max_num_seqs: int | Literal["auto"] = option(
        "auto",
        help="maximum number of responses decoded at a time per device; does not affect results; "
        "auto: as many as fit into free memory on a GPU, a generation batch on a CPU\nauto is "
        "a generation batch for episodes",
        when=_where_counted,
    )
    per_device_training_batch_size: int = option(
        16,
        help="training batch size per device, in responses of one micro-batch",
        section="training",
    )
    gradient_accumulation_steps: int = option(
        1, help="micro-batches per optimizer step", section="training"
    )
    tokens_per_device: int = option(
        0,
        help="maximum number of tokens per micro-batch and device, instead of a number of "
        "responses; 0: by responses",
        section="training",
    )
    num_generations: int = by_algorithm(
        "responses per prompt (8, or 1 if they are not compared)\nat least 2, except for ppo and "
        "reinforce_pp, which do not compare them; 8, or a smaller divisor of "
        "--per_device_generation_batch_size"
    )
    rollout_engine: str = option("own", help=engines_help(), runs="part")
    merge_for_rollouts: bool = option(
        False,
        help="generate with the adapter merged into copies of the adapted weights: faster on a "
        "GPU, but takes their memory; 16-bit copies are rounded stochastically (by --seed), "
        "and the metric sampler_error shows the effect on the policy",
        section="rollouts",
        when="rollout_engine=own",
    )
    refill_share: float | None = option(
        None,
        help="fraction of the responses in decoding that must have finished before the next "
        "prompts of the iteration take their places; 0: each at once (0.25 on a GPU, 0 on a "
        "CPU)",
        when="rollout_engine=own",
    )
    do_sample: bool = option(True, help="sample responses (no-: greedy decoding)")
    temperature: float = option(1.0, help="temperature of sampling and of all log-probabilities")
    top_p: float = of_sampling(
        1.0, help="sample from the most likely tokens with this total probability"
    )
    top_k: int = of_sampling(0, help="sample from this many most likely tokens; 0: all")
    stop_tokens: tuple[str, ...] = option(
        (),
        help="further tokens that end a response, in addition to those of tokenizer, template and "
        "model",
    )
    stop_strings: tuple[str, ...] = option(
        (), help="strings that end a response at the token that completes them"
    )
    rows_that_fit: int | None = hidden(None)  # by max_num_seqs auto, once the memory is known

    def __post_init__(self) -> None:
        rollout = ("per_device_generation_batch_size", "generation_batches", "num_generations")
        update = ("per_device_training_batch_size", "gradient_accumulation_steps")
        require_numbers(self, ">= 1", *rollout, *update, "max_num_seqs")
        require_numbers(self, ">= 0", "tokens_per_device", "top_k")
        require_numbers(self, ">= 1e-06 (greedy: --no-do_sample)", "temperature")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        for name in ("stop_tokens", "stop_strings"):
            require(all(getattr(self, name)), name, "", "non-empty strings")
        require_numbers(self, "in [0, 1]", "refill_share")
        check_engine(self.rollout_engine)
        if self.num_generations is None:
            return
        at_a_time = self.per_device_generation_batch_size
        if self.num_generations > at_a_time:
            raise ValueError(
                f"--num_generations {self.num_generations} responses to a prompt are generated "
                f"together: --per_device_generation_batch_size {at_a_time} must be at least as "
                "large"
            )
        if self.responses % self.num_generations:
            raise ValueError(
                f"--num_generations {self.num_generations} must divide the {self.responses} "
                "responses of an iteration (--per_device_generation_batch_size x "
                "--generation_batches)"
            )
        if self.max_num_seqs != "auto" and self.max_num_seqs < self.num_generations:
            raise ValueError(
                f"--max_num_seqs {self.max_num_seqs} must be at least the --num_generations "
                f"{counted(self.num_generations, 'response')} to a prompt"
            )

    @property
    def responses(self) -> int:
        """Responses to an iteration's prompts on a device."""
        return self.per_device_generation_batch_size * self.generation_batches

    @property
    def rows_decoded(self) -> int:
        """Responses that a device decodes at a time."""
        if self.max_num_seqs != "auto":
            return self.max_num_seqs
        return self.rows_that_fit or self.per_device_generation_batch_size

    @cached_property
    def engine(self) -> EngineFacts:
        """What the engine that draws responses says of itself."""
        return engine_facts(self.rollout_engine)

    @property
    def draws_from_policy(self) -> bool:
        """Whether responses are drawn from the very distribution that learns."""
        return self.do_sample and self.top_p == 1 and self.top_k == 0


def check_weights(weights: Sequence[float], count: int, *, has_model: bool = True) -> None:
    """Refuse ``--reward_weights`` that are neither one for each of so many rewards nor none.

    Raises:
        ValueError: naming the option.
    """
    if not weights or len(weights) == count:
        return
    counts = (
        f"--reward_weights has {counted(len(weights), 'weight')} for "
        f"{counted(count, 'function')} of --reward_function"
    )
    if len(weights) != count + 1:
        raise ValueError(
            f"{counts}: give one for each, and a last one for the reward model, if any"
        )
    if not has_model:
        raise ValueError(f"{counts}, but there is not a reward model for the last one")


@dataclass(frozen=True)
class RewardsConfig:
    """Rewards of responses, and their scale."""

    section = "rewards"

    reward_function: tuple[str, ...] = option(
        (),
        help="module:function or builtin:NAME that scores responses, with or without a reward "
        "model\none or more, with the arguments of TRL, verl or OpenRLHF; module:Class "
        "returns several named rewards; builtin:NAME is a bundled one; an http:// address is "
        "a reward server with OpenRLHF's protocol",
        runs="object",
    )
    reward_weights: tuple[float, ...] = option(
        (),
        help="weight of each reward in the sum of scores: those of a class in the order of its "
        "names, that of the reward model, if there is one, last; default: 1 each",
        when=where_rewards_teach("reward_weights"),
    )
    reward_batch: Literal["all", "group"] = of_calls(
        "all", help="responses per call: all of a process, or those to one prompt"
    )
    reward_retries: int = of_calls(
        0, help="number of retries of a failed call to a reward function or environment"
    )
    reward_timeout: float = of_calls(
        0.0,
        help="timeout in seconds of a call to a reward function or environment; 0: none",
    )
    clip_reward_value: float = of_sum(
        5.0, help="clip scaled scores to this absolute value; 0: never"
    )
    reward_scaling: Literal["none", "running", "initial"] = of_sum(
        "initial",
        help="running: divide scores by their running standard deviation; initial: subtract the "
        "mean and divide by the standard deviation of the first iterations' scores (at least "
        "64); the critic starts in these units (with none and running, in those of the reward "
        "model)",
    )
    judge_function: str | None = option(
        None,
        help="module:function that scores held-out responses in evaluations, never in training",
        runs="object",
        section="evaluation",
        when="eval_prompts",
    )
    missing_eos_penalty: float = of_sum(
        0.0, help="penalty subtracted from the score of a truncated response"
    )
    soft_overlong_tokens: int = of_sum(
        0,
        help="reduce the score linearly, by up to 1, over the last N tokens of "
        "--max_answer_seq_len (DAPO's soft overlong punishment; dapo: a fifth of them); 0: "
        "never",
    )

    def __post_init__(self) -> None:
        require_numbers(self, ">= 0", "clip_reward_value", "missing_eos_penalty")
        require_numbers(self, ">= 0", "soft_overlong_tokens", "reward_retries", "reward_timeout")
        if isinstance(self.reward_function, str):
            object.__setattr__(self, "reward_function", (self.reward_function,))
        for name in self.reward_function:
            check_name("reward_function", name)
        if self.judge_function is not None:
            check_name("judge_function", self.judge_function)
        weights = self.reward_weights
        # One of a module may give several rewards, which shows when it is imported.
        least = len(self.reward_function)
        if len(weights) < least or all(map(gives_one_reward, self.reward_function)):
            check_weights(weights, least)
        require(all(map(math.isfinite, weights)), "reward_weights", weights, "finite numbers")


@dataclass(frozen=True)
class RlhfConfig(StageConfig):
    """Options of step 3, which trains the actor on its own responses."""

    everyday: ClassVar[Sequence[str]] = (
        *("actor_model_name_or_path", "critic_model_name_or_path", "reward_function", "algorithm"),
        *("data_path", "actor_lora_dim", "actor_learning_rate", "num_generations", "kl_coef"),
        *("max_prompt_seq_len", "max_answer_seq_len", "per_device_generation_batch_size"),
        *("generation_batches", "per_device_training_batch_size", "rollout_engine"),
    )
    when: ClassVar[Mapping[str, str]] = {
        "critic_model_name_or_path": "",  # the reward model, too
        "loraplus_lr_ratio": "actor_lora_dim or critic_lora_dim",
        "merge_adapter": "actor_lora_dim",
        "eval_iters": ELSEWHERE,
        "print_loss": ELSEWHERE,
    }
    stage: ClassVar[str] = "rlhf"
    text_column: ClassVar[str | None] = "prompt"
    phase: ClassVar[int] = 3
    micro_batch: ClassVar[str] = "per_device_training_batch_size"
    actor: RoleConfig = group(RoleConfig, flat=False, section="actor", role="actor")
    critic: RoleConfig = group(
        CriticConfig,
        flat=False,
        section="critic and reward model",
        when="has_critic",
        role="critic",
        learning_rate=5e-6,
    )
    load: LoadConfig = group(LoadConfig)
    data: PromptConfig = group(PromptConfig)
    batch: RolloutConfig = group(RolloutConfig)
    rewards: RewardsConfig = group(RewardsConfig)
    ppo: PpoConfig = group(PpoConfig)
    pretraining: PretrainingConfig = group(PretrainingConfig)
    classic: ClassicConfig = group(ClassicConfig)
    optim: ScheduleConfig = group(ScheduleConfig, num_warmup_steps=0)
    eval_prompts: int = option(
        64,
        help="number of held-out prompts answered in each evaluation, greedily and by sampling; 0: "
        "none, and none are held out unless --eval_ratio is given",
        section="evaluation",
    )
    addons: Any = group(addon_options("rlhf", vars(), StageConfig))

    def __post_init__(self) -> None:
        require_numbers(self, ">= 0", "eval_prompts")
        playing = [name for own in self.players for name in own.plays]
        if len(playing) > 1:
            raise ValueError(f"--{playing[0]} and --{playing[1]} both run episodes: give one")
        if self.eval_prompts == 0 and "eval_ratio" not in self.given:
            object.__setattr__(self, "data", replace(self.data, eval_ratio=0.0))
        if self.batch.num_generations is None:
            rows = self.batch.per_device_generation_batch_size
            most = GROUP_SIZE if self.ppo.rules.compares else 1
            size = max(n for n in range(1, most + 1) if rows % n == 0)
            object.__setattr__(self, "batch", replace(self.batch, num_generations=size))
        if self.ppo.correction is not None and not self.batch.do_sample:
            cap, correction = self.ppo.importance_cap, self.ppo.rollout_correction
            given = f"--importance_cap {cap:g}" if cap else f"--rollout_correction {correction}"
            raise ValueError(
                f"{given} needs the sampling probabilities of tokens, but --no-do_sample is "
                "greedy: drop one of them"
            )

    @property
    def fixed(self) -> frozenset[str]:
        """Not ``tokens_per_device``, which divides the same steps into other micro-batches."""
        return super().fixed - {"tokens_per_device"}

    @property
    def rows(self) -> dict[str, tuple[str, str]]:
        """The responses of an iteration and those of an optimizer step."""
        return {
            "responses": ("per_device_generation_batch_size", "generation_batches"),
            "rows_per_step": ("per_device_training_batch_size", "gradient_accumulation_steps"),
        }

    @property
    def kind(self) -> DataKind:
        return "prompts"

    @cached_property
    def roles(self) -> dict[str, Role]:
        """Actor and critic."""
        only = self.classic.only_optimize_lora
        return {
            own.role: own.as_role(self.load, self.optim, only_optimize_lora=only)
            for own in (self.actor, self.critic)
        }

    @property
    def trained(self) -> dict[str, Role]:
        """The actor and, where it estimates values, the critic."""
        return {n: r for n, r in self.roles.items() if n == "actor" or self.has_critic}

    @cached_property
    def reference(self) -> ReferenceOptions | None:
        """The options of the reference that an add-on provides; None: it is the actor as it was."""
        if not (name := self.ppo.rules.reference):
            return None
        kind = load(provided("reference")[name])
        return next(own for own in vars(self.addons).values() if isinstance(own, kind))

    def model_of(self, role: str) -> ModelConfig:
        """Options of loading the model of the actor, the critic, or a reference by its own name."""
        if (own := self.reference) is not None and role == own.role:
            return own.model(self.load)
        return super().model_of(role)

    def fitted(self, limit: int) -> Self:
        data, typed = self.data, {"max_prompt_seq_len", "max_answer_seq_len"} & self.given
        if data.max_seq_len <= limit:
            return self
        if typed:
            raise ValueError(
                f"--max_prompt_seq_len {data.max_prompt_seq_len} and --max_answer_seq_len "
                f"{data.max_answer_seq_len} need {data.max_seq_len} positions, but the models "
                f"have {limit}"
            )
        half = limit // 2
        data = replace(data, max_prompt_seq_len=limit - half, max_answer_seq_len=half)
        return replace(self, data=data)

    @property
    def rule_of_rates(self) -> tuple[str, float | None]:
        return super().rule_of_rates if self.reference is None else self.reference.rates

    def logit_bytes(self, role: str) -> int | None:
        if role != "actor" or self.reference is None:
            return None
        return self.reference.logit_bytes(self)

    def naming_options_of(self, role: str) -> AbstractContextManager[None]:
        return option_errors_for(role)

    @property
    def is_scored(self) -> bool:
        """Whether a reward model or reward functions are given."""
        return bool(self.critic.model_name_or_path or self.rewards.reward_function)

    @cached_property
    def players(self) -> list[Any]:
        """The options of add-ons by which one of theirs makes the responses, turn after turn.

        Their class has ``plays``, names of those options that are given, ``described()``, what a
        run says of it, ``check_player(config)``, and ``player(config, tokenizer, closing)``.
        """
        return [own for own in groups_of(self, "player") if own.plays]

    def response_metrics(
        self, responses: Sequence[Any], counted: Sequence[Any]
    ) -> dict[str, float]:
        """What add-ons show of the responses, of which some are ``counted``, as metrics."""
        owners = groups_of(self, "response_metrics")
        return {n: v for own in owners for n, v in own.response_metrics(responses, counted).items()}

    @property
    def has_critic(self) -> bool:
        """Whether a critic estimates values."""
        return self.ppo.rules.has_critic

    @property
    def has_shaped_sum(self) -> bool:
        """Whether the sum of rewards, scaled and punished, teaches, and not each by itself."""
        return not self.ppo.rules.by_reward
