"""Which blocks are recomputed, in which micro-batches: as told, as before, else the fastest."""

import dataclasses
import json
from types import SimpleNamespace
from typing import ClassVar

import pytest

from dschat_lora.config.groups import LoadConfig
from dschat_lora.config.options import flatten, parse_config
from dschat_lora.config.stages import DpoStageConfig, SupervisedConfig
from dschat_lora.perf.launches import LAUNCH_SECONDS, PassSeconds
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime import graphs as training_graphs
from dschat_lora.runtime import memory, micro_batches
from dschat_lora.runtime.micro_batches import StepCosts, settle, smaller_micro_batches

ONE = "gradient_checkpointing"
ACTOR, CRITIC = "actor_gradient_checkpointing", "critic_gradient_checkpointing"
ROWS, TIMES = "per_device_train_batch_size", "gradient_accumulation_steps"
GIB = 2**30


@dataclasses.dataclass
class Model:
    """A model that trains on rows of 512 tokens: 2 ms each, 3 ms recomputed; launching takes 5."""

    rows: int
    recomputes: bool
    tokens: int = 0
    length: int = 512
    sequences: int = 1
    zero_stage: ClassVar[int] = 0

    @property
    def settings(self):
        return SimpleNamespace(zero_stage=self.zero_stage)

    def seconds(self, peak, *, fused):
        rows = self.tokens // 512 if self.tokens else self.rows
        kernels = 0.00475 / LAUNCH_SECONDS  # that graphs replay in a fifteenth of the time
        return PassSeconds((2 + self.recomputes) * 1e-3 * rows, 5e-3, blocks=kernels)

    def estimated(self):
        return SimpleNamespace(activations=self.rows * GIB)


def trained(config):
    values = flatten(config)
    if "actor_lora_dim" not in values:
        return [Model(values[ROWS], values[ONE] is True, values["tokens_per_device"])]
    rows, tokens = values["per_device_training_batch_size"], values["tokens_per_device"]
    return [Model(rows, values[name] is True, tokens) for name in (CRITIC, ACTOR)]


def decide(
    line, need, *, free, earlier=None, tmp_path=None, peak=None, of=None, able=True, graphs="auto"
):
    """What ``line`` comes to on a device with ``free`` GiB, going on from ``earlier``."""
    config_class = of or (RlhfConfig if "actor" in line else SupervisedConfig)
    config = parse_config(config_class, line.split())
    options = [ONE] if config_class is not RlhfConfig else [CRITIC, ACTOR]
    if earlier is not None:
        (tmp_path / "state.json").write_text(json.dumps({"config": earlier}))
        config = dataclasses.replace(config, checkpoint=str(tmp_path))

    def bytes_of(config):
        values = flatten(config)
        on = [name for name in options if values[name] is True]
        needed = need(on) if peak is None else need(on, trained(config)[0])
        return None if needed is None else round(needed * GIB)

    load = LoadConfig(training_graphs=graphs)
    costs = StepCosts(bytes_of, trained, load, peak, budget=0.9 * free * GIB)
    return settle(config, options, costs, free=round(free * GIB), able=able)


def halves(on):
    """10 GiB, of which recomputation leaves 4."""
    return 4 if on else 10


def roles(on):
    """Of 20 GiB, the critic can do without 3 and the actor without 8."""
    return 20 - 3 * (CRITIC in on) - 8 * (ACTOR in on)


# 90 percent of a device are counted upon: 10 GiB ask for 11.1.
@pytest.mark.parametrize(("free", "on"), [(11.2, False), (11.0, True), (2, True)])
def test_auto_recomputes_where_memory_asks_for_it_and_nowhere_else(free, on):
    decided, words = decide("", halves, free=free)
    assert decided == {ONE: on}
    assert (words is not None) == on


def test_reason_is_told_with_its_numbers():
    _, words = decide("", halves, free=8)
    assert words == (
        "activations are recomputed (--gradient_checkpointing): by estimate 10 GiB per device "
        "without, 4 GiB with, of 8 GiB free"
    )


@pytest.mark.parametrize(
    ("line", "free", "on"),
    [
        ("--gradient_checkpointing", 1000, True),
        ("--gradient_checkpointing on", 1000, True),
        ("--gradient_checkpointing off", 1, False),
        ("--no-gradient_checkpointing", 1, False),
    ],
)
def test_what_is_asked_for_holds_whatever_the_memory_and_needs_no_word(line, free, on):
    assert decide(line, halves, free=free) == ({ONE: on}, None)


def test_nothing_is_recomputed_of_what_cannot_be_or_is_not_understood():
    assert decide("", halves, free=1, able=False) == ({ONE: False}, None)
    assert decide("", lambda on: None, free=1) == ({ONE: False}, None)


@pytest.mark.parametrize(
    ("free", "on"),
    [
        (22.3, {ACTOR: False, CRITIC: False}),
        (22.0, {ACTOR: False, CRITIC: True}),
        (18.0, {ACTOR: True, CRITIC: False}),
        (13.0, {ACTOR: True, CRITIC: True}),
        (1.0, {ACTOR: True, CRITIC: True}),
    ],
)
def test_of_two_roles_as_few_recompute_as_must(free, on):
    decided, words = decide("--actor_lora_dim 8", roles, free=free)
    assert decided == on
    named = set() if words is None else {name for name in on if f"--{name}" in words}
    assert named == {name for name in on if on[name]}


