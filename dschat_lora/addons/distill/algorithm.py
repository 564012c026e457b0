"""The algorithm ``distill``."""

from typing import TYPE_CHECKING

from dschat_lora.rl.options.algorithms import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from dschat_lora.algos.credit import Outcome


def distill(outcome: "Outcome") -> "Tensor":
    """Minus the sampled reverse KL at each token, and nothing of later ones: a discount of 0."""
    return -outcome.divergence("k1")


DISTILL = Algorithm(
    distill,
    needs=frozenset({"old_logprobs", "teacher"}),
    kl_coef=0.0,
    kl_in="reward",
    kl_estimator="k1",
)
