import dataclasses
import itertools
import re
from functools import cache, partial

import pytest
import torch

from dschat_lora.addons.planning import memory_advice
from dschat_lora.addons.planning.memory_advice import MemoryOptions, out_of_memory_advice
from dschat_lora.config.groups import LoraConfig
from dschat_lora.models.build import AdaptedModel
from dschat_lora.perf.memory import MemoryEstimate, estimate_memory
from dschat_lora.runtime.memory import explaining_memory
from dschat_lora.runtime.roles import OneRole, trained_models
from helpers.perf_models import add_lora, opt, project_lora
from helpers.runs import LORA, engine_settings, load_model
from helpers.spread import ALL
from helpers.step1 import parsed

GIB = 2**30
SETTINGS = {
    **{"micro_batch_size": 16, "accumulation_steps": 2, "max_seq_len": 512},
    **{"gradient_checkpointing": False, "offload_activations": False, "zero_stage": 0},
    **{"world_size": 1, "offload": False, "trains_base": False, "lora_dim": 16, "dtype": "bf16"},
    "tensor_parallel_size": 1,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIONS = [f.name for f in dataclasses.fields(MemoryOptions) if f.name != "only_optimize_lora"]
NAMES = {
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation_steps",
}
FLAG = re.compile(r"--(\w+)(?: (\w+))?(?=[ :,)])")


def opt_1b(*, trains_base=False, dtype="bf16"):
    """OPT-1.3B's shape, without weights."""
    return _opt_1b(trains_base, dtype)


@cache
def _opt_1b(trains_base, dtype):
    sizes = {"hidden_size": 2048, "word_embed_proj_dim": 2048, "ffn_dim": 8192}
    layers = {"num_hidden_layers": 24, "num_attention_heads": 32}
    words = {"vocab_size": 50272, "max_position_embeddings": 2048}
    with torch.device("meta"):
        model = opt("sdpa", **sizes, **layers, **words).to(DTYPES[dtype])
        return model if trains_base else add_lora(model, 16, layer=project_lora)


def estimate_of(case):
    model = opt_1b(trains_base=case["trains_base"], dtype=case["dtype"])
    return partial(
        estimate_memory, model, compute_dtype=DTYPES[case["dtype"]], world_size=case["world_size"]
    )


def by_hand(*, weights=0, gradients=0, optimizer=0, per_row=0, loss=0, processes=1):
    """GiB, shared by ``processes``; ``per_row`` of 512 positions.

    A tenth of it where activations are recomputed, and a twentieth with inputs on the host.
    """

    def estimate(*, rows, length, gradient_checkpointing, offload_activations, zero_stage):
        activations = per_row * rows * length / 512
        if gradient_checkpointing:
            activations /= 20 if offload_activations else 10
        shared = {
            "weights": weights / (processes if zero_stage == 3 else 1),
            "gradients": gradients / (processes if zero_stage >= 2 else 1),
            "optimizer": optimizer / (processes if zero_stage >= 1 else 1),
        }
        parts = {**shared, "activations": activations, "loss": loss}
        return MemoryEstimate(**{name: round(size * GIB) for name, size in parts.items()})

    return estimate


def advise(estimate, device_bytes, *, larger_groups=(), **case):
    """The advice for a case under the names of :data:`SETTINGS`."""
    trains_base = case.pop("trains_base")
    options = {name: case.pop(NAMES.get(name, name)) for name in OPTIONS}
    assert not case, case
    now = MemoryOptions(**options, only_optimize_lora=options["lora_dim"] == 0 or not trains_base)
    return out_of_memory_advice(
        estimate, now, device_bytes=device_bytes, larger_groups=larger_groups
    )


def advice(estimate, device_gib, **changes):
    device = None if device_gib is None else round(device_gib * GIB)
    return advise(estimate, device, **(SETTINGS | changes))


def suggestions(text):
    """What each alternative changes, in the order of the text."""
    body = re.split(r"; |out of GPU memory: try", text, maxsplit=1)[1]
    flags = [dict(FLAG.findall(part + ")")) for part in re.split(r", or ", body)]
    assert sum(map(len, flags)) == text.count("--")
    return flags


def applied(case, flags):
    """The settings after a user has typed the flags."""
    case = dict(case)
    for flag, value in flags.items():
        if flag == "only_optimize_lora":
            case["trains_base"] = False
        elif flag == "lora_dim":
            case |= {"lora_dim": int(value), "trains_base": False}
        elif flag == "dtype":
            case["dtype"] = "bf16"
        else:
            case[NAMES.get(flag, flag)] = int(value) if value else True
    return case


def total_of(case):
    """Bytes by an estimate of the model as it would be built anew, offloaded parts left out."""
    masters = case["trains_base"] and case["dtype"] != "fp32"
    memory = estimate_of(case)(
        rows=case["micro_batch_size"],
        length=case["max_seq_len"],
        gradient_checkpointing=case["gradient_checkpointing"],
        offload_activations=case["offload_activations"],
        zero_stage=max(case["zero_stage"], int(masters)),
    )
    if not case["offload"]:
        return memory.total
    weights = memory.weights if case["zero_stage"] == 3 else 0
    return memory.total - memory.optimizer - memory.update - weights


AXES = {
    "micro_batch_size": (1, 6, 16),
    "gradient_checkpointing": (False, True),
    "zero_stage": (0, 1, 2, 3),
    "world_size": (1, 4),
    "offload": (False, True),
    "trains_base": (False, True),
    "lora_dim": (0, 16),
    "dtype": ("fp32", "bf16"),
}
CASES = [
    SETTINGS | dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())
]
CASES = [
    case
    for case in CASES
    if (case["trains_base"] or case["lora_dim"]) and (case["zero_stage"] or not case["offload"])
]
WEIGHTS_LEAD = by_hand(weights=30, per_row=1)
ROWS_LEAD = by_hand(weights=3, gradients=3, optimizer=9, per_row=4)
SHARED_WEIGHTS_LEAD = by_hand(weights=30, per_row=1, processes=4)


