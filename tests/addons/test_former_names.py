"""Names of the add-ons' modules and what is in them that were in use before modules moved."""

import importlib
import sys

import pytest

import dschat_lora  # noqa: F401 - whose finder has to be there
from dschat_lora.addons.old_names import OLD_NAMES

# What options and programs of users name in them.
NAMED = {
    "api.trainer": "Trainer",
    "assets.calculator": "questions dialogues calculate is_right",
    "lora.deepspeed_chat": (
        "convert_linear_layer_to_lora only_optimize_lora_parameters convert_lora_to_linear_layer "
        "make_model_gradient_checkpointing_compatible get_optimizer_grouped_parameters"
    ),
    "lora.loralib": (
        "Conv1d Conv2d Conv3d ConvLoRA Embedding Linear LoRALayer MergedLinear lora_state_dict "
        "mark_only_lora_as_trainable layers utils"
    ),
    "lora.loralib.layers": "LoRALayer Linear MergedLinear Embedding ConvLoRA",
    "lora.loralib.utils": "lora_state_dict mark_only_lora_as_trainable",
    "rl.agent_programs": "AgentFunction AgentCommand NoRewardError",
    "rl.builtin_rewards": (
        "exact_match regex number_equals length json_valid json_schema math_equal format_tags "
        "repetition_penalty soft_overlong ifeval judge python_tests"
    ),
    "rl.environment": "EnvironmentFailedError Environment Episodes",
    "rl.environment_adapters": "ReasoningGym Gymnasium OpenEnv McpServer",
    "rl.play.environment": "EnvironmentFailedError Environment StatefulEnvironment",
    "rl.play.environment_adapters": "ReasoningGym Gymnasium OpenEnv McpServer",
    "rl.play.verifiers_environment": "Verifiers",
    "rl.rollout_engines": "RolloutError Drawn ServerEngine",
    "rl.stateful_environment": "StatefulEnvironment",
    "rl.verifiers_environment": "Verifiers",
}


@pytest.mark.parametrize("module", OLD_NAMES)
def test_former_module_has_what_took_its_place(module, monkeypatch):
    # An editable installation of an older checkout has modules of these names.
    own = [each for each in sys.meta_path if not each.__module__.startswith("__editable__")]
    monkeypatch.setattr(sys, "meta_path", own)
    former = importlib.import_module(f"dschat_lora.{module}")
    try:
        successors = [
            importlib.import_module(f"dschat_lora.{name}") for name in OLD_NAMES[module].split()
        ]
        lost = [name for name in NAMED.get(module, "").split() if not hasattr(former, name)]
    except ModuleNotFoundError as error:
        if str(error.name).startswith("dschat_lora"):
            raise
        pytest.skip(f"{error.name} is not installed")
    assert {name for each in successors for name in vars(each)} <= {*dir(former)}
    assert not lost


def test_each_module_whose_names_are_known_is_a_former_one():
    assert NAMED.keys() <= OLD_NAMES.keys()
