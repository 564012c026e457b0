"""The DeepSpeed JSON against the command line, and the configuration an engine gets."""

import json
from dataclasses import replace

import pytest

from dschat_lora.config.groups import BatchConfig, ModelConfig, OptimConfig, ParallelConfig
from dschat_lora.config.options import with_values
from dschat_lora.engine.ds_config import (
    default_zero,
    engine_config,
    loss_scaling,
    read_deepspeed_json,
    stated_values,
)
from helpers.runs import engine_settings
from helpers.step1 import ROOT

CONFIGS = ROOT / "configs" / "ds"
SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps")
# What each file says of ZeRO: stage and offload.
FILES = {
    "zero0": (0, False),
    "zero1": (1, False),
    "zero2": (2, False),
    "zero3": (3, False),
    "zero2_offload": (2, True),
    "zero3_offload": (3, True),
    "bf16": (2, False),
    "fp16": (2, False),
}


@pytest.fixture
def settle(tmp_path):
    """``settle(content, **options)``: the four configs where the JSON meets given options."""

    def call(content, world_size=1, **options):
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        parts = []
        for kind in (ModelConfig, BatchConfig, OptimConfig, ParallelConfig):
            names = kind.__dataclass_fields__.keys()
            own = {name: value for name, value in options.items() if name in names}
            if kind is ParallelConfig:
                own["deepspeed_config"] = str(path)
            parts.append(kind(**own))
        given = frozenset(options) | {"deepspeed_config"}
        load, batch, *rest = parts
        values = stated_values(
            load,
            {name: getattr(batch, name) for name in SIZES},
            *rest,
            given=given,
            world_size=world_size,
            tokens_per_device=batch.tokens_per_device,
        )
        return [with_values(part, values) for part in parts]

    return call


def engine(content, *, stage=2, offload=False, norm=1.0, native=None, **more):
    return engine_config(
        content,
        zero_stage=stage,
        offload=offload,
        micro_batch_size=4,
        accumulation_steps=8,
        max_grad_norm=norm,
        native_dtype=native,
        **more,
    )


# ---------------------------------------------------------------------------- files that come along


def test_every_file_is_known():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(FILES)


@pytest.mark.parametrize(("name", "zero"), FILES.items())
def test_file_says_what_the_options_alone_would(name, zero):
    stage, offload = zero
    content = read_deepspeed_json(str(CONFIGS / f"{name}.json"))
    assert content["zero_optimization"] == default_zero(stage, offload)
    for native in (None, "bf16", "fp16"):
        with_file = engine(content, stage=stage, offload=offload, native=native)
        assert with_file == engine({}, stage=stage, offload=offload, native=native)
    assert loss_scaling(content) == loss_scaling({})


@pytest.mark.parametrize(("name", "zero"), FILES.items())
@pytest.mark.parametrize("dtype", ["auto", "fp32", "bf16", "fp16"])
def test_file_leaves_everything_else_to_the_command_line(settle, name, zero, dtype):
    content = json.loads((CONFIGS / f"{name}.json").read_text())
    options = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 5,
        "max_grad_norm": 0.5,
        "dtype": dtype if name.startswith("zero") else name,
    }
    settled = {n: value for part in settle(content, **options) for n, value in vars(part).items()}
    assert {n: settled[n] for n in options} == options
    assert (settled["zero_stage"], settled["offload"]) == zero


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_file_of_a_compute_type_settles_it(settle, dtype):
    content = json.loads((CONFIGS / f"{dtype}.json").read_text())
    assert settle(content)[0].dtype == dtype
    with pytest.raises(ValueError, match=rf"sets {dtype}.enabled to .*, but --dtype is 'fp32'"):
        settle(content, dtype="fp32")


def test_the_readme_names_every_file():
    text = (CONFIGS / "README.md").read_text()
    assert not [name for name in FILES if f"`{name}.json`" not in text]


# ---------------------------------------------------------------------------- file against options