@pytest.mark.parametrize("device_gib", [None, 1, 24, 60, 200] if ALL else [None, 24])
@pytest.mark.parametrize("estimate", [None, WEIGHTS_LEAD, ROWS_LEAD], ids=["no", "w", "rows"])
def test_every_suggestion_can_be_followed(estimate, device_gib):
    for case in CASES:
        text = advise(estimate, device_gib and device_gib * GIB, **case)
        assert "()" not in text
        suggested = suggestions(text)
        assert all(flags not in suggested[:i] for i, flags in enumerate(suggested)), text
        assert len(suggested) <= 3 or estimate is None
        for flags in suggested:
            check_applicable(case, flags, text)


def check_applicable(case, flags, text):
    after = applied(case, flags)
    if flags:
        assert after != case, text
    assert not ("gradient_checkpointing" in flags and case["gradient_checkpointing"]), text
    assert not ("offload" in flags and case["offload"]), text
    assert not ("dtype" in flags and case["dtype"] != "fp32"), text
    assert not ("max_seq_len" in flags and case["micro_batch_size"] > 1), text
    assert after["max_seq_len"] >= 2
    assert not ({"lora_dim", "only_optimize_lora"} & flags.keys() and not case["trains_base"]), text
    assert ("lora_dim" in flags) <= (case["lora_dim"] == 0), text
    assert ("only_optimize_lora" in flags) <= (case["lora_dim"] > 0), text
    if "zero_stage" in flags:
        assert case["zero_stage"] < after["zero_stage"] <= 3, text
        assert case["world_size"] > 1 or after["offload"], text
    assert after["zero_stage"] >= 1 or not after["offload"], text
    assert after["micro_batch_size"] >= 1
    if "per_device_train_batch_size" in flags:
        rows = case["micro_batch_size"] * case["accumulation_steps"]
        assert after["micro_batch_size"] < case["micro_batch_size"]
        assert after["micro_batch_size"] * after["accumulation_steps"] == rows
        assert f"the same batch of {rows * case['world_size']} rows a step" in text


@pytest.mark.parametrize("device_gib", [3, 6, 9, 12, 16, 24] if ALL else [6, 16])
@pytest.mark.parametrize("change", [{}, {"trains_base": True, "lora_dim": 0}], ids=["LoRA", "full"])
@pytest.mark.parametrize("world_size", [1, 8])
def test_what_is_suggested_fits_by_a_fresh_estimate(device_gib, change, world_size):
    case = SETTINGS | change | {"world_size": world_size}
    text = advise(estimate_of(case), device_gib * GIB, **case)
    if "not enough" in text:
        return
    for flags in suggestions(text):
        assert flags, text
        if "lora_dim" not in flags:
            assert total_of(applied(case, flags)) <= 0.9 * device_gib * GIB


@pytest.mark.parametrize(("device_gib", "rows"), [(12, 8), (8, 4), (5, 2)])
def test_the_largest_micro_batch_that_fits_is_suggested(device_gib, rows):
    first = suggestions(advice(estimate_of(SETTINGS), device_gib))[0]
    assert int(first["per_device_train_batch_size"]) == rows
    assert total_of(SETTINGS | {"micro_batch_size": 2 * rows}) > 0.9 * device_gib * GIB


