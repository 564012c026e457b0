"""Options of ``dschat-lora tune`` and ``dschat-lora models``."""

from dataclasses import dataclass

from dschat_lora.config.groups import require, require_numbers
from dschat_lora.config.options import option


@dataclass(frozen=True)
class TuneConfig:
    """Find the learning rate of a stage and, if you like, its rank and batch, by short runs.

    Successive halving ends runs that fall behind. A trial that is not ended is a whole run. The
    other options are the stage's own; --max_steps is the length of a whole trial. Needs
    dschat_lora[planning].
    """

    rates: tuple[float, ...] = option(
        (),
        help="peak rates to try, of the adapter where there is one; default: the rate given or, "
        "without one, that of --learning_rate auto, times 1/8 to 8",
    )
    ranks: tuple[int, ...] = option((), help="values of --lora_dim to try with each rate")
    batches: tuple[int, ...] = option(
        (),
        help="sizes of the training batch of a device to try with each; larger ones make fewer "
        "steps, of as many rows",
    )
    trials: int = option(
        0,
        help="trials in all; those beyond the listed ones are drawn where these were good; 0: the "
        "listed ones",
    )
    seeds: int = option(1, help="runs of a trial, from --seed on, whose mean counts")
    jobs: int = option(1, help="trials at a time, over the GPUs there are")
    metric: str | None = option(
        None, help="held-out measure that decides; default: loss, of rlhf and distill reward"
    )
    min_steps: int = option(
        0, help="optimizer steps after which a trial may end; 0: --max_steps / 27"
    )
    reduction_factor: int = option(
        3, help="one of so many trials goes on; the next decision is after so many times the steps"
    )
    output_dir: str | None = option(None, help="default: the first free of output/tune-STAGE, ...")
    resume: bool = option(False, help="go on with the search in --output_dir")

    def __post_init__(self) -> None:
        for name in ("rates", "ranks", "batches"):
            for each in getattr(self, name):
                require(each > 0, name, each, "> 0")
        require_numbers(self, ">= 1", "seeds", "jobs")
        require_numbers(self, ">= 0", "trials", "min_steps")
        factor = self.reduction_factor
        require(factor >= 2, "reduction_factor", factor, ">= 2")
        if self.resume and self.output_dir is None:
            raise ValueError("--resume needs --output_dir, the directory of the search")


@dataclass(frozen=True)
class ModelsConfig:
    """List the types of models with what each can do, as found by trying it, or look at a model.

    Of a model its configuration is read, and no weights: whether a run would start, what would
    learn, and what was found of its type. Exit code 1 where a run would be refused.
    """

    model_name_or_path: str | None = option(
        None, help="directory or hub name of a model; it may stand first, without the option"
    )
    json: bool = option(False, help="one JSON object on standard output")