SHARED = [
    ("train_micro_batch_size_per_gpu", 4, "per_device_train_batch_size", 8),
    ("gradient_accumulation_steps", 4, "gradient_accumulation_steps", 8),
    ("gradient_clipping", 0.5, "max_grad_norm", 1.0),
    ("zero_optimization.stage", 2, "zero_stage", 3),
    ("bf16.enabled", True, "dtype", "fp16"),
    ("fp16.enabled", True, "dtype", "fp32"),
    ("zero_optimization.offload_optimizer", {"device": "cpu"}, "offload", False),
]


def nested(field, value):
    for part in reversed(field.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize(("field", "said", "option", "other"), SHARED)
def test_contradiction_names_file_field_option_and_way_out(settle, field, said, option, other):
    with pytest.raises(
        ValueError, match=rf"ds.json sets {field} to .*, but --{option} is"
    ) as caught:
        settle(nested(field, said), **{option: other})
    assert 'write "auto" in the file' in str(caught.value)


@pytest.mark.parametrize(
    ("field", "said", "option", "other"), [row for row in SHARED if "offload" not in row[0]]
)
def test_auto_and_absence_leave_the_option_as_given(settle, field, said, option, other):
    for content in (nested(field, "auto"), {}):
        settled = [vars(part).get(option) for part in settle(content, **{option: other})]
        assert [value for value in settled if value is not None] == [other]


def test_number_in_the_file_counts_where_no_option_is_given(settle):
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.25,
        "zero_optimization": {"stage": 1},
        "train_batch_size": 12,
    }
    _, batch, optim, parallel = settle(content, world_size=2)
    assert (batch.per_device_train_batch_size, batch.gradient_accumulation_steps) == (2, 3)
    assert (optim.max_grad_norm, parallel.zero_stage) == (0.25, 1)


def test_equal_values_are_no_contradiction(settle):
    settle({"gradient_accumulation_steps": 4}, gradient_accumulation_steps=4)
    settle({"zero_optimization": {"stage": 2}}, zero_stage=2)
    settle({"bf16": {"enabled": True}}, dtype="bf16")


def test_without_file_and_option_stage_is_zero():
    parts = (ModelConfig(), dict.fromkeys(SIZES, 1), OptimConfig(), ParallelConfig())
    assert stated_values(*parts, given=frozenset(), world_size=1)["zero_stage"] == 0
    assert read_deepspeed_json(None) == {}