@pytest.mark.parametrize(
    ("rows", "device_gib", "fewer"),
    [(16, 67.1 / 0.9, 8), (16, 66.9 / 0.9, 4), (6, 15.1 / 0.9, 3), (6, 14.9 / 0.9, 2), (7, 20, 1)],
)
def test_rows_by_hand(rows, device_gib, fewer):
    """3 GiB and 4 a row, or 8: 16 rows of 8 halved need 67 with 3 for the rest, 90 percent."""
    per_row = 8 if rows == 16 else 4
    text = advice(by_hand(weights=3, per_row=per_row), device_gib, micro_batch_size=rows)
    first = suggestions(text)[0]
    assert int(first["per_device_train_batch_size"]) == fewer
    assert int(first["gradient_accumulation_steps"]) == 2 * rows // fewer


def test_the_whole_message():
    """16 rows of 3.825 GiB are 61.2; half of them, 30.6 + 14.3, fit 71.2 GiB of 79.1."""
    estimate = by_hand(weights=12.6, optimizer=1.2, per_row=3.825, loss=0.5)
    assert advice(estimate, 79.1) == (
        "out of GPU memory: by estimate 61.2 GiB of activations, 12.6 GiB of weights, 1.2 GiB of "
        "optimizer state and 0.5 GiB for the loss, on a device of 79.1 GiB; compute fewer rows at "
        "once (--per_device_train_batch_size 8 --gradient_accumulation_steps 4: the same batch of "
        "32 rows a step, so the run can be resumed), or recompute activations "
        "(--gradient_checkpointing), or use host memory (--zero_stage 3 --offload)"
    )


FULL = {"trains_base": True, "lora_dim": 0, "dtype": "fp32"}
ONE_ROW = {"micro_batch_size": 1, "gradient_checkpointing": True, "zero_stage": 3, "offload": True}


@pytest.mark.parametrize(
    ("estimate", "device_gib", "case", "words"),
    [
        # Parts are rounded to three digits, and tiny ones are left out.
        (
            by_hand(weights=1234.4, per_row=0.012345 * 1e3 / 16, loss=0.01),
            *(80, {}, "by estimate 1230 GiB of weights and 12.3 GiB of activations, on"),
        ),
        (by_hand(weights=30), 24, {}, "by estimate 30 GiB of weights, on a device of 24 GiB; "),
        (ROWS_LEAD, 200, {}, "where training should fit unless another program uses it"),
        # 16-bit weights that train run at stage 1: 24 GiB are shared by four.
        (
            by_hand(weights=2, gradients=2, optimizer=24, per_row=1, processes=4),
            *(24, FULL | {"dtype": "bf16", "world_size": 4}, "6 GiB of optimizer state"),
        ),
        (
            by_hand(per_row=10),
            *(12, {"gradient_checkpointing": True, "accumulation_steps": 1}),
            "keep inputs of blocks in host memory (--offload_activations)",
        ),
        (by_hand(weights=3, optimizer=0.1, per_row=0.02), 3.5, {}, "--gradient_checkpointing"),
        (by_hand(loss=50), 24, ONE_ROW, "no option is left"),
    ],
)
def test_what_is_said(estimate, device_gib, case, words):
    assert words in advice(estimate, device_gib, **case)


OFFLOADED = by_hand(weights=3, optimizer=9, per_row=1)


@pytest.mark.parametrize(
    ("estimate", "device_gib", "case", "words"),
    [
        (ROWS_LEAD, 60, {}, "unless another program"),
        # 16 bits win nothing where all weights train, of which 28.8 GiB fit.
        (by_hand(weights=8, gradients=8, optimizer=16, per_row=0.01), 32, FULL, "--dtype"),
        # State in host memory is not on the device.
        (OFFLOADED, 12, {"zero_stage": 1, "offload": True}, "of optimizer state"),
        (OFFLOADED, 12, {"zero_stage": 3, "offload": True}, "of weights"),
        # It saves next to nothing.
        (by_hand(weights=3, optimizer=0.1, per_row=0.01), 3, {}, "--gradient_checkpointing"),
        # ZeRO 3 shares these weights already.
        (
            by_hand(weights=60, per_row=0.01, processes=2),
            *(20, {"world_size": 2, "zero_stage": 3, "larger_groups": (2,)}, "--tensor"),
        ),
        (WEIGHTS_LEAD, 30, {"world_size": 4}, "--tensor"),
    ],
)
def test_what_is_not_said(estimate, device_gib, case, words):
    assert words not in advice(estimate, device_gib, **case)


