"""Losses of a Trainer, by name: sums over the tokens of a batch, weighted.

Each takes (N, T) tables: the log-probabilities of the tokens, with gradient, and the numbers of the
sequences by name. The formulas are those of :mod:`dschat_lora.algos`.
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dschat_lora.algos.dpo import dpo_loss
from dschat_lora.algos.importance import importance_weights
from dschat_lora.algos.kl import KL_ESTIMATORS
from dschat_lora.algos.ppo import policy_loss
from dschat_lora.config.held import held
from dschat_lora.config.options import ConfigT, build_config, options_in_python
from dschat_lora.config.parser import unknown_option
from dschat_lora.config.stages import DpoConfig
from dschat_lora.rl.options.algorithms import ALGORITHMS, Algorithm, PpoConfig, find_algorithm
from dschat_lora.rl.options.names import of_addons

Tables = Mapping[str, Tensor]
# (T,) losses of a sequence, given as it came, from its log-probabilities.
TokenLoss = Callable[[Tensor, Mapping[str, Any]], Tensor]

_KL = ("kl_coef", "kl_estimator")
_CORRECTION = (
    *("importance_cap", "rollout_correction", "rollout_is"),
    *("rollout_is_threshold", "rollout_is_threshold_lower"),
)
# Options of the losses that are no algorithm's, with the command line's names.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": (),
    "importance_sampling": _KL,
    "dpo": ("beta", "loss_type", "label_smoothing", "length_normalization"),
}


@dataclass(frozen=True)
class Loss:
    """A loss, and what it reads of each sequence."""

    name: str
    reads: tuple[str, ...]  # numbers of a sequence
    # the weighted sum of a batch, from log-probabilities and tables
    total: Callable[[Tensor, Tables], Tensor] | None
    token_loss: TokenLoss | None = None  # of the caller
    sequences_per_unit: int = 1  # 2 where they are pairs, whose number divides the sum
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, logprobs: Tensor, tables: Tables, given: Sequence[Mapping[str, Any]]
    ) -> Tensor:
        """The summed loss of a batch, a scalar with gradient; ``given`` are its sequences."""
        if self.total is not None:
            return self.total(logprobs, tables)
        assert self.token_loss is not None
        losses = [logprobs.sum() * 0]
        for row, sequence in enumerate(given):
            size = len(sequence["tokens"])
            weights = tables["weights"][row, :size].clone()
            weights[0] = 0
            values: object = self.token_loss(logprobs[row, :size], sequence)
            if not isinstance(values, Tensor) or values.shape != (size,):
                kind = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(
                    f"a custom loss must return a ({size},) tensor, one value per token of the "
                    f"sequence, got {kind}"
                )
            if not values.requires_grad:
                raise ValueError("a custom loss must depend on the given log-probabilities")
            losses.append((weights * torch.where(weights > 0, values, 0)).sum())
        return torch.stack(losses).sum()


def make_loss(loss: object, options: Mapping[str, Any]) -> Loss:
    """The loss of a name, with its options, or of a function of the caller's.

    Raises:
        ValueError: for a name that is unknown, or an option with a value that is not allowed.
        TypeError: for an option that the loss does not have.
    """
    if callable(loss):
        if options:
            raise TypeError(
                f"{next(iter(options))} is not an option of a custom loss: bind it to the "
                "function, for example with functools.partial"
            )
        return Loss(getattr(loss, "__name__", "loss"), ("weights",), None, loss)
    if isinstance(loss, Algorithm):
        with held(loss, "algorithm") as name:
            return _of_algorithm(name, options)
    names = [*OPTIONS, *ALGORITHMS, *of_addons("algorithm")]
    if not isinstance(loss, str) or not (loss in names or ":" in loss):
        close = difflib.get_close_matches(str(loss), names, 1)
        hint = f"did you mean {close[0]}?" if close else "see their documentation"
        raise ValueError(
            f"loss must be a function or one of {', '.join(names)}, got {loss!r}; {hint}"
        )
    if loss not in OPTIONS:
        # PPO's is that of GRPO, whose penalty is in the loss, as it is here.
        return replace(_of_algorithm("grpo" if loss == "ppo" else loss, options), name=loss)
    _check_names(loss, options, OPTIONS[loss])
    if loss == "cross_entropy":
        return Loss(loss, ("weights",), _cross_entropy)
    if loss == "dpo":
        return _dpo(_config(DpoConfig, options))
    config = _config(PpoConfig, {"kl_coef": 0.0, **options}, algorithm="grpo")
    return _policy(loss, config, partial(policy_loss, cliprange=math.inf))


def _of_algorithm(name: str, options: Mapping[str, Any]) -> Loss:
    """The policy's loss of an algorithm.

    It has no penalty, for which it would need a reference, unless one is asked for.
    """
    own = find_algorithm(name).loss_options.values()
    also = ("cliprange",) if "cliprange_low" in own else ()
    _check_names(name, options, (*also, *own, *_CORRECTION, *_KL))
    defaults = {"kl_coef": 0.0, "kl_in": "loss"}
    config = _config(PpoConfig, {**defaults, **options}, algorithm=name)
    return _policy(name, config, config.surrogate)


def _check_names(loss: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            raise TypeError(f"loss {loss!r}: {unknown_option(f'--{name}', known)}")


def _config(config_class: type[ConfigT], options: Mapping[str, Any], **more: object) -> ConfigT:
    """The command line's options of a loss, checked as if typed."""
    return build_config(config_class, {**options_in_python(config_class, options), **more})