def test_role_that_was_told_is_left_and_its_saving_counts():
    decided, words = decide("--actor_gradient_checkpointing", roles, free=14)
    assert decided == {ACTOR: True, CRITIC: False}
    assert words is None
    decided, words = decide("--actor_gradient_checkpointing", roles, free=13)
    assert decided == {ACTOR: True, CRITIC: True}
    assert "(--critic_gradient_checkpointing): by estimate 12 GiB per device without" in words


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("free", [2, 1000])
def test_resumed_run_does_as_it_did_whatever_is_free(before, free, tmp_path):
    decided, words = decide("", halves, free=free, earlier={ONE: before}, tmp_path=tmp_path)
    assert (decided, words) == ({ONE: before}, None)


def test_resumed_run_decides_anew_where_auto_is_typed(tmp_path):
    earlier = {"earlier": {ONE: True}, "tmp_path": tmp_path}
    assert decide("--gradient_checkpointing auto", halves, free=99, **earlier)[0] == {ONE: False}
    assert decide("--no-gradient_checkpointing", halves, free=2, **earlier)[0] == {ONE: False}


def test_checkpoint_from_before_the_option_decides_as_a_fresh_run(tmp_path):
    decided, _ = decide("", halves, free=2, earlier={}, tmp_path=tmp_path)
    assert decided == {ONE: True}


def test_rank_zero_decides_for_all(monkeypatch):
    told = json.dumps([{ONE: False, ROWS: 4, TIMES: 4}, "as rank 0 says"])
    monkeypatch.setattr(micro_batches, "rank", lambda: 1)
    monkeypatch.setattr(micro_batches, "broadcast_string", lambda fact: told)
    said, record = [], {}
    run = SimpleNamespace(log=SimpleNamespace(say=said.append), record=record)
    config = parse_config(SupervisedConfig, [])
    costs = StepCosts(lambda config: 0, trained, LoadConfig(), None, budget=GIB)
    config = micro_batches.resolve_step(run, {ONE: None}, config, costs, free=GIB)
    assert (config.batch.per_device_train_batch_size, config.model.gradient_checkpointing) == (
        4,
        False,
    )
    assert config.batch.gradient_accumulation_steps == 4
    assert said == ["  note         as rank 0 says"]
    assert record == {ONE: False, ROWS: 4, TIMES: 4}


def by_rows(on, model):
    """A GiB for each row whose activations are kept, a quarter for others; and 2 of weights."""
    rows = model.tokens // 512 if model.tokens else model.rows
    return 2 + rows * (0.25 if on else 1)


