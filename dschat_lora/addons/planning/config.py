"""Options of ``dschat-lora tune`` and ``dschat-lora models``."""

from dataclasses import dataclass

from dschat_lora.config.groups import require, require_numbers
from dschat_lora.config.options import option


@dataclass(frozen=True)
class TuneConfig:
    """Search for a stage's learning rate and, optionally, its rank and batch size by short runs.

    Successive halving stops trials that fall behind; a trial that is not stopped is a full run.
    All other options are the stage's; --max_steps is the length of a full trial. Needs
    dschat_lora[planning].
    """

    rates: tuple[float, ...] = option(
        (),
        help="peak learning rates to try, of the adapter if there is one; default: the given rate, "
        "or else that of --learning_rate auto, times 1/8 to 8",
    )
    ranks: tuple[int, ...] = option((), help="values of --lora_dim to try with each learning rate")
    batches: tuple[int, ...] = option(
        (),
        help="training batch sizes per device to try with each; larger ones take fewer steps over "
        "the same number of rows",
    )
    trials: int = option(
        0,
        help="total number of trials; those beyond the listed ones are sampled near the best of "
        "them; 0: only the listed ones",
    )
    seeds: int = option(
        1, help="runs per trial, with consecutive seeds from --seed, whose results are averaged"
    )
    jobs: int = option(1, help="number of trials to run at a time, spread over the available GPUs")
    metric: str | None = option(
        None, help="held-out metric to optimize; default: loss; for rlhf and distill reward"
    )
    min_steps: int = option(
        0, help="optimizer steps before a trial may be stopped early; 0: --max_steps / 27"
    )
    reduction_factor: int = option(
        3, help="successive halving: one in N trials continues, for N times as many steps"
    )
    output_dir: str | None = option(None, help="default: the first free of output/tune-STAGE, ...")
    resume: bool = option(False, help="resume the search in --output_dir")

    def __post_init__(self) -> None:
        for name in ("rates", "ranks", "batches"):
            for each in getattr(self, name):
                require(each > 0, name, each, "> 0")
        require_numbers(self, ">= 1", "seeds", "jobs")
        require_numbers(self, ">= 0", "trials", "min_steps")
        factor = self.reduction_factor
        require(factor >= 2, "reduction_factor", factor, ">= 2")
        if self.resume and self.output_dir is None:
            raise ValueError("--resume needs the --output_dir of the search")


@dataclass(frozen=True)
class ModelsConfig:
    """List the supported model types and their tested features, or check one model.

    Of a model only the configuration is read: it shows whether a run would start, what would be
    trained, and the test results of its type. The exit code is 1 if a run would be refused.
    """

    model_name_or_path: str | None = option(
        None,
        help="directory or hub name of a model; may be given as the first argument, without the "
        "option",
    )
    json: bool = option(False, help="print one JSON object to standard output")