def test_optimizer_that_says_device_none_offloads_nothing(settle):
    content = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}
    assert not settle(content)[3].offload


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_optimizer_and_schedule_are_the_command_lines(settle, section):
    with pytest.raises(
        ValueError, match=rf"sets {section}.params \['lr'\], which the command line"
    ):
        settle({section: {"type": "X", "params": {"lr": 1e-3, "eps": "auto"}}})
    settle({section: {"type": "X", "params": {"lr": "auto"}}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("", "cannot be read"),
        ("[]", "must hold a JSON object"),
        ('"zero2"', "must hold a JSON object"),
        ({"zero_optimization": []}, "must hold a JSON object"),
        ({"zero_optimization": {"stage": 5}}, "stage"),
        ({"zero_optimization": {"stage": "2"}}, "stage"),
        ({"zero_optimization": {"stage": True}}, "stage"),
        ({"gradient_accumulation_steps": "8"}, "gradient_accumulation_steps"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps"),
        ({"train_micro_batch_size_per_gpu": 0}, "per_gpu must be a whole number >= 1"),
        ({"gradient_clipping": -1}, "gradient_clipping must be a number >= 0"),
        ({"gradient_clipping": True}, "gradient_clipping"),
        ('{"gradient_clipping": NaN}', "nan"),
        ('{"gradient_clipping": Infinity}', "gradient_clipping"),
        ({"bf16": True}, "bf16"),
        ({"bf16": {"enabled": "true"}}, "bf16"),
        ({"fp16": True}, "fp16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16.*fp16"),
        ({"optimizer": "Adam"}, "optimizer"),
        ({"scheduler": {"params": None}}, "scheduler"),
        ({"train_batch_size": 17}, "sets train_batch_size to 17, but .* is 16"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation"),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "--offload needs --zero_stage 1, 2 or 3",
        ),
    ],
    ids=str,
)
def test_unusable_file_is_refused_in_one_line(settle, content, message):
    with pytest.raises(ValueError, match=message):
        settle(content)


def test_missing_file_is_named():
    with pytest.raises(ValueError, match="--deepspeed_config none.json cannot be read"):
        read_deepspeed_json("none.json")


# ---------------------------------------------------------------------------- engine


def test_engine_gets_the_numbers_of_the_command_line_whatever_the_file_says():
    content = {
        "train_batch_size": 999,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": 12345},
        "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
    }
    config = engine(content, stage=2, norm=0.5)
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 8
    assert config["gradient_clipping"] == 0.5
    assert config["zero_optimization"]["stage"] == 2
    assert config["zero_optimization"]["reduce_bucket_size"] == 12345
    assert not {"train_batch_size", "optimizer", "scheduler"} & set(config)
    assert "auto" not in json.dumps(config)
    # 16-bit weights that train need stage 1 where the file says 0
    assert engine({"zero_optimization": {"stage": 0}}, stage=1)["zero_optimization"]["stage"] == 1


def test_clipping_is_always_stated_since_deepspeeds_default_is_not_none():
    assert engine({}, norm=0.0)["gradient_clipping"] == 0.0
    assert engine({}, stage=0, norm=1.0)["gradient_clipping"] == 0.0


@pytest.mark.parametrize("native", [None, "bf16", "fp16"])
def test_deepspeed_keeps_16_bit_masters_only_where_asked(native):
    config = engine({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, native=native)
    assert config["bf16"]["enabled"] == (native == "bf16")
    assert config["fp16"]["enabled"] == (native == "fp16")


def test_loss_scale_of_the_file_reaches_the_engine():
    content = {"fp16": {"enabled": "auto", "initial_scale_power": 8, "hysteresis": "auto"}}
    assert engine(content, native="fp16")["fp16"]["initial_scale_power"] == 8
    assert loss_scaling(content)["initial_scale_power"] == 8
    assert loss_scaling(content)["hysteresis"] == 2


def test_offload_puts_weights_on_the_host_at_stage_3_only():
    assert "offload_param" not in default_zero(2, offload=True)
    assert default_zero(3, offload=True)["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert default_zero(0, offload=True) == {"stage": 0}


def test_offloaded_weights_are_fetched_ahead_by_the_block():
    """Of OPT-13B: q, k, v, o, and the MLP of four times the width."""
    block = 4 * 5120**2 + 2 * 5120 * 4 * 5120
    for name in ("stage3_max_live_parameters", "stage3_prefetch_bucket_size"):
        assert default_zero(3, offload=True)[name] >= block


@pytest.mark.parametrize("said", [{}, {"stage3_prefetch_bucket_size": 5000}])
def test_engines_on_one_base_fetch_nothing_ahead_of_each_other(said):
    content, field = {"zero_optimization": said | {"stage": "auto"}}, "stage3_prefetch_bucket_size"
    before = json.dumps(content)
    fetched = [
        engine(content, stage=stage, shares_weights=shares)["zero_optimization"].get(field)
        for stage, shares in ((3, False), (3, True), (2, True))
    ]
    assert fetched == [said.get(field, default_zero(3, False)[field]), 0, said.get(field)]
    assert json.dumps(content) == before


def test_the_memory_estimate_knows_what_the_json_has_zero_3_gather():
    said = {"stage3_max_reuse_distance": 3_000, "reduce_bucket_size": "auto"}
    settings = engine_settings(stage=3, deepspeed_json={"zero_optimization": said})
    default = default_zero(3, False)["reduce_bucket_size"]
    assert settings.gathering() == {"reuse_distance": 3_000, "bucket_size": default}
    assert replace(settings, zero_stage=2).gathering() == {}
