"""An AdamW with an update of the caller's, for an engine to step in place of torch's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Updates tensors and moments in place; see :func:`dschat_lora.algos.adamw.adamw_`.
Update = Callable[..., None]


class SteppedAdamW(torch.optim.Optimizer):
    """AdamW whose update is given as a function, with the state of torch's own."""

    grad_scale: Tensor | None = None  # gradients are to be divided by it
    found_inf: Tensor | None = None  # not 0 where the step is to be left out

    def __init__(
        self,
        groups: list[dict[str, Any]],
        update: Update,
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": 1e-3, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if self.found_inf is not None and bool(self.found_inf):
            return
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            states = [self.state[p] for p in parameters]
            for parameter, state in zip(parameters, states, strict=True):
                if not state:
                    zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                    state.update(step=torch.tensor(0.0), **zeros)
            gradients = [p.grad for p in parameters]
            if self.grad_scale is not None:
                gradients = [g / self.grad_scale for g in gradients]
            for state in states:
                state["step"] += 1
            self._update(
                parameters,
                gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                step=int(states[0]["step"]),
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
