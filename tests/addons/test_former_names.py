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


def test_former_modules_are_these():
    formers = """
    algos.distillation algos.kto api.command_lines api.demo api.demo_judge api.losses
    api.notebook api.sequences api.trainer api.trainer_build api.trainer_sampling
    assets.calculator checkpoint.extract checkpoint.gpt2_checkpoint checkpoint.lora_only
    commands.seeds data.filtering data.nlg data.similar_rows data.stream data.stream_loader
    data.tar_rows data.unpaired_batch endpoint.answers endpoint.errors endpoint.grammars
    endpoint.guard endpoint.http_server endpoint.requests endpoint.sockets endpoint.sources
    endpoint.text endpoint.turns
    experiments.glue.addon experiments.glue.bottleneck experiments.glue.callback
    experiments.glue.config experiments.glue.data experiments.glue.model
    experiments.glue.results experiments.glue.train experiments.glue.trainer
    experiments.glue.validation experiments.glue.verbs experiments.nlg.addon
    experiments.nlg.beam_search experiments.nlg.config experiments.nlg.decode
    experiments.nlg.evaluate experiments.nlg.formats experiments.nlg.gpt2_checkpoint
    experiments.nlg.metrics experiments.nlg.predictions experiments.nlg.ter
    experiments.nlg.train experiments.nlg.validation experiments.nlg.verbs generation.search
    lora.deepspeed_chat lora.loralib lora.loralib.layers lora.loralib.utils lora.mixed
    lora.shared models.dequantize models.families models.other_base models.published
    pipeline.doctor pipeline.judge
    pipeline.known_models pipeline.plan pipeline.plan_report pipeline.plan_search
    pipeline.recipe pipeline.run pipeline.stages pipeline.tune pipeline.verbs report.curves
    report.html report.markup report.rollouts report.run_data report.sections report.trackers
    report.verdict rl.agent_programs rl.agent_server rl.agents rl.builtin_rewards
    rl.config rl.conversations rl.draw.completions rl.draw.engine_checks rl.draw.prompt_stream
    rl.draw.rollout_engines rl.draw.rollout_servers rl.draw.rollouts_ahead rl.draw.server_engine
    rl.draw.vllm_server rl.environment rl.environment_adapters rl.external_rewards
    rl.learn.served_teacher rl.learn.teacher rl.metrics rl.play.agent_programs
    rl.play.agent_server rl.play.agents rl.play.conversations rl.play.environment
    rl.play.environment_adapters rl.play.mcp_tools rl.play.players rl.play.stateful_environment
    rl.play.turn_tokens rl.play.verifiers_environment rl.prompt_stream rl.response.turn_tokens
    rl.rewards rl.role_config rl.rollout_engines rl.rollout_servers rl.rollouts_ahead
    rl.score.builtin_rewards rl.score.external_rewards rl.served_teacher rl.stateful_environment
    rl.teacher rl.verifiers_environment rl.vllm_server rl.watch.diagnostics
    runtime.data_audit runtime.describe runtime.seeds runtime.shared_stream runtime.sharing
    runtime.streaming serving.addon serving.chat serving.config serving.decoder serving.endpoint
    serving.grammars serving.mixed serving.models serving.server serving.verbs serving.votes
    supervised.best_of_n supervised.harness supervised.kto supervised.measure supervised.score
    tinker.adapters tinker.addon tinker.bases tinker.config tinker.formats tinker.losses
    tinker.processes tinker.registry tinker.requests tinker.routes tinker.samplers tinker.server
    tinker.service tinker.shared tinker.store tinker.together tinker.verbs tinker.worker
    """.split()
    assert sorted(OLD_NAMES) == formers
    assert NAMED.keys() <= OLD_NAMES.keys()
