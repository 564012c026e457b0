"""Names of modules and what is in them that were in use before modules moved."""

import importlib
import subprocess
import sys

import pytest

from dschat_lora.old_names import OLD_NAMES

# What users could import, by the module that had it.
FORMER = {
    "pipeline.launch": (
        "PACKAGE DEFAULT_HOSTFILE SIGNALS LauncherConfig launcher_command launch_command "
        "typed_command launch_stage run_or_end split_launcher_options receiving Relay "
        "signal_ranks training_processes"
    ),
    "rl.algorithms": (
        "KlEstimator KlPlace LossNormalization Correction by_algorithm Algorithm ALGORITHMS "
        "RolloutCorrection PpoConfig PretrainingConfig"
    ),
    "generation.search": "greedy_decode",
    "rl.batch": (
        "TokenSequence Response DecodedTurn ResponseBatch response_mask step_counts "
        "Minibatch collate make_minibatches"
    ),
    "rl.config": "GROUP_SIZE PromptConfig RolloutConfig RewardsConfig ClassicConfig RlhfConfig",
    "rl.coroutines": "start in_thread run_together",
    "rl.draw.order": "PromptOrder",
    "rl.draw.turn_decoder": "unanswered",
    "rl.dynamic_sampling": "Resampled resample",
    "rl.ema": "MovingAverage",
    "rl.engines": "Retry Engines build_engines policies_of resolve_architecture",
    "rl.evaluation": "RlhfEvaluator",
    "rl.experience": (
        "Experience padded AdvantagesAndReturns Scores ScoreError add_old_outputs "
        "advantages_and_returns"
    ),
    "rl.inputs": (
        "Sources RlhfInputs find_sources check_vocabularies other_tokenizer "
        "text_data shares_base announce note_without_effect"
    ),
    "rl.learn.ema": "MovingAverage",
    "rl.learn.network": "Network",
    "rl.memory": (
        "memory_plan trained_models unpacking_for_rollouts unpacking_note "
        "keeping_cache cache_columns cache_bytes"
    ),
    "rl.metrics": (
        "update_metrics response_metrics source_metrics "
        "ROWS_BY_TOKEN rollout_rows rewards_by_name importance_metrics version_metrics "
        "sampler_errors SAMPLER_TOLERANCE SAMPLER_LIMIT ENGINE_LIMIT check_sampler"
    ),
    "rl.pretraining": "TextWindow Pretraining make_pretraining",
    "rl.response.messages": "messages_after_prompt as_messages prompt_of",
    "rl.response.transfer": "responses_as_json response_from_json",
    "rl.rewards": (
        "UserFunctionError TrainerState RewardLog UserFunction same_gradients find_function "
        "find_object check_takes_responses OWN TRL named_parameters takes_all "
        "is_singular calls_of messages_after_prompt as_messages "
        "prompt_of RewardError RewardFunction shortened RewardFunctions load_function "
        "INITIAL_SCORES rescale_values"
    ),
    "rl.role_config": "LARGE_MODEL RoleConfig option_errors_for",
    "rl.roles": "Roles build_roles frozen Network",
    "rl.rollout": (
        "GATHER_SHARE whole_weights_fit free_bytes BrokenWeightsError PromptOrder "
        "responses_as_json response_from_json Generator stop_ids end_of_text"
    ),
    "rl.score.reward_functions": (
        "RewardFunction RewardFunctions Scoring load_scoring load_scorer load_function"
    ),
    "rl.score.shaping": "INITIAL_SCORES shape rescale_values",
    "rl.setup": "RlhfSetup set_up role_settings",
    "rl.throughput": "PHASES PhaseTimer PhaseWork FlopCounter throughput_metrics",
    "rl.train": "NOTE run_rlhf train show_plan finish",
    "rl.trainer": "RlhfTrainer make_generator RlhfSchedule RlhfProgress make_rlhf_schedule",
    "rl.update": "StepResult count_deferred Updater",
    "rl.validation": (
        "BUNDLED_LENGTHS BUNDLED_REWARD DEFAULT_RESPONSES check_rlhf "
        "with_bundled_prompts check_rewards with_overlong_punishment "
        "with_continued_lora check_lora with_fitting_lengths fit_lengths with_base_bits "
        "check_tensor_parallel check_num_generations check_tokenizers check_data "
        "with_deepspeed_json with_default_responses with_whole_steps check_kl_horizon "
        "check_budget check_attention check_zero_stages with_recomputation "
        "check_sources_are_kept check_rollouts with_rollout_engine RLHF_CHECKS"
    ),
    "rl.watch.rows": "ROWS_BY_TOKEN RolloutLog rollout_rows",
    "world": "reward rule",
}


@pytest.mark.parametrize("module", FORMER)
def test_former_names_are_those_of_what_took_their_place(module):
    found = importlib.import_module(f"dschat_lora.{module}")
    lost = [name for name in FORMER[module].split() if not hasattr(found, name)]
    assert not lost


def test_each_former_module_is_tried():
    assert set(FORMER) == set(OLD_NAMES)


def test_what_had_no_such_name_has_none():
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from dschat_lora.rl.rewards import nothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"dschat_lora\.rl\.nothing"):
        importlib.import_module("dschat_lora.rl.nothing")


def test_a_former_name_imports_nothing_until_it_is_used():
    code = "import sys, dschat_lora.rl.trainer; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


def test_all_names_come_by_a_star_and_what_is_set_is_set_where_it_is_used(monkeypatch):
    from dschat_lora.rl.score import user_functions

    found = {}
    # Other tests have asked for its names.
    monkeypatch.delitem(sys.modules, "dschat_lora.rl.rewards", raising=False)
    exec("from dschat_lora.rl.rewards import *", found)
    assert found["shortened"] is user_functions.shortened
    assert "load_function" in dir(importlib.import_module("dschat_lora.rl.rewards"))
    with monkeypatch.context() as patches:
        patches.setattr("dschat_lora.rl.rewards.shortened", len)
        assert user_functions.shortened is len
    assert user_functions.shortened is found["shortened"]
