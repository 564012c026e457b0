"""What a user may do when a run has ended: use the result, the next stage, look at the report."""

import shlex
from pathlib import Path

from dschat_lora.config.options import command_line, flatten
from dschat_lora.config.stages import StageConfig
from dschat_lora.report.html import FILE
from dschat_lora.runtime.run import OpenRun


def say_next_steps(run: OpenRun[StageConfig]) -> None:
    """Log commands to paste, for the stages that a pipeline has."""
    if run.directory is None:
        return
    commands = [] if run.caller.in_python else next_commands(run.stage, run.config, run.directory)
    if commands:
        run.log.say("next:")
    for command in commands:
        run.log.say(f"  {command}")
    if run.report is not None:
        run.log.say(f"report: {run.directory / FILE} (open it in a browser)")


def next_commands(stage: str, config: StageConfig, directory: Path) -> list[str]:
    """Two commands, or none for a stage of another kind."""
    values, home = flatten(config), str(directory)
    data = {name: values.get(name) for name in ("data_path",) if name in config.given}
    own_data = [str(path) for path in (values.get("data_path") or ["pairs.jsonl"])[:1]]
    chat = shlex.join(["dschat-lora", "chat", home])

    def begin(verb: str, **models: object) -> str:
        return shlex.join(["dschat-lora", verb, *command_line({**models, **data})])

    if stage == "sft":
        return [chat, begin("reward", model_name_or_path=home)]
    if stage == "dpo":
        return [chat, begin("rlhf", actor_model_name_or_path=home)]
    if stage == "reward":
        actor = values.get("model_name_or_path") or "output/sft"
        return [
            shlex.join(["dschat-lora", "eval", home, *own_data]),
            begin("rlhf", actor_model_name_or_path=actor, critic_model_name_or_path=home),
        ]
    if stage == "rlhf":
        return [chat, shlex.join(["dschat-lora", "merge", f"{home}/actor"])]
    return []
