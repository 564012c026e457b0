"""Algorithms of the update, with the options that their papers set."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

from dschat_lora.config.addon_names import ADDONS
from dschat_lora.config.addons import provided
from dschat_lora.config.groups import require, require_numbers
from dschat_lora.config.options import When, option
from dschat_lora.config.when import no_effect
from dschat_lora.rl.options.names import Function, called, is_own, load_object, of_addons

KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["reward", "loss"]
LossNormalization = Literal["token", "sequence", "constant"]
Correction = Literal["none", "tis", "mis"]


CLIP = {"cliprange": "cliprange_low", "cliprange_high": "cliprange_high"}
NEEDS = ("groups", "old_logprobs", "values")


def by_algorithm(help: str, *, when: When = "") -> Any:
    """An option whose default is that of ``--algorithm``."""
    return option(None, help=help, settled="by --algorithm", when=when)


def _where(name: str, holds: Callable[[Callable[[str], Any]], bool]) -> When:
    """The condition of an option that has an effect with algorithms of which something holds."""
    return lambda value: (
        "" if holds(value) else no_effect(name, f" with --algorithm {value('algorithm')}")
    )


def where_rewards_teach(name: str) -> When:
    """The condition of an option that has an effect where what is learnt are rewards."""
    return _where(name, lambda value: value("rules").learns_from_rewards)


def of_some(name: str, read: str = "") -> When:
    """The condition of an option that has an effect where the algorithm reads it, or ``read``."""
    # A function of the user's may read any.
    return _where(
        name, lambda value: (read or name) in value("rules").reads or is_users(value("algorithm"))
    )


of_critic = partial(option, when="has_critic")
of_correction = partial(option, when="rollout_correction or importance_cap")


def is_users(name: str) -> bool:
    """Whether an algorithm is an object of the user's, or of another package."""
    of_package = any(name in addon.under("algorithm") for addon in ADDONS.values())
    return is_own("algorithm", name) and not of_package


@dataclass(frozen=True)
class Algorithm:
    """How responses teach the policy, and values of options that are not typed.

    ``estimator`` takes a :class:`dschat_lora.algos.credit.Outcome`, and gives advantages, (N,) or
    (N, R), or a pair of (N, R) advantages and a critic's returns. ``loss`` takes
    log-probabilities, old ones, advantages and the mask of tokens, (n, R) each, and gives a
    :class:`dschat_lora.algos.ppo.PolicyLoss`, which is linear in the size of advantages.
    ``learns_from`` takes the scores of the responses to a prompt that count, and their weighted
    rewards by name, and says whether they teach something.
    """

    estimator: Function
    loss: Function = "dschat_lora.algos.ppo:policy_loss"
    loss_options: Mapping[str, str] = field(  # keywords of the loss, and the options they are
        default_factory=lambda: CLIP | {"dual_clip": "dual_clip"}
    )
    # of NEEDS, and perhaps a reference that an add-on provides
    needs: frozenset[str] = frozenset({"groups"})
    learns_from: Function = "dschat_lora.algos.credit:sums_differ"
    by_reward: bool = False  # reads rewards by name, and not their shaped sum
    options: tuple[str, ...] = ()  # that the estimator reads, and not every one
    kl_coef: float = 0.1
    kl_in: KlPlace = "loss"
    kl_estimator: KlEstimator = "k3"
    cliprange: float = 0.2
    cliprange_low: float = 0.2
    cliprange_high: float = 0.2
    loss_normalization: LossNormalization = "token"
    mask_truncated_completions: bool = False
    dynamic_sampling: int = 0
    soft_overlong_share: float = 0.0  # of --max_answer_seq_len

    def __post_init__(self) -> None:
        if isinstance(self.needs, str) or not {*self.needs} <= {*NEEDS}:
            known = (*NEEDS, *provided("reference"))
            if isinstance(self.needs, str) or not {*self.needs} <= {*known}:
                raise ValueError(f"needs of an algorithm are some of {known}, got {self.needs!r}")
        object.__setattr__(self, "needs", frozenset(self.needs))

    @cached_property
    def estimate(self) -> Callable[..., Any]:
        """The function of advantages."""
        return called(self.estimator)

    @cached_property
    def teaches(self) -> Callable[..., Any]:
        """The function that says whether the responses to a prompt teach something."""
        return called(self.learns_from)

    @property
    def compares(self) -> bool:
        """Whether it compares the responses to a prompt, and so needs several."""
        return "groups" in self.needs

    @cached_property
    def reference(self) -> str:
        """What an add-on provides as the reference; empty: it is the actor as it was."""
        return "".join(self.needs - {*NEEDS})

    @property
    def learns_from_rewards(self) -> bool:
        """Whether rewards teach, and not such a reference, which says what each token is worth."""
        return not self.reference

    @property
    def has_critic(self) -> bool:
        """Whether a critic estimates values."""
        return "values" in self.needs

    @property
    def reads(self) -> frozenset[str]:
        """Options that have an effect, of those that not every algorithm reads."""
        return frozenset({*self.options, *self.loss_options.values()})


