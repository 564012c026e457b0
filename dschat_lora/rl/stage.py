"""The program of step 3, from a checked config to the saved result."""

from pathlib import Path

from dschat_lora.rl.config import RlhfConfig
from dschat_lora.rl.engines import build_engines
from dschat_lora.rl.export import finish
from dschat_lora.rl.setup import set_up
from dschat_lora.rl.train import show_plan, train
from dschat_lora.rl.validation import NAME, check_rlhf
from dschat_lora.runtime.caller import NOBODY, Caller
from dschat_lora.runtime.run import OpenRun, open_run


def run_rlhf(config: RlhfConfig, caller: Caller = NOBODY) -> Path | None:
    """Step 3, RLHF of an actor on its own responses; gives its directory, None for a dry run."""
    with open_run(config, name=NAME, check=check_rlhf, caller=caller) as run:
        train_rlhf(run)  # a function of its own: its engine must not outlive the run
    return run.directory


def train_rlhf(run: OpenRun[RlhfConfig]) -> None:
    """Train, evaluate and save; call on every rank."""
    setup = set_up(run)
    if run.directory is None:
        show_plan(setup)
        return
    engines = build_engines(setup)
    result = train(setup, engines)
    finish(setup, engines, result)