# Of 16 rows: 18 GiB, 10 in eights, 6 in fours, 4 in twos, 3 in ones; recomputed 6 in one.
# Milliseconds: 32 down to fours, in twos 8 x 5 of launching, in ones 80; recomputed 48.
@pytest.mark.parametrize(
    ("gib", "rows", "on"),
    [
        (18, 16, False),
        (17, 8, False),
        (9, 4, False),
        (5, 2, False),
        (3.6, 4, True),  # twos of 40 ms need 4; 12 ms x 4 recomputed, and ones would take 80
        (3.1, 4, True),
        (2.9, 2, True),  # 8 x 6 ms
    ],
)
def test_a_gpu_divides_a_step_as_long_as_that_is_faster_than_recomputing_it(gib, rows, on):
    decided, _ = decide("", by_rows, free=gib / 0.9 + 0.001, peak=1.0)
    expected = {ONE: on} | ({ROWS: rows, TIMES: 16 // rows} if rows < 16 else {})
    assert decided == expected


def test_graphs_count_where_a_run_takes_them_and_their_memory_is_there(monkeypatch):
    monkeypatch.setattr(training_graphs, "takes_graphs", lambda each, load, peak: each.rows < 4)

    def words(gib, graphs="auto"):
        return decide("", by_rows, free=gib / 0.9 + 0.001, peak=1.0, graphs=graphs)

    # In twos 8 x 5 ms, or with graphs 8 x (4 + 0.25 + 4.75 / 15): of 4 GiB, and 2 that graphs keep.
    assert words(5.9)[0] == {ONE: False, ROWS: 2, TIMES: 8}
    assert "by estimate 4 GiB and 0.04 s a step of training" in words(5.9)[1]
    assert "by estimate 4 GiB and 0.0365 s a step of training" in words(5.9, graphs="on")[1]
    # In ones of 3 GiB, whose graphs keep 1: 16 x 2.5 ms.
    assert words(3.9)[0] == {ONE: True, ROWS: 4, TIMES: 4}
    assert words(4 - 1e-3 + 0.1, graphs="on")[0][ROWS] == 2


def test_where_nothing_fits_the_least_is_taken():
    assert decide("", by_rows, free=0.1, peak=1.0)[0] == {ONE: True, ROWS: 1, TIMES: 16}


def test_both_roles_keep_or_recompute_in_the_micro_batches_of_one_size():
    def need(on, model):
        return 2 + model.rows * (2 - 0.5 * (CRITIC in on) - (ACTOR in on))

    size = "per_device_training_batch_size"
    decided, _ = decide("--actor_lora_dim 8", need, free=20 / 0.9, peak=1.0)
    assert decided == {ACTOR: False, CRITIC: False, size: 8, TIMES: 2}
    decided, _ = decide(f"--actor_lora_dim 8 --{size} 16", need, free=20 / 0.9, peak=1.0)
    assert decided == {ACTOR: True, CRITIC: False}


def test_what_was_chosen_is_told_with_what_the_other_would_take():
    _, words = decide("", by_rows, free=40, peak=1.0)
    assert words == (
        "activations are kept: by estimate 18 GiB and 0.032 s a step of training, of 40 GiB free; "
        "recomputed 6 GiB and 0.048 s a step"
    )
    _, words = decide("", by_rows, free=11.2, peak=1.0)
    assert words == (
        "activations are kept with smaller micro-batches (--per_device_train_batch_size 8 "
        "--gradient_accumulation_steps 2): by estimate 10 GiB and 0.032 s a step of training, of "
        "11.2 GiB free; kept, with whole micro-batches, 18 GiB and 0.032 s a step; recomputed in "
        "whole ones 6 GiB and 0.048 s a step"
    )


@pytest.mark.parametrize(
    ("typed", "advised"),
    [
        (f"--{ROWS} 16", f"--{ROWS} 8 --{TIMES} 2"),
        ("--tokens_per_device 8192", f"--tokens_per_device 4096 --{TIMES} 2"),
    ],
)
def test_micro_batches_that_are_typed_stay_and_what_a_division_would_give_is_told(typed, advised):
    decided, words = decide(typed, by_rows, free=11.2, peak=1.0)
    assert decided == {ONE: True}
    assert words == (
        "activations are recomputed (--gradient_checkpointing): by estimate 6 GiB and 0.048 s a "
        "step of training, of 11.2 GiB free; kept, with whole micro-batches, 18 GiB and 0.032 s a "
        f"step. {advised} makes the same step in 10 GiB and 0.032 s a step"
    )
    assert decide(typed, by_rows, free=40, peak=1.0)[1].endswith(
        "recomputed 6 GiB and 0.048 s a step"
    )


@pytest.mark.parametrize(
    "line",
    [
        "--lora_dropout 0.1 --lora_dim 8",
        "--dropout 0.1",
        "--neftune_noise_alpha 5",
        "--router_aux_loss_coef 0.1",
        "--offload --zero_stage 1",
        "--tensor_parallel_size 2",
        "--context_parallel_size 2",
        "--deepspeed_config configs/ds/zero2.json",
        pytest.param("--loss_type kto", id="means over unpaired answers"),
    ],
)
def test_a_step_that_another_division_would_change_or_slow_is_not_divided(line):
    of = DpoStageConfig if "loss_type" in line else SupervisedConfig
    decided, words = decide(line, by_rows, free=11.2, peak=1.0, of=of)
    assert decided == {ONE: True}
    assert "makes the same step" not in words


def test_sharded_weights_and_gradients_are_exchanged_once_a_micro_batch(monkeypatch):
    for stage, divided in ((1, True), (2, False), (3, False)):
        monkeypatch.setattr(Model, "zero_stage", stage)
        decided, _ = decide("", by_rows, free=11.2, peak=1.0)
        assert (ROWS in decided) == divided


def test_resumed_run_keeps_its_micro_batches(tmp_path):
    """They are among its typed options then."""
    earlier = {ONE: False, ROWS: 8, TIMES: 2}
    line = f"--{ROWS} 8 --{TIMES} 2"
    decided, _ = decide(line, by_rows, free=3, peak=1.0, earlier=earlier, tmp_path=tmp_path)
    assert decided == {ONE: False}


def test_smaller_micro_batches_make_the_same_step():
    config = parse_config(SupervisedConfig, f"--{ROWS} 6 --{TIMES} 4".split())
    sizes = [(s[ROWS], s[TIMES]) for s in smaller_micro_batches(config, longest=512)]
    assert sizes == [(4, 6), (3, 8), (2, 12), (1, 24)]
    config = parse_config(RlhfConfig, ["--tokens_per_device", "4000"])
    budgets = [*smaller_micro_batches(config, longest=512)]
    assert budgets == [{"tokens_per_device": 2000}, {"tokens_per_device": 1000}]


def test_host_memory_is_shared_by_the_processes_of_a_node_and_the_least_counts(monkeypatch):
    class Host:
        available = 12 * GIB

    monkeypatch.setattr(memory.psutil, "virtual_memory", Host)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(memory, "max_over_ranks", lambda value: max(value, -1.0 * GIB))
    assert memory.free_memory() == GIB
    monkeypatch.setattr(memory, "max_over_ranks", lambda value: max(value, -5.0 * GIB))
    assert memory.free_memory() == 4 * GIB