_CREDIT = "dschat_lora.algos.credit"
_paid_in_reward = partial(Algorithm, kl_in="reward", kl_estimator="k1")
_as_grpo = partial(Algorithm, f"{_CREDIT}:grpo", kl_coef=0.0)
ALGORITHMS: Mapping[str, Algorithm] = {
    "ppo": _paid_in_reward(
        f"{_CREDIT}:ppo", needs=frozenset({"old_logprobs", "values"}), options=("gamma",)
    ),
    "rloo": _paid_in_reward(f"{_CREDIT}:rloo"),
    "grpo": Algorithm(f"{_CREDIT}:grpo"),
    "reinforce_pp": _paid_in_reward(
        f"{_CREDIT}:reinforce_pp", needs=frozenset({"old_logprobs"}), options=("gamma",)
    ),
    "reinforce_pp_baseline": Algorithm(f"{_CREDIT}:reinforce_pp_baseline", kl_estimator="k2"),
    # Without a divergence: sections 3.2, 2.3, 2.1 and 3.1 of the four papers.
    "dr_grpo": Algorithm(f"{_CREDIT}:dr_grpo", kl_coef=0.0, loss_normalization="constant"),
    "dapo": _as_grpo(
        cliprange_high=0.28,
        mask_truncated_completions=True,
        dynamic_sampling=10,
        soft_overlong_share=0.2,  # 4,096 of 20,480 tokens
    ),
    "gspo": _as_grpo(
        loss="dschat_lora.algos.ppo:gspo_loss",
        cliprange_low=3e-4,
        cliprange_high=4e-4,
        loss_normalization="sequence",
    ),
    # The paper bounds no ratio from below, and leaves its upper bound open: 5 is that of
    # arXiv:2510.13786.
    "cispo": _as_grpo(
        loss="dschat_lora.algos.ppo:cispo_loss",
        loss_options=CLIP,
        cliprange_low=1.0,
        cliprange_high=4.0,
    ),
    "gdpo": Algorithm(
        "dschat_lora.algos.gdpo:gdpo",
        learns_from="dschat_lora.algos.gdpo:some_reward_differs",
        by_reward=True,
    ),
    "sapo": _as_grpo(
        loss="dschat_lora.algos.sapo:sapo_loss",
        loss_options={f"temperature_{s}": f"sapo_temperature_{s}" for s in ("pos", "neg")},
        loss_normalization="sequence",
    ),
}


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of a name, or of one's own: ``module:object``, an Algorithm or an estimator.

    An estimator has GRPO's loss and options.

    Raises:
        ValueError: if there is none.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if not is_own("algorithm", name):
        known = [*ALGORITHMS, *of_addons("algorithm")]
        close = " or ".join(difflib.get_close_matches(name, known, 2))
        raise ValueError(
            f"--algorithm must be one of {', '.join(known)}, or your own module:object such as "
            f"my_algorithms:mine, got {name!r}" + (close and f"; did you mean {close}?")
        )
    own = load_object("algorithm", name, "algorithm")
    if isinstance(own, Algorithm):
        return own
    if not callable(own):
        raise ValueError(
            f"--algorithm {name} must be a function that returns advantages, or a "
            f"dschat_lora.Algorithm, not of type {type(own).__name__}"
        )
    return Algorithm(own)


@dataclass(frozen=True)
class RolloutCorrection:
    """How :func:`dschat_lora.algos.importance.importance_weights` bounds weights."""

    cap: float
    floor: float = 0.0
    level: Literal["token", "sequence"] = "token"
    masks: bool = False


