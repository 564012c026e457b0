"""What ``dschat-lora plan`` prints of the plans of stages, in words or as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dschat_lora.addons.pipeline.recipe import read_recipe
from dschat_lora.addons.planning.cards import Card, cards_of_size, find_card
from dschat_lora.addons.planning.launches import launch_advice
from dschat_lora.addons.planning.plan import (
    GENERATION,
    RoleMemory,
    StagePlan,
    StepTime,
    recomputation,
    recomputing_options,
    with_recomputation,
)
from dschat_lora.addons.planning.plan_search import (
    Planned,
    batch_options,
    plan_file,
    plan_stage,
    planning,
)
from dschat_lora.addons.planning.published import published_name
from dschat_lora.config.options import flatten
from dschat_lora.config.plurals import counted
from dschat_lora.data.audit import DataAudit
from dschat_lora.perf.launches import EFFICIENCY
from dschat_lora.report.terminal import log_once, print_json, table, wrapped
from dschat_lora.report.texts import duration, operations
from dschat_lora.rl.learn.roles import Roles
from dschat_lora.rl.loop.memory import rollout_words

GIB = 2**30
COMMON_CARDS = ("H200", "A100", "RTX 4090", "T4")
_COLUMNS = ("weights", "adapters", "gradients", "moments", "activations", "logits", "gathered")


def show_plans(
    what: str,
    options: Mapping[str, Any] | None,
    *,
    card: Card | None,
    processes: int | None,
    as_json: bool,
) -> bool:
    """Print the plan of a stage, or without ``options`` those of a file's stages.

    Returns:
        Whether all fit, perhaps with other settings.
    """
    recipe = read_recipe(what, num_gpus=processes) if options is None else None
    count = processes or 1 if recipe is None else recipe.launcher.processes or 1
    with planning(count, card) as home:
        if recipe is not None:
            plans = list(plan_file(recipe, home, card=card))
        else:
            assert options is not None
            plans = [plan_stage(what, options, home, card=card, processes=count)]
        facts = [to_dict(each) for each in plans] if as_json else []
        text = "" if as_json else "\n\n".join("\n".join(lines(each)) for each in plans)
        fits = all(each.command for each in plans)
    if as_json:
        print_json(facts if recipe else facts[0])
    else:
        log_once(text)
    return fits


def described_plan(
    stage: str, options: Mapping[str, Any], *, card: Card | None, processes: int
) -> tuple[dict[str, Any], str]:
    """The plan of a stage by its options as JSON, and in words."""
    with planning(processes, card) as home:
        planned = plan_stage(stage, options, home, card=card, processes=processes)
        return to_dict(planned), "\n".join(lines(planned))


def to_dict(planned: Planned) -> dict[str, Any]:
    """The plan as JSON; sizes are bytes on one device."""
    plan, card = planned.plan, planned.card
    total, trained = plan.parameters
    shown = planned.better or plan
    time = shown.time
    seconds = None if card is None else time.on(card)
    decodes = plan.config.kind == "prompts"
    return {
        "stage": planned.name,
        "processes": planned.processes,
        "parameters": {"total": total, "trainable": trained},
        "roles": {name: asdict(role) for name, role in plan.roles.items()},
        "cache": plan.memory_plan.cache,
        **({"max_num_seqs": plan.config.batch.rows_decoded} if decodes else {}),
        "phases": plan.phases,
        "peak": plan.peak,
        "recomputation": {
            "on": recomputation(plan)[0],
            "peak_without": with_recomputation(plan, ()).peak,
            "peak_with": with_recomputation(plan, recomputing_options(plan.config)).peak,
        },
        "device": card and {**asdict(card), "usable_bytes": card.usable_bytes},
        "fits": planned.fits,
        "largest": planned.largest,
        "peak_of_command": shown.peak if planned.command else None,
        "command": planned.command,
        "tokens_per_step": time.tokens,
        "flops_per_step": time.flops,
        "seconds_per_step": seconds and seconds.total,
        "kernels_per_step": time.launches[time.fused],
        "expected": [asdict(each) for each in expected_speeds(time, card)],
        "data": planned.data.to_dict() if isinstance(planned.data, DataAudit) else planned.data,
    }


def lines(planned: Planned) -> Iterator[str]:
    """The plan in words, in lines of 80 columns."""
    plan, card = planned.plan, planned.card
    total, trained = plan.parameters
    yield f"plan of {planned.name}: {_model_words(planned)}"
    yield wrapped(
        f"  parameters   {total:,} in memory, of which {trained:,} train ({trained / total:.2%})"
    )
    yield wrapped(f"  per device   {_settings_words(planned, plan)}")
    yield ""
    roles = plan.roles
    columns = [c for c in _COLUMNS if c != "gathered" or any(r.gathered for r in roles.values())]
    negligible = max(role.weights for role in roles.values()) / 1000

    def cell(role: RoleMemory, column: str) -> str:
        size: int = getattr(role, column)
        if column == "weights" and size < negligible:
            return "shared"  # but for a head of its own
        return _gib(size) if size else "-"

    rows = [[name, *(cell(role, column) for column in columns)] for name, role in roles.items()]
    yield from [*table(["GiB", *columns], rows), ""]
    yield from _memory_lines(plan, card)
    if card is not None:
        yield wrapped(f"  device       {_device_words(planned, card)}")
    if planned.better is not None:
        yield wrapped(f"  that fits    {_settings_words(planned, planned.better)}")
        yield wrapped(f"               {_peak_words(planned.better)}")
    if planned.largest:
        most = ", ".join(f"--{name} {rows}" for name, rows in planned.largest.items())
        yield wrapped(f"  largest      {most}")
    yield wrapped(f"  time         {_time_words(planned)}")
    time = (planned.better or plan).time
    yield from _launch_lines(planned, time)
    if card is None or card.bandwidth is None:
        names = COMMON_CARDS if card is None else cards_of_size(card.memory_bytes)
        yield from _speed_lines(expected_speeds(time, None, names))
    if planned.data is not None:
        yield ""
        yield from _data_lines(planned.data)
    if card is not None and planned.command:
        given = planned.options
        model = given.get("model_name_or_path", given.get("actor_model_name_or_path"))
        # The bundled data is for the bundled model and what is made of it.
        needs_data = model and not Path(model).expanduser().exists() and "data_path" not in given
        yield ""
        yield f"$ {planned.command}{' --data_path FILE' if needs_data else ''}"


def _cost_words(plan: StagePlan, card: Card | None) -> str:
    """Memory, and time where it is known."""
    seconds = None if card is None else plan.time.on(card)
    time = "" if seconds is None else f" and {duration(seconds.total)}"
    return f"{_gib(plan.peak)} GiB{time}"


def _memory_lines(plan: StagePlan, card: Card | None) -> Iterator[str]:
    """The most that it takes, recomputed or not, and of that what decodes; what is left out."""
    yield wrapped(f"  memory       {_peak_words(plan)}")
    if isinstance(plan.models, Roles):
        words = rollout_words(plan.config, plan.memory_plan, plan.models.actor.model)
        yield wrapped(f"  rollouts     {words}")
    kept, again = (
        _cost_words(with_recomputation(plan, on), card)
        for on in ((), recomputing_options(plan.config))
    )
    yield wrapped(f"  recomputed   {again} with gradient checkpointing, {kept} without")
    # What a composite model has beside text is not counted.
    if not plan.beside and (left_out := plan.left_out) is not None:
        names, size = left_out
        yield wrapped(
            f"  left out     {names}: {_gib(size)} GiB more where rows are about more than text"
        )


def _data_lines(data: DataAudit | str) -> Iterator[str]:
    """The lines that a run shows of its data, and what would stop it; why they are not counted."""
    if isinstance(data, str):
        yield wrapped(f"  data         {data}")
        return
    yield from (wrapped(f"  {line}") for line in data.lines())
    if refusal := data.refusal:
        yield wrapped(f"  refused      {refusal}")


def _model_words(planned: Planned) -> str:
    options = planned.options
    names = [name for name in flatten(planned.plan.config) if name.endswith("model_name_or_path")]
    models = [str(options[name]) for name in names if options.get(name)]
    known = [published_name(model) or model for model in models]
    return ", ".join(dict.fromkeys(known)) or "the bundled tiny model"


def _settings_words(planned: Planned, plan: StagePlan) -> str:
    config, count = plan.config, planned.processes
    settings = next(iter(plan.settings.values()))
    batch = [
        f"{counted(rows.at_once(plan), 'row')} at a time ({rows.phase})"
        for rows in batch_options(config)
    ]
    if not batch or config.batch.tokens_per_device:
        batch.append(f"{config.batch.tokens_per_device:,} tokens at a time (training)")
    longest = max(each.length * each.sequences for each in plan.trained.values())
    on, _ = recomputation(plan)
    return (
        f"{settings.dtype}, {count} process{'es' if count > 1 else ''}, ZeRO "
        f"{settings.zero_stage}{', offload' if settings.offload else ''}; {', '.join(batch)} of "
        f"up to {longest:,} tokens; activations {'recomputed' if on else 'kept'}"
    )


def _peak_words(plan: StagePlan) -> str:
    words = ", ".join(f"{name} {_gib(size)}" for name, size in plan.phases.items())
    words = f": {words}" if len(plan.phases) > 1 else ""
    if GENERATION in plan.phases:
        words += f", of which keys and values {_gib(plan.memory_plan.cache)}"
    if host := sum(role.host for role in plan.roles.values()):
        words += f"; {_gib(host)} GiB of host memory"
    return f"up to {_gib(plan.peak)} GiB per device by estimate{words}"


def _device_words(planned: Planned, card: Card) -> str:
    verdict = "fits" if planned.fits else "does not fit with these settings"
    if planned.fits is False and planned.better is None:
        verdict = (
            "does not fit, and no settings were found that fit: use a larger device, a smaller "
            "model or shorter rows"
        )
    return (
        f"{card.name}, {_gib(card.usable_bytes)} GiB of it usable (less the CUDA context and a "
        f"tenth): {verdict}"
    )


def _time_words(planned: Planned) -> str:
    shown = planned.better or planned.plan
    time, config = shown.time, shown.config
    unit = "an iteration" if time.decode_bytes else "a step"
    work = f"{operations(time.flops)} per device for {unit} of up to {time.tokens:,} tokens"
    spent = None if planned.card is None else time.on(planned.card)
    if spent is None:
        return f"{work}; --for with a GPU's name estimates the time"
    steps, seconds = config.optim.max_steps, spent.total
    whole = f"; {duration(steps * seconds)} for --max_steps {steps:,}" if steps else ""
    if isinstance(planned.data, DataAudit) and planned.data.kind != "prompts" and not steps:
        tokens = planned.data.tokens * config.optim.num_train_epochs
        whole = f"; {duration(tokens / time.tokens * seconds)} for the data's {tokens:,} tokens"
    how = f"at {EFFICIENCY:.0%} of the card's peak{' and with CUDA graphs' * (spent.replaying > 0)}"
    if spent.launching > spent.work and not spent.replaying:
        how = "limited by kernel launches"
    per_million = duration(1e6 / time.tokens * seconds)
    return (
        f"{work}: {duration(seconds)}, {time.tokens / seconds:,.0f} tokens/s, {per_million} for a "
        f"million tokens{whole}, {how}"
    )


@dataclass(frozen=True)
class Speed:
    """Tokens per second that are expected on a card, over all processes."""

    device: str
    training: float  # of a step or iteration but for decoding, in all of its tokens
    training_unfused: float  # with --fused_kernels off
    training_without_graphs: float
    decoding: float | None  # of responses; None where a stage has none
    decoding_without_graphs: float | None


def expected_speeds(
    time: StepTime, card: Card | None, names: Sequence[str] = COMMON_CARDS
) -> list[Speed]:
    """Of the card that is asked for, where its peak is known, and of others by their names."""
    cards = {each.name: each for each in ([card] if card else []) + [*map(find_card, names)]}
    speeds = []
    for each in cards.values():
        as_is, unfused = time.on(each), time.on(each, fused=False)
        eager = time.on(each, graphs=False)
        if as_is is None or unfused is None or eager is None:
            continue
        decodes = time.generated > 0
        speeds.append(
            Speed(
                each.name,
                time.tokens / as_is.training,
                time.tokens / unfused.training,
                time.tokens / eager.training,
                time.generated / as_is.decoding if decodes else None,
                time.generated / eager.decoding if decodes else None,
            )
        )
    return speeds


def _launch_lines(planned: Planned, time: StepTime) -> Iterator[str]:
    """What helps where launching takes the time, and what graphs of training give and take."""
    if (card := planned.card) is None:
        return
    if (seconds := time.on(card)) is not None:
        compiled = flatten(planned.plan.config)["compile"]
        if bound := launch_advice(seconds.launching, seconds.work, compiled=compiled):
            yield wrapped(f"  launches     {bound}")
    if kept := time.graph_bytes_on(card):
        eager = time.on(card, graphs=False)
        assert eager is not None
        yield wrapped(
            f"  graphs       passes of training run as CUDA graphs, which keep {_gib(kept)} GiB "
            f"more; --training_graphs off: {duration(eager.total)} and "
            f"{time.tokens / eager.total:,.0f} tokens/s"
        )


def _speed_lines(speeds: Sequence[Speed]) -> Iterator[str]:
    columns, rows = ["tokens/s, estimated", "training"], []
    for each in speeds:
        rows.append([each.device, f"{each.training:,.0f}"])
        if each.decoding is not None:
            rows[-1].append(f"{each.decoding:,.0f}")
    if rows:
        columns += ["decoding"] * (len(rows[0]) - len(columns))
        yield from table(columns, rows)


def _gib(size: int) -> str:
    return f"{size / GIB:.3g}"