HOST = {"zero_stage": "3", "offload": ""}
SHARED_STATE = by_hand(weights=4, gradients=4, optimizer=24, processes=4)
STATE = by_hand(weights=8, gradients=8, optimizer=16)
RECOMPUTED, MOVED = {"gradient_checkpointing": ""}, {"offload_activations": ""}


@pytest.mark.parametrize(
    ("estimate", "device_gib", "case", "suggested"),
    [
        # Where weights take the most, fewer rows are not advised.
        (SHARED_WEIGHTS_LEAD, 40, {"world_size": 4}, [RECOMPUTED, {"zero_stage": "3"}, HOST]),
        (WEIGHTS_LEAD, 20, {}, [HOST]),
        # 16 bits leave 15 of weights and 8 of activations, sharing 7.5 and 16.
        (
            SHARED_WEIGHTS_LEAD,
            *(30, {"world_size": 4, "dtype": "fp32"}),
            [{"dtype": "auto"}, {"zero_stage": "3"}, HOST],
        ),
        # Gradients and optimizer state are shared before weights: 4 + 1 + 6.
        (
            *(SHARED_STATE, 12.3, FULL | {"world_size": 4}),
            [{"zero_stage": "2"}, {"zero_stage": "1", "offload": ""}, {"lora_dim": "16"}],
        ),
        (
            *(SHARED_STATE, 12.1, FULL | {"world_size": 4}),
            [{"zero_stage": "3"}, {"zero_stage": "1", "offload": ""}, {"lora_dim": "16"}],
        ),
        # 16 rows of 10 GiB: recomputed 16, from the host 8; 10.8 may be used. One row takes 10.
        (
            *(by_hand(per_row=10), 12, {"accumulation_steps": 1}),
            [
                {"per_device_train_batch_size": "1", "gradient_accumulation_steps": "16"},
                RECOMPUTED | MOVED,
            ],
        ),
        (STATE, 24, FULL, [{"zero_stage": "1", "offload": ""}, {"lora_dim": "16"}]),
        (
            *(STATE, 24, FULL | {"lora_dim": 8}),
            [{"zero_stage": "1", "offload": ""}, {"only_optimize_lora": ""}],
        ),
        # 80 GiB at 512, 20 at 128
        (by_hand(weights=3, per_row=800), 24, ONE_ROW, [{"max_seq_len": "128"}]),
        # Without an estimate the cheapest comes first.
        (
            *(None, 80, FULL | {"micro_batch_size": 1, "world_size": 4}),
            [
                RECOMPUTED,
                *({"dtype": "auto"}, {"zero_stage": "2"}, {"zero_stage": "1", "offload": ""}),
                *({"lora_dim": "16"}, {"max_seq_len": "256"}),
            ],
        ),
    ],
)
def test_what_is_suggested_in_this_order(estimate, device_gib, case, suggested):
    assert suggestions(advice(estimate, device_gib, **case)) == suggested


def test_changes_that_only_fit_together_are_the_fewest():
    """16 rows of 4 GiB and 15 of state, 16.2 may be used.

    One row leaves 19, recomputed 16 leave 21.4, from the host 18.2, and of these 4 leave 15.8.
    """
    text = advice(ROWS_LEAD, 18)
    assert "no single change is enough, take together" in text
    (flags,) = suggestions(text)
    assert flags == {
        "per_device_train_batch_size": "4",
        "gradient_accumulation_steps": "8",
        "gradient_checkpointing": "",
        "offload_activations": "",
    }
    assert text.endswith("the same batch of 32 rows a step, so the run can be resumed")


def test_a_run_that_changes_its_type_is_not_said_to_resume():
    """Recomputed rows of 4 GiB: one of them, or 16 of half the size, is more than 3.3."""
    case = {"gradient_checkpointing": True, "offload_activations": True, "zero_stage": 3}
    text = advice(by_hand(per_row=80), 3.3, offload=True, dtype="fp32", **case)
    assert "--per_device_train_batch_size 1 --gradient_accumulation_steps 32 --dtype auto" in text
    assert text.endswith(": the same batch of 32 rows a step")


def test_what_cannot_fit_is_said():
    text = advice(by_hand(weights=9, per_row=10, loss=50), 24)
    assert text.endswith(
        "all that helps is not enough (--per_device_train_batch_size 1 "
        "--gradient_accumulation_steps 32 --gradient_checkpointing --offload_activations "
        "--zero_stage 3 --offload: the same batch of 32 rows a step, so the run can be resumed): "
        "take a larger device or a smaller model"
    )


