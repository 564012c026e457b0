"""What a supervised run would do, in the lines of ``--dry_run``."""

from collections.abc import Callable

from dschat_lora.config.plurals import counted
from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.data.loader import Collator
from dschat_lora.engine.distributed import data_world_size, device
from dschat_lora.perf.throughput import device_peak, measured_peak
from dschat_lora.report.texts import duration, operations
from dschat_lora.runtime.dry_run import say_options, say_sample
from dschat_lora.runtime.loop import check_repeats
from dschat_lora.supervised.batching import BatchLayout, epoch_flops, train_loader
from dschat_lora.supervised.loop import make_train_schedule
from dschat_lora.supervised.setup import SupervisedSetup
from dschat_lora.supervised.train import size_warnings


def show_plan(setup: SupervisedSetup, collator: Callable[[int], Collator] = SampleCollator) -> None:
    """Say what the run would do; call on every rank. ``collator`` is of a padding token's id.

    The model is taken to keep the sequences of a row apart: a run looks at its weights.
    """
    config, run = setup.config, setup.run
    collate, packing = collator(int(setup.tokenizer.pad_token_id)), config.data.packing
    fills_rows = packing or isinstance(collate, PairCollator)
    layout = BatchLayout(collate, packing, config.max_row_tokens if fills_rows else None)
    loader = train_loader(setup, setup.data.train, layout)
    schedule = make_train_schedule(config.optim, config.run, loader.steps_per_epoch)
    check_repeats(config.data, setup.data.times, schedule)
    for warning in size_warnings(setup, loader, schedule):
        run.log.say(f"  warning      {warning}")
    flops = 0.0
    if (counts := loader.counts) is not None:
        passes = schedule.num_steps / max(1, loader.steps_per_epoch)
        flops = passes * epoch_flops(setup, counts).hardware / data_world_size()
    if flops:
        here, dtype = device(), setup.settings.torch_dtype
        size, rounds = (4096, 10) if here.type == "cuda" else (1024, 3)
        peak = device_peak(here, dtype)
        rate = peak or measured_peak(here, dtype, size=size, rounds=rounds)
        run.log.say(
            f"  time         {duration(flops / rate / 1e12)} or more for "
            f"{counted(schedule.num_steps, 'step')}: {operations(flops)} per device at "
            f"{rate:.3g} TFLOP/s, the {'data sheet' if peak else 'measured'} rate of matrix "
            "products"
        )
    elif loader.counts is None:
        run.log.say(
            f"  time         unknown for {counted(schedule.num_steps, 'step')}, "
            f"as rows are streamed"
        )
    else:
        run.log.say("  time         unknown, or nothing is trained")
    say_sample(run, config.data, setup.tokenizer)
    say_options(run)
