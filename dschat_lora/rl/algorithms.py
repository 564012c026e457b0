"""Algorithms of the update, and the options that their papers set."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dschat_lora.config.options import option

AlgorithmName = Literal[
    "ppo",
    "rloo",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "cispo",
]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["reward", "loss"]
LossNormalization = Literal["token", "sequence", "constant"]


def by_algorithm(help: str) -> Any:
    """An option whose default is that of ``--algorithm``."""
    return option(None, help=f"{help}; default: by --algorithm")


@dataclass(frozen=True)
class Algorithm:
    """Advantage and policy loss of an algorithm, and values of options that are not typed."""

    advantage: Literal["gae", "returns", "rloo", "grpo", "dr_grpo", "reinforce_pp_baseline"]
    loss: Literal["clip", "gspo", "cispo"] = "clip"
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

    @property
    def compares(self) -> bool:
        """Whether it compares the responses to a prompt, and so needs several."""
        return self.advantage not in ("gae", "returns")


ALGORITHMS: Mapping[str, Algorithm] = {
    "ppo": Algorithm("gae", kl_in="reward", kl_estimator="k1"),
    "rloo": Algorithm("rloo", kl_in="reward", kl_estimator="k1"),
    "grpo": Algorithm("grpo"),
    "reinforce_pp": Algorithm("returns", kl_in="reward", kl_estimator="k1"),
    "reinforce_pp_baseline": Algorithm("reinforce_pp_baseline", kl_estimator="k2"),
    # Without a divergence: sections 3.2, 2.3, 2.1 and 3.1 of the four papers.
    "dr_grpo": Algorithm("dr_grpo", kl_coef=0.0, loss_normalization="constant"),
    "dapo": Algorithm(
        "grpo",
        kl_coef=0.0,
        cliprange_high=0.28,
        mask_truncated_completions=True,
        dynamic_sampling=10,
        soft_overlong_share=0.2,  # 4,096 of 20,480 tokens
    ),
    "gspo": Algorithm(
        "grpo",
        "gspo",
        kl_coef=0.0,
        cliprange_low=3e-4,
        cliprange_high=4e-4,
        loss_normalization="sequence",
    ),
    # The paper bounds no ratio from below, and leaves its upper bound open: 5 is that of
    # arXiv:2510.13786.
    "cispo": Algorithm("grpo", "cispo", kl_coef=0.0, cliprange_low=1.0, cliprange_high=4.0),
}