def counted(tables: Tables) -> Tensor:
    """(N, T) bool: tokens with weight, but for the first one of a sequence."""
    mask = tables["weights"] > 0
    mask[:, 0] = False
    return mask


def _cross_entropy(logprobs: Tensor, tables: Tables) -> Tensor:
    return -(tables["weights"] * torch.where(counted(tables), logprobs, 0)).sum()


def _policy(name: str, config: PpoConfig, surrogate: Callable[..., Any]) -> Loss:
    reads = ["weights", "logprobs", "advantages"]
    correction = config.correction
    reads += ["old_logprobs"] * (correction is not None)
    reads += ["ref_logprobs"] * bool(config.kl_coef)

    def total(logprobs: Tensor, tables: Tables) -> Tensor:
        mask, weights = counted(tables), tables["weights"]
        # The losses are linear in the size of advantages: there stand the weights of tokens.
        old, advantages = tables["logprobs"], tables["advantages"] * weights
        if correction is not None:
            drawn, old = old, tables["old_logprobs"]
            advantages = advantages * importance_weights(old, drawn, mask, **vars(correction))
        loss: Tensor = surrogate(logprobs, old, advantages, mask).total
        if config.kl_coef:
            kl = KL_ESTIMATORS[config.kl_estimator](logprobs, tables["ref_logprobs"])
            loss = loss + config.kl_coef * (weights * torch.where(mask, kl, 0)).sum()
        return loss

    return Loss(name, tuple(reads), total)


def _dpo(config: DpoConfig) -> Loss:
    loss_type = config.loss_type
    if loss_type not in ("sigmoid", "ipo", "hinge"):
        raise ValueError(
            f"--loss_type {loss_type}: loss 'dpo' has sigmoid, ipo and hinge; write others as a "
            "function"
        )
    by_length = config.length_normalization or loss_type == "ipo"

    def total(logprobs: Tensor, tables: Tables) -> Tensor:
        mask = counted(tables)
        weights = torch.where(mask, tables["weights"], 0)
        logratios = (weights * torch.where(mask, logprobs - tables["ref_logprobs"], 0)).sum(1)
        if by_length:
            logratios = logratios / weights.sum(1).clamp(min=torch.finfo(weights.dtype).tiny)
        losses = dpo_loss(
            logratios[::2],
            logratios[1::2],
            beta=config.beta,
            loss_type=loss_type,  # type: ignore[arg-type]
            label_smoothing=config.label_smoothing,
        )
        return losses.sum()

    return Loss("dpo", ("weights", "ref_logprobs"), total, sequences_per_unit=2)
