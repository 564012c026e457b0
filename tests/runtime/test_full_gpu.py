"""A full GPU: what to change, and where to go on. The error is raised by hand."""

import pytest
import torch

from dschat_lora.checkpoint.history import step_directory
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import DpoStageConfig, SupervisedConfig
from dschat_lora.models.build import AdaptedModel
from dschat_lora.runtime.advice import explaining_memory
from dschat_lora.runtime.memory import TrainedModel, estimate_memory_of, plan_memory
from helpers.runs import LORA, engine_settings, load_model
from helpers.step1 import parsed


@pytest.fixture
def message(model_directory, tmp_path, monkeypatch):
    """``message(run)``: what running out of memory in ``run``'s directory says."""
    monkeypatch.setattr("dschat_lora.runtime.advice.world_size", lambda: 1)
    adapted = AdaptedModel(load_model(model_directory("opt"), LORA), LoraConfig(**LORA), [])
    config = parsed("--lora_dim", 4, "--per_device_train_batch_size", 8, "--max_seq_len", 16)

    def call(run):
        with (
            pytest.raises(torch.OutOfMemoryError) as error,
            explaining_memory(adapted, config, engine_settings(micro=8), run),
        ):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return str(error.value)

    return call


def test_message_says_what_fills_the_device_and_which_options_help(message, tmp_path):
    said = message(tmp_path)
    assert said.startswith("out of GPU memory: by estimate ")
    assert "--per_device_train_batch_size 4 --gradient_accumulation_steps 2" in said
    assert "checkpoint is" not in said


def test_message_names_the_newest_checkpoint_on_any_rank(message, tmp_path):
    for step in (5, 10):
        step_directory(tmp_path, step).mkdir(parents=True)
    assert message(tmp_path).endswith(f"The newest checkpoint is {step_directory(tmp_path, 10)}")


def test_other_errors_are_left_as_they_are(model_directory, tmp_path):
    with pytest.raises(KeyError), explaining_memory(None, None, None, tmp_path):
        raise KeyError("x")


def test_a_row_of_pairs_needs_the_memory_of_two_sequences(model_directory):
    adapted = AdaptedModel(load_model(model_directory("opt"), LORA), LoraConfig(**LORA), [])
    argv = ["--lora_dim", "4", "--per_device_train_batch_size", "8", "--max_seq_len"]
    settings = engine_settings(micro=8)
    one, two, longer = (
        estimate_memory_of(adapted, parse_config(kind, [*argv, length]), settings)
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
