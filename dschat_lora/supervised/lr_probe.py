"""``--lr_probe``: the learning rate of a run by short trials at its start, which leave no trace."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

from dschat_lora.data.loader import Window
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.state import EngineState
from dschat_lora.lora.rates import octaves_above, parameter_groups
from dschat_lora.models.backbone import BackboneModel
from dschat_lora.report.texts import short
from dschat_lora.supervised.loop import train_steps
from dschat_lora.supervised.objectives import Objective
from dschat_lora.supervised.setup import SupervisedSetup

TRIALS = 5  # at most, of equal length


@dataclass
class ProbedRates:
    """The losses of a probe by rate, saved and restored with the run; none before it."""

    losses: dict[float, float] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """The rate of the lowest loss."""
        return min(self.losses, key=self.losses.__getitem__)

    def state(self) -> dict[str, Any]:
        return {"rates": [*self.losses], "losses": [*self.losses.values()]}

    def restore(self, state: dict[str, Any]) -> None:
        losses = map(float, state["losses"])  # a checkpoint has infinity as a text
        self.losses = dict(zip(state["rates"], losses, strict=True))


def with_probed_rate(
    setup: SupervisedSetup,
    engine: TrainEngine[BackboneModel],
    windows: Callable[[int], Iterable[Window]],
    objective: Objective,
    *,
    found: ProbedRates,
) -> SupervisedSetup:
    """The setup with the rate that ``--lr_probe`` finds, or has ``found`` before the run resumed.

    It is the adapters' or, without them, that of base weights; ``engine`` trains at it. Each trial
    makes the first steps of the run, ``windows`` of their number, at one constant rate. Its loss is
    the mean over the later half of its steps: each is measured on rows before they are learnt.
    Weights and optimizer are then as before, bit for bit. Call on every rank.

    Raises:
        ValueError: if no rate has a finite loss, or the run was begun without a probe.
    """
    config, model = setup.config, setup.adapted.model
    option = "lora_learning_rate" if config.lora.lora_dim else "learning_rate"
    length = config.optim.lr_probe // TRIALS
    if not (config.optim.lr_probe and config.optim.num_train_epochs):
        return setup

    def take(rate: float) -> SupervisedSetup:
        changed: dict[str, Any] = {option: rate}
        optim = replace(config.optim, **changed)
        engine.set_peak_rates([group["lr"] for group in parameter_groups(model, optim)])
        own = replace(config, optim=optim)
        return replace(setup, config=own, run=replace(setup.run, config=own))

    def loss_at(rate: float) -> float:
        take(rate)
        steps = train_steps(engine, windows(length), objective, repeat(1.0))
        losses = [result.loss for result in steps]
        state.load(facts, tensors.__getitem__)
        later = losses[len(losses) // 2 :]
        mean = sum(later) / len(later)
        return mean if math.isfinite(mean) else math.inf

    if not found.losses:
        if config.checkpoint:
            raise ValueError(
                f"--lr_probe {config.optim.lr_probe} is for the start of a run, and this goes on "
                f"from {config.checkpoint}: leave it out"
            )
        assert config.optim.ruled is not None, "the rules want to know the model"
        centre = config.optim.ruled[option == "lora_learning_rate"]
        state = EngineState(engine, model)
        facts, tensors = state.facts(), dict(state.tensors())
        losses = climb(lambda octave: loss_at(octaves_above(centre, octave)))
        found.losses = {octaves_above(centre, n): losses[n] for n in sorted(losses)}
    if math.isinf(found.losses[found.best]):
        raise ValueError(
            f"--lr_probe {config.optim.lr_probe}: the loss was finite at none of the rates "
            f"{', '.join(map(short, found.losses))}; give --{option}, or try --dtype bf16"
        )
    table = [{"rate": rate, "loss": loss} for rate, loss in found.losses.items()]
    setup.run.record.update({"lr_probe": {option: found.best, "trials": table, "steps": length}})
    for rate, loss in found.losses.items():
        setup.run.log.say(f"  lr_probe     {rate:<9.3g} loss {short(loss)}")
    edge = ", the last one tried" if found.best in (min(found.losses), max(found.losses)) else ""
    setup.run.log.say(f"  rate         --{option} {found.best:g} by --lr_probe{edge}")
    return take(found.best)


def climb(loss_of: Callable[[int], float], *, trials: int = TRIALS) -> dict[int, float]:
    """Losses at some octaves from 0: those beside the best one, until both of these are known."""
    losses = {0: loss_of(0)}
    while len(losses) < trials:
        best = min(losses, key=lambda octave: (losses[octave], octave))
        untried = [octave for octave in (best + 1, best - 1) if octave not in losses]
        if not untried:
            break
        losses[untried[0]] = loss_of(untried[0])
    return losses
