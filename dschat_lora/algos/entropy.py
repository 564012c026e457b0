"""The adaptive coefficient of an entropy bonus."""

# By which the coefficient changes after an iteration.
ENTROPY_COEF_STEP = 0.005


def adapted_entropy_coef(
    coef: float, *, entropy: float, target: float, step: float = ENTROPY_COEF_STEP
) -> float:
    """The coefficient after an iteration of mean ``entropy``, moved towards the ``target``.

    ``c + step`` below the target and ``c - step`` above it (adaptive entropy control of
    arXiv:2505.22312, Skywork-OR1), here never below 0: it does not press entropy down. Both
    entropies are in nats per token; one that is no number changes nothing.
    """
    if entropy < target:
        return coef + step
    return max(0.0, coef - step) if entropy > target else coef


def applied_entropy_coef(coef: float, *, entropy: float, target: float) -> float:
    """The weight of the bonus: ``coef`` where the entropy is at most the target, else 0.

    ``alpha = c 1[e <= target]`` in the paper of :func:`adapted_entropy_coef`, arguments as there.
    """
    return coef if entropy <= target else 0.0
