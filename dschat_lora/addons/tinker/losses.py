"""The losses of the protocol, by the formulas of ``algos``: sums over tokens of all examples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat_lora.algos.ppo import PolicyLoss, cispo_loss, dro_loss, gspo_loss, policy_loss

# (T,) or (T, K) numbers of an example, by name; the second of K targets at each position.
Numbers = Mapping[str, Tensor]
# Of the ratio itself, not of its distance to 1.
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
RATIO_MASK = "sequence_ratio_mask"
# Of each loss the numbers that it reads, and its settings with their defaults.
READS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    **dict.fromkeys(
        ("importance_sampling", "ppo", "cispo", "gspo", "dro"), ("logprobs", "advantages")
    ),
}
SETTINGS: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": _CLIPS,
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "gspo": _CLIPS,
    "dro": {"beta": 0.05},
}


@dataclass(frozen=True)
class DatumLoss:
    """A loss with its settings."""

    name: str
    settings: Mapping[str, float]

    def __call__(self, logprobs: Sequence[Tensor], numbers: Sequence[Numbers]) -> Tensor:
        """The sum over examples, a scalar with gradient.

        ``logprobs`` are (T,) or (T, K) of each example, in nats; ``numbers`` as long.
        """
        if self.name == "cross_entropy":
            terms = zip(logprobs, numbers, strict=True)
            return torch.stack([-(own["weights"] * each).sum() for each, own in terms]).sum()
        table = pad_sequence(list(logprobs), batch_first=True)
        old, advantages = (
            pad_sequence([own[name] for own in numbers], batch_first=True)
            for name in ("logprobs", "advantages")
        )
        # A prompt's tokens have no advantage, and no part in the ratio of a sequence.
        counted = advantages != 0
        if self.name == "gspo":
            masks = [own.get(RATIO_MASK, own["advantages"]) for own in numbers]
            counted = pad_sequence(masks, batch_first=True) != 0
        return self._policy_loss()(table, old, advantages, counted).total

    def _policy_loss(self) -> Callable[..., PolicyLoss]:
        if self.name == "dro":
            return partial(dro_loss, beta=self.settings["beta"])
        if self.name == "importance_sampling":
            return partial(policy_loss, cliprange=math.inf)
        functions: Mapping[str, Callable[..., PolicyLoss]] = {
            "ppo": policy_loss,
            "cispo": cispo_loss,
            "gspo": partial(gspo_loss, by_token=True),
        }
        low, high = self.settings["clip_low_threshold"], self.settings["clip_high_threshold"]
        return partial(functions[self.name], cliprange=1 - low, cliprange_high=high - 1)


def make_loss(name: str, settings: Mapping[str, float]) -> DatumLoss:
    """The loss of a name.

    Raises:
        ValueError: for a name or a setting that is unknown, or a value that is not allowed.
    """
    if name == "stable_reinforce":
        raise ValueError(
            "loss_fn stable_reinforce has no published formula: take importance_sampling, cispo or "
            "gspo"
        )
    if name not in READS:
        raise ValueError(f"loss_fn must be one of {', '.join(READS)}, got {name!r:.80}")
    known = SETTINGS[name]
    for key, value in settings.items():
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise ValueError(f"loss_fn_config of {name} takes {allowed}, got {key!r:.80}")
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"loss_fn_config[{key!r}] must be a number >= 0, got {value}")
    return DatumLoss(name, {**known, **settings})
