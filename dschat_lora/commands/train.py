"""The command lines of the stages."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dschat_lora.commands.launch import launch_stage, split_launcher_options
from dschat_lora.commands.stages import RANK, STAGES, check_as_verb, check_stage, options_of_file
from dschat_lora.config.addons import summary_of
from dschat_lora.config.options import parse_config, typed_options
from dschat_lora.config.stages import StageConfig
from dschat_lora.runtime.stage_main import exits, late, prepare_process, run_main

_PROCESSES = """

The stage runs in one process, unless --num_gpus N, --include HOST:GPU, --hostfile FILE or
--master_port PORT is given: then DeepSpeed's launcher starts it."""


def run_stage(
    name: str,
    *,
    description: str | None = None,
    argv: Sequence[str] | None = None,
    program: str | None = None,
    examples: str | None = None,
    check: Callable[[Any], Any] | None = None,
) -> None:
    """The main function of a stage, by default with DeepSpeed-Chat's defaults."""
    prepare_process()
    run_main(
        STAGES[name].config,
        check or STAGES[name].check,
        exits(late(STAGES[name].program)),
        description=description,
        argv=argv,
        program=program,
        examples=examples,
        read_file=partial(options_of_file, name),
        as_script=check is None,
    )


def stage(name: str, argv: list[str]) -> None:
    """A stage in this process, or in those that the launcher starts."""
    launcher, rest = split_launcher_options(argv)
    program = f"dschat-lora {name}"
    if launcher is None:
        about, examples = f"{summary_of(name)}.", STAGES[name].examples + _PROCESSES
        run_stage(
            name,
            description=about,
            argv=rest,
            program=program,
            examples=examples,
            check=partial(check_as_verb, stage=name, rank=rank_of(rest)),
        )
        return
    read_file = partial(options_of_file, name)
    config: StageConfig = parse_config(
        STAGES[name].config, rest, program=program, read_file=read_file
    )
    check_stage(name, typed_options(config), launcher.processes, rank=rank_of(rest))
    launch_stage(name, launcher, rest)


sft, reward, dpo, rlhf = (partial(stage, name) for name in ("sft", "reward", "dpo", "rlhf"))


def rank_of(argv: Sequence[str]) -> int:
    """Rank of adapters where no option says one: 0 beside a file, which says what trains."""
    return 0 if any(word.partition("=")[0] == "--config" for word in argv) else RANK


def launched(
    name: str,
    check: Callable[[list[str]], object],
    run: Callable[[list[str]], None],
    argv: list[str],
) -> None:
    """A verb in this process or, with options that hold, in those that the launcher starts."""
    launcher, rest = split_launcher_options(argv)
    if launcher is None:
        run(rest)
    else:
        check(rest)
        launch_stage(name, launcher, rest)
