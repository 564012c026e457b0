"""Which blocks are recomputed: what was asked for, what a run did before, what memory asks for."""

import dataclasses
import json

import pytest

from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime import memory

ONE = "gradient_checkpointing"
ACTOR, CRITIC = "actor_gradient_checkpointing", "critic_gradient_checkpointing"
GIB = 2**30


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A single process, which agrees with itself."""
    monkeypatch.setattr(memory, "broadcast_string", lambda fact: fact)


def decide(line, need, *, free, earlier=None, tmp_path=None):
    """What ``line`` comes to on a device with ``free`` GiB, going on from ``earlier``."""
    argv = line.split()
    config = parse_config(RlhfConfig if "actor" in line else SupervisedConfig, argv)
    if isinstance(config, RlhfConfig):
        switches = {
            CRITIC: config.critic.gradient_checkpointing,
            ACTOR: config.actor.gradient_checkpointing,
        }
    else:
        switches = {ONE: config.model.gradient_checkpointing}
    if earlier is not None:
        (tmp_path / "state.json").write_text(json.dumps({"config": earlier}))
        config = dataclasses.replace(config, checkpoint=str(tmp_path))
    return memory.settle_recomputation(
        config, switches, lambda on: round(need(on) * GIB), free=round(free * GIB)
    )


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
    monkeypatch.setattr(memory, "rank", lambda: 1)
    monkeypatch.setattr(
        memory, "broadcast_string", lambda fact: json.dumps([[ONE], "as rank 0 says"])
    )
    assert decide("", halves, free=1000) == ({ONE: True}, "as rank 0 says")


def test_host_memory_is_shared_by_the_processes_of_a_node_and_the_least_counts(monkeypatch):
    class Host:
        available = 12 * GIB

    monkeypatch.setattr(memory.psutil, "virtual_memory", Host)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(memory, "max_over_ranks", lambda value: max(value, -1.0 * GIB))
    assert memory.free_memory() == GIB
    monkeypatch.setattr(memory, "max_over_ranks", lambda value: max(value, -5.0 * GIB))
    assert memory.free_memory() == 4 * GIB
