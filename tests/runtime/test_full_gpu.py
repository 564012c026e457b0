"""A full GPU: what to change, and where to go on. The error is raised by hand."""

import pytest
import torch

from dschat_lora.checkpoint.history import step_directory
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import DpoStageConfig, SupervisedConfig
from dschat_lora.models.build import AdaptedModel
from dschat_lora.runtime.memory import (
    GIB,
    MemoryPlan,
    TrainedModel,
    explaining_memory,
    plan_memory,
)
from dschat_lora.runtime.roles import OneRole, trained_models
from helpers.runs import LORA, engine_settings, load_model


def message(run, plan=None):
    """What running out of memory in ``run``'s directory says where no add-on advises."""
    with (
        pytest.raises(torch.OutOfMemoryError) as error,
        explaining_memory(run, plan, "an occasion that none knows"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    return str(error.value)


def test_message_has_the_estimate_and_the_newest_checkpoint(tmp_path):
    cause = "CUDA out of memory. Tried to allocate 2 GiB"
    assert message(tmp_path) == f"out of GPU memory: {cause}"
    for step in (5, 10):
        step_directory(tmp_path, step).mkdir(parents=True)
    assert message(tmp_path, MemoryPlan(2 * GIB, 0, 3 * GIB, GIB, 0)) == (
        f"out of GPU memory, by estimate 6 GiB are needed: {cause}. The newest valid checkpoint is "
        f"{step_directory(tmp_path, 10)}"
    )


def test_other_errors_are_left_as_they_are(tmp_path):
    with pytest.raises(KeyError), explaining_memory(tmp_path, None, "rl_memory"):
        raise KeyError("x")


def needed(adapted, config):
    return plan_memory([*trained_models(config, OneRole(adapted)).values()]).peak


def test_a_row_of_pairs_needs_the_memory_of_two_sequences(model_directory):
    adapted = AdaptedModel(load_model(model_directory("opt"), LORA), LoraConfig(**LORA), [])
    argv = ["--lora_dim", "4", "--per_device_train_batch_size", "8", "--max_seq_len"]
    one, two, longer = (
        needed(adapted, parse_config(kind, [*argv, length]))
        for kind, length in (
            (SupervisedConfig, "16"),
            (DpoStageConfig, "16"),
            (SupervisedConfig, "32"),
        )
    )
    assert one < two == longer


def test_two_models_need_what_each_needs_and_shared_tensors_once(model_directory, monkeypatch):
    monkeypatch.setattr("dschat_lora.runtime.memory.data_world_size", lambda: 1)
    first, second = (
        TrainedModel(
            load_model(model_directory("opt"), LORA),
            engine_settings(micro=8),
            rows=8,
            length=16,
            recomputes=recomputes,
        )
        for recomputes in (False, True)
    )
    one, other, both, twice = map(plan_memory, ([first], [second], [first, second], [first, first]))
    assert other.update < one.update
    for name in ("weights", "separate_weights", "training", "update"):
        assert getattr(both, name) == getattr(one, name) + getattr(other, name)
    assert twice.weights == one.weights
    assert twice.separate_weights == 2 * one.weights
    assert plan_memory([first], cache=one.update + 5).peak == one.peak + 5