def test_without_a_known_device_the_most_effective_comes_first():
    """Of 64 + 15 GiB: recomputing saves 57.6, half the rows 32, host memory 12."""
    text = advice(ROWS_LEAD, None)
    assert [next(iter(flags)) for flags in suggestions(text)] == [
        "gradient_checkpointing",
        "per_device_train_batch_size",
        "zero_stage",
    ]
    assert "device" not in text.partition(";")[0]


def test_dividing_the_model_is_advised_where_that_is_enough():
    """30 GiB of weights and 16 of rows: halved, 31; in four parts, 23.5."""
    more = {"world_size": 4, "larger_groups": (2, 4), "gradient_checkpointing": True}
    divided = {"tensor_parallel_size": "2", "gradient_accumulation_steps": "4"}
    assert suggestions(advice(by_hand(weights=30, per_row=10), 35, **more))[0] == divided
    text = advice(by_hand(weights=30, per_row=10), 27, **more)
    assert "--gradient_accumulation_steps 8 --tensor_parallel_size 4" in text
    # 16 rows of 2 micro-batches on 4 processes
    assert "the same batch of 128 rows a step, so the run can be resumed" in text


def test_fewer_rows_and_a_divided_model_together_keep_the_batch():
    """15 GiB of halved weights and one row of 4: 8 x 2 times the 2 micro-batches."""
    case = {"micro_batch_size": 8, "gradient_checkpointing": True, "world_size": 2}
    text = advice(by_hand(weights=30, per_row=40), 19.5 / 0.9, larger_groups=(2,), **case)
    assert "take together" in text
    assert suggestions(text) == [
        {
            "per_device_train_batch_size": "1",
            "gradient_accumulation_steps": "32",
            "tensor_parallel_size": "2",
        }
    ]


@pytest.mark.parametrize(
    ("processes", "options", "advised"),
    [
        (4, (), "2"),
        (4, ("--tensor_parallel_size", 2), "4"),
        (4, ("--tensor_parallel_size", 4), None),
        (1, (), None),
        (3, (), None),
    ],
)
def test_only_sizes_that_processes_and_model_allow_are_advised(
    processes, options, advised, monkeypatch
):
    """OPT with four heads."""
    monkeypatch.setattr(memory_advice, "world_size", lambda: processes)
    monkeypatch.setattr(memory_advice, "make_estimator", lambda *_: by_hand(weights=30))
    model = AdaptedModel(add_lora(opt(), 4, layer=project_lora), LoraConfig(lora_dim=4), [])
    config = parsed("--lora_dim", 4, *options)
    text = memory_advice.advise(None, None, model, config, engine_settings())
    sizes = [flags.get("tensor_parallel_size") for flags in suggestions(text)]
    assert next(filter(None, sizes), None) == advised


def test_the_error_of_a_stage_has_what_fills_the_device_and_which_options_help(
    model_directory, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory_advice, "world_size", lambda: 1)
    adapted = AdaptedModel(load_model(model_directory("opt"), LORA), LoraConfig(**LORA), [])
    config = parsed("--lora_dim", 4, "--per_device_train_batch_size", 8, "--max_seq_len", 16)
    facts = ("supervised_memory", adapted, config, engine_settings(micro=8))
    with (
        pytest.raises(torch.OutOfMemoryError, match="^out of GPU memory: by estimate ") as error,
        explaining_memory(tmp_path, None, *facts),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert "--per_device_train_batch_size 4 --gradient_accumulation_steps 2" in str(error.value)


def test_what_graphs_of_training_keep_is_named_where_they_are_taken(monkeypatch, model_directory):
    monkeypatch.setattr(memory_advice, "world_size", lambda: 1)
    adapted = AdaptedModel(load_model(model_directory("opt"), LORA), LoraConfig(**LORA), [])
    config = parsed("--lora_dim", 4, "--per_device_train_batch_size", 8, "--max_seq_len", 16)

    def advised(taken):
        monkeypatch.setattr(memory_advice, "takes_graphs", lambda *_, **__: taken)
        return memory_advice.advise(None, None, adapted, config, engine_settings(micro=8))

    assert "--training_graphs" not in advised(False)
    (one,) = trained_models(config, OneRole(adapted)).values()
    kept = one.estimated().activations
    assert f"--training_graphs off takes {kept / 2**30:.3g} GiB less" in advised(True)
