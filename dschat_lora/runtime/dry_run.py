"""What a dry run shows on one screen, besides what a run says as it starts."""

import shlex
from itertools import islice

from dschat_lora.config.data import DataConfig
from dschat_lora.config.options import command_line, flatten
from dschat_lora.config.stages import StageConfig
from dschat_lora.data.prepare import preview
from dschat_lora.engine.distributed import rank
from dschat_lora.models.loading import Tokenizer
from dschat_lora.report.terminal import fitted_command
from dschat_lora.report.texts import sample_text
from dschat_lora.runtime.run import OpenRun

# Samples among which one is looked for that is short enough to be shown whole.
_LOOKED_AT = 100
_MOST_CHARACTERS = 300
# Said by every dry run, or of no interest in it.
_UNSHOWN = ("dry_run", "verbose")
# Said in the first line, where the bundled ones are used.
_SAID = ("data_path", "eval_data_path")


def say_sample(run: OpenRun[StageConfig], data: DataConfig, tokenizer: Tokenizer) -> None:
    """Show the first short sample of the data token by token, on the first rank."""
    if rank() != 0:
        return
    kind = run.config.kind
    samples = preview(data, tokenizer, eos_id=int(tokenizer.eos_token_id), kind=kind)
    texts = []
    for sample in islice(samples, _LOOKED_AT):
        shown = {
            name: sample_text([tokenizer.decode([each]) for each in ids], supervised, colour=False)
            for name, (ids, supervised) in sample.sequences.items()
        }
        texts.append((sample, shown))
    texts.sort(key=lambda pair: max(map(len, pair[1].values())) > _MOST_CHARACTERS)
    for sample, shown in texts[:1]:
        row = sample.row.rpartition("/")[2]
        marks = "a prompt" if kind == "prompts" else "tokens trained on are in brackets"
        run.log.say(f"  sample       {row}: {marks}")
        for name, text in shown.items():
            title = "" if name in ("sample", "prompt") else name
            if len(text) > _MOST_CHARACTERS:
                text = f"{text[: _MOST_CHARACTERS // 2]} ... {text[-_MOST_CHARACTERS // 2 :]}"
            run.log.say(f"  {title:<12} {text}")


def say_options(run: OpenRun[StageConfig]) -> None:
    """List all options with ``--verbose``, or those that were typed or are not the defaults.

    They can be pasted back; those without a value are left out.
    """
    values = {k: v for k, v in flatten(run.config).items() if k not in _UNSHOWN}
    if run.config.run.verbose:
        for name, value in values.items():
            if value not in (None, []):
                run.log.say(f"  {shlex.join(command_line({name: value}))}")
    else:
        usual, given = flatten(type(run.config)()), run.config.given
        chosen = {
            k: v for k, v in values.items() if k in given or (v != usual[k] and k not in _SAID)
        }
        run.log.say(fitted_command(shlex.join(command_line(chosen)), "  options      ", 80))
    more = "" if run.config.run.verbose else "; --verbose lists all options"
    run.log.say(f"dry run: nothing was trained or saved{more}")