@dataclass(frozen=True)
class PpoConfig:
    """The update: PPO, RLOO, GRPO and what came after them."""

    section = "algorithm"

    algorithm: str = option(
        "ppo",
        help="reinforcement-learning algorithm\nppo has a critic; reinforce_pp has none; grpo and "
        "its variants compare the responses to each prompt",
        names=(*ALGORITHMS, *of_addons("algorithm")),
        runs="part",
    )
    ppo_epochs: int = option(1, help="number of passes over the responses of each iteration")
    kl_coef: float = by_algorithm(
        "coefficient of the KL divergence from the reference (0.1 or 0)",
        when=where_rewards_teach("kl_coef"),
    )
    kl_estimator: KlEstimator = by_algorithm(
        "estimator of the KL divergence at each token", when=where_rewards_teach("kl_estimator")
    )
    kl_in: KlPlace = by_algorithm(
        "where the KL penalty is applied: to the reward of each token, or in the loss",
        when=where_rewards_teach("kl_in"),
    )
    adaptive_kl_target: float = option(
        0.0,
        help="target KL divergence in nats per response, towards which kl_coef is adapted; 0: "
        "constant kl_coef",
    )
    kl_horizon: int = option(
        10000, help="horizon in responses over which kl_coef adapts", when="adaptive_kl_target"
    )
    gamma: float = option(1.0, help="discount factor, in [0, 1]", when=of_some("gamma"))
    lam: float = of_critic(
        1.0,
        help="lambda of generalized advantage estimation (GAE), in [0, 1]; below 1, the score at "
        "the end reaches a token t positions earlier with weight lam^t, and the critic's "
        "values account for the rest",
    )
    cliprange: float = by_algorithm(
        "clipping range of the probability ratio in both directions (0.2)",
        when=of_some("cliprange", "cliprange_low"),
    )
    cliprange_low: float = by_algorithm(
        "lower clipping range of the ratio; default: --cliprange", when=of_some("cliprange_low")
    )
    cliprange_high: float = by_algorithm(
        "upper clipping range of the ratio; default: --cliprange", when=of_some("cliprange_high")
    )
    dual_clip: float = option(
        0.0,
        help="dual clip: limit the loss of a token with negative advantage A to -A times this; 0: "
        "off",
    )
    sapo_temperature_pos: float = option(
        1.0,
        help="SAPO: temperature of the gate on tokens with positive advantage; a higher one "
        "restricts the ratio more",
        when=of_some("sapo_temperature_pos"),
    )
    sapo_temperature_neg: float = option(
        1.05,
        help="SAPO: temperature of the gate on all other tokens; normally above "
        "--sapo_temperature_pos",
        when=of_some("sapo_temperature_neg"),
    )
    loss_normalization: LossNormalization = by_algorithm(
        "how the loss is averaged; token: over all tokens; sequence: over responses; constant: "
        "divided by --max_answer_seq_len"
    )
    mask_truncated_completions: bool = by_algorithm(
        "exclude truncated responses from the loss (DAPO's overlong filtering)"
    )
    dynamic_sampling: int = by_algorithm(
        "replace prompts whose responses all received the same reward, at most this many times "
        "per iteration (DAPO's dynamic sampling); 0: never"
    )
    cliprange_value: float = of_critic(0.2, help="clipping range of the value loss")
    whiten_advantages: bool = of_critic(
        True, help="normalize the advantages of each iteration to mean 0 and standard deviation 1"
    )
    critic_warmup_iterations: int = of_critic(
        0, help="number of iterations at the start in which only the critic is trained"
    )
    importance_cap: float = option(
        0.0,
        help="maximum importance weight of a token in the policy loss: its probability under the "
        "policy over that under the sampling distribution (top-p, top-k, another "
        "temperature); 0: no weights; same as --rollout_correction tis with this "
        "--rollout_is_threshold",
    )
    rollout_correction: Correction | None = option(
        None,
        help="importance sampling in the policy loss if tokens are not sampled from the policy "
        "that is trained; tis: weights truncated at --rollout_is_threshold; mis: weights "
        "beyond it are set to 0; default: none with --rollout_engine own, else tis",
    )
    rollout_is: Literal["token", "sequence"] = of_correction(
        "token",
        help="level of the importance weights: one per token, or per response the product over its "
        "tokens",
    )
    rollout_is_threshold: float = of_correction(
        2.0, help="upper threshold of the weights of --rollout_correction"
    )
    rollout_is_threshold_lower: float = of_correction(
        0.0, help="lower threshold of the weights: tis raises lower ones to it, mis sets them to 0"
    )
    use_rollout_logprobs: bool = option(
        False,
        help="take old log-probabilities from the decode loop instead of a forward pass, which is "
        "faster; the metric sampler_error shows the rounding difference",
    )
    entropy_coef: float = option(0.0, help="coefficient of the entropy bonus")
    target_kl: float = option(
        0.0,
        help="stop the updates of an iteration when the approximate KL divergence to the policy at "
        "its start exceeds this (mean nats per token); 0: never",
    )

    def __post_init__(self) -> None:
        defaults = dict(vars(self.rules))
        if self.cliprange is not None:
            defaults |= {"cliprange_low": self.cliprange, "cliprange_high": self.cliprange}
        for name, own in type(self).__dataclass_fields__.items():
            if own.default is None and getattr(self, name) is None and name in defaults:
                object.__setattr__(self, name, defaults[name])
        require_numbers(self, ">= 1", "ppo_epochs", "kl_horizon")
        weights = ("kl_coef", "entropy_coef", "importance_cap")
        targets = ("adaptive_kl_target", "target_kl")
        counts = ("dynamic_sampling", "critic_warmup_iterations")
        require_numbers(self, ">= 0", *weights, *targets, *counts)
        require_numbers(self, "in [0, 1]", "gamma", "lam")
        clips = ("cliprange", "cliprange_low", "cliprange_high", "cliprange_value")
        temperatures = ("sapo_temperature_pos", "sapo_temperature_neg")
        require_numbers(self, "> 0", "rollout_is_threshold", *clips, *temperatures)
        require(not 0 < self.dual_clip <= 1, "dual_clip", self.dual_clip, "> 1, or 0 for none")
        lower = self.rollout_is_threshold_lower
        require(
            0 <= lower < self.rollout_is_threshold,
            "rollout_is_threshold_lower",
            lower,
            f"in [0, {self.rollout_is_threshold:g}), below --rollout_is_threshold",
        )
        bounds = (self.rollout_is, self.rollout_is_threshold, lower)
        if self.importance_cap and (self.rollout_correction or bounds != ("token", 2.0, 0.0)):
            raise ValueError(
                f"--importance_cap {self.importance_cap:g} means --rollout_correction tis per "
                "token with that threshold: give it alone, or --rollout_correction and "
                "--rollout_is_..."
            )
        if self.dual_clip and "dual_clip" not in self.rules.reads:
            raise ValueError(
                f"--dual_clip {self.dual_clip:g} is not used by the loss of --algorithm "
                f"{self.algorithm}: drop it"
            )
        if self.rules.by_reward and self.kl_in == "reward":
            raise ValueError(
                "--kl_in reward subtracts the KL penalty from the sum of rewards, which "
                f"--algorithm {self.algorithm} does not use: apply it in the loss"
            )
        if self.dynamic_sampling and not self.rules.compares:
            raise ValueError(
                f"--dynamic_sampling {self.dynamic_sampling} compares the responses to a prompt, "
                f"but --algorithm {self.algorithm} does not: drop it, or use dapo"
            )
        if self.adaptive_kl_target and not self.kl_coef:
            raise ValueError(
                "--adaptive_kl_target adapts --kl_coef, which is 0: set its initial value"
            )

    @cached_property
    def rules(self) -> Algorithm:
        """What the algorithm is by its paper."""
        return find_algorithm(self.algorithm)

    @cached_property
    def surrogate(self) -> Callable[..., Any]:
        """The policy's loss with its options, of log-probabilities, old ones, advantages, mask."""
        rules = self.rules
        values = {name: getattr(self, option) for name, option in rules.loss_options.items()}
        return partial(called(rules.loss), **values)

    @cached_property
    def weighs_by_policy(self) -> bool:
        """Whether old log-probabilities of all responses are in advantages or weights."""
        in_advantages = "old_logprobs" in self.rules.needs or self.kl_in == "reward"
        return in_advantages or self.correction is not None

    @cached_property
    def correction(self) -> RolloutCorrection | None:
        """Bounds of importance weights; None: all are 1."""
        if self.importance_cap:
            return RolloutCorrection(self.importance_cap)
        if self.rollout_correction in (None, "none"):
            return None
        bounds = (self.rollout_is_threshold, self.rollout_is_threshold_lower)
        return RolloutCorrection(*bounds, self.rollout_is, self.rollout_correction == "mis")
