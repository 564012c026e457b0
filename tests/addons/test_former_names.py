"""Names of the add-ons' modules and what is in them that were in use before modules moved."""

import importlib
import sys

import pytest

import dschat_lora  # noqa: F401 - whose finder has to be there

# What users could import, by the module that had it.
FORMER = {
    "algos.kto": "clamped_kl kto_loss",
    "api.command_lines": (
        "run_stage stage run_nlg run_glue launched plan tune audit merge generate evaluate demo"
    ),
    "api.demo": (
        "SFT_OPTIONS REWARD_OPTIONS PPO_OPTIONS NAMES run_demo stage_options judgement_rows demo"
    ),
    "api.demo_judge": (
        "MAX_NEW_TOKENS MAX_SEQ_LEN BATCH_SIZE DRAWS Share Judgement evaluate_by_rule "
        "judge_model rule_scores perplexity accuracy_by_flaw"
    ),
    "api.losses": "Tables TokenLoss OPTIONS Loss make_loss counted",
    "api.notebook": (
        "TRAIN_METRICS Points in_notebook shown_in_notebook NotebookView box items table "
        "eval_table point curve_html run_html"
    ),
    "api.sequences": (
        "Numbers TokenSequence SequenceBatch check_sequences check_tokens make_batches make_batch"
    ),
    "api.trainer": "Trainer",
    "api.trainer_build": (
        "OPTIONS TrainerConfig check_options TrainerParts open_parts close_parts decoding "
        "save_state load_state"
    ),
    "api.trainer_sampling": "Prompt Key Sample draw make_sampling check_fits make_seeds",
    "assets.calculator": "questions dialogues calculate is_right",
    "checkpoint.gpt2_checkpoint": "Gpt2Checkpoint read_gpt2_checkpoint load_base",
    "checkpoint.extract": (
        "extract write_trained read_checkpoint compare_base is_head empty_classifier"
    ),
    "checkpoint.lora_only": (
        "LoraSettings LoraOnly write_lora_only read_lora_only read_tensors lora_config_of_file "
        "load_lora_only match_names loralib_name rank_of is_factor"
    ),
    "data.filtering": (
        "MAX_SHOWN LANGUAGE_CHARACTERS Fate FATES Filtered RowFilter filter_rows compared_texts "
        "count_languages"
    ),
    "data.nlg": (
        "TOKEN_IDS TwoWayTokenizer webnlg_rows is_dart_set dart_rows is_token_row token_texts"
    ),
    "data.similar_rows": (
        "SHINGLE_WORDS NUM_PERM LEAST_RECALL Hashes Words Likeness words_of run_hashes "
        "SharedRuns NearDuplicates"
    ),
    "data.stream": (
        "Block Chunk ChunkReader Mixed Mixture Place Placed Pool Position Shard StreamedRow "
        "find_shards next_pool read_blocks take_block"
    ),
    "data.stream_loader": (
        "Blocks Packer Stream StreamLoader StreamedRows Taken block_seed describe_sources"
    ),
    "data.tar_rows": "tar_rows",
    "data.unpaired_batch": "AnswerBatch UnpairedBatch UnpairedCollator",
    "endpoint.answers": (
        "BusyError StoppedError TooLongError UnsupportedError Emit AnswerSource fitting "
        "RequestAnswers AnswerResponse"
    ),
    "endpoint.grammars": (
        "MAX_SCHEMA_BYTES Grammar ToolChoice tool_choice response_schema request_grammar"
    ),
    "endpoint.guard": (
        "MAX_BODY_BYTES MAX_BODIES_BYTES MAX_DEPTH ApiError invalid Guard HANDLERS read_json "
        "check_value"
    ),
    "endpoint.http_server": "CLIENT_SECONDS MAX_CONNECTIONS make_app HttpServer HttpConnection",
    "endpoint.requests": (
        "MAX_CHOICES MIN_TEMPERATURE AnswerDefaults AnsweringModel AnswerOptions AnswerRequest "
        "Fields parsed_request chat_request text_request checked_messages"
    ),
    "endpoint.sockets": "listen address_of SignalledServer run_until_signal",
    "endpoint.text": "TURN_FIELDS chat_ids continues TextStream",
    "endpoint.turns": "Kind Finish Piece Delta Turn token_bytes",
    "experiments.glue.bottleneck": (
        "AdapterType BottleneckAdapter AdaptedOutput add_adapters is_adapter"
    ),
    "experiments.glue.callback": (
        "MetricsCallback evaluations_in complete best_before check_pickles"
    ),
    "experiments.glue.config": (
        "TaskName Measure Strategy GlueTask TASKS of_lora of_adapters GlueConfig"
    ),
    "experiments.glue.data": (
        "HUB_NAME Split SPLITS Example TaskSplit split_names find_files read_splits read_split "
        "read_tsv parse_row"
    ),
    "experiments.glue.model": (
        "build_model adapt lora_settings max_positions trained_tensors start_from"
    ),
    "experiments.glue.results": (
        "write_evaluation write_results keep_last write_predictions save_trained"
    ),
    "experiments.glue.train": "run_glue training_arguments deepspeed_settings build_trainer",
    "experiments.glue.trainer": (
        "Rows Array tokenize collator GlueTrainer mean_loss with_second_pass two_pass_loss "
        "predictions task_metrics"
    ),
    "experiments.glue.validation": (
        "LAST check_glue fix_environment with_start check_packages check_options_agree "
        "check_methods with_evaluation_alone check_best check_seeds with_adapter_settings "
        "check_data check_deepspeed GLUE_CHECKS describe_plan"
    ),
    "experiments.nlg.config": (
        "Profile Filter MetricName ModelCard CARDS DecodeConfig EvaluateConfig FormatConfig "
        "NlgOptimConfig NlgConfig"
    ),
    "experiments.nlg.decode": (
        "Meaning run_decode write_predictions development_bleu search_all encode_prompts "
        "as_texts load_model read_meanings prediction_lines clean_text"
    ),
    "experiments.nlg.evaluate": "PUBLISHED_REFERENCES run_evaluate chosen_metrics prepared",
    "experiments.nlg.metrics": (
        "Texts References Tokens Tokenize ROUGE_BETA CIDER_SIGMA NIST_BETA Score "
        "treebank_tokens words_of streams bleu chrf chrf_plus_plus nist rouge_l cider "
        "has_meteor_1_5 meteor"
    ),
    "experiments.nlg.predictions": (
        "SEEN Prediction scorer_arguments chosen_predictions read_predictions json_lines "
        "run_format predictions_to_format cleaner"
    ),
    "experiments.nlg.ter": "TER_TEXTS Part ResultT ter pyter shifted_edits",
    "experiments.nlg.train": "run_training with_weights save_factors",
    "experiments.nlg.validation": (
        "with_our_options with_base weights_file with_query_and_value check_cycle check_epochs "
        "check_seeds check_length check_accumulation in_optimizer_steps NLG_CHECKS "
        "check_training schedule rate_factor check_decode check_evaluate check_format "
        "epoch_files"
    ),
    "generation.search": "greedy_decode BeamSearch TextRules repeated_ngram_ends beam_search",
    "lora.deepspeed_chat": (
        "NO_DECAY convert_linear_layer_to_lora only_optimize_lora_parameters "
        "convert_lora_to_linear_layer make_model_gradient_checkpointing_compatible "
        "get_optimizer_grouped_parameters"
    ),
    "lora.loralib": (
        "Conv1d Conv2d Conv3d ConvLoRA Embedding Linear LoRALayer MergedLinear lora_state_dict "
        "mark_only_lora_as_trainable merged_copy layers utils"
    ),
    "lora.loralib.layers": "LoRALayer FrozenLinear Linear MergedLinear Embedding LoraConv ConvLoRA",
    "lora.loralib.utils": "lora_state_dict mark_only_lora_as_trainable merged_copy",
    "lora.mixed": "AdapterRows MixedLinear MixedExperts MixedModule mix_adapters",
    "lora.shared": "Part SharedLoraLinear",
    "models.dequantize": "int8_values gptq_values awq_values dequantizer",
    "models.other_base": "Weights probe_ids base_warning",
    "pipeline.doctor": (
        "GIB SMALL_DISK NO_DISK SMALL_MEMORY STEP_SECONDS Finding examine diagnose versions "
        "devices describe_device attention compiler memory disks network training_step"
    ),
    "pipeline.first_hour": (
        "SECONDS LEAST_SECONDS NO_TIME ProcessGroup Start start_python CommandResult Hour "
        "environment_of tail_of public first_hour find_machine run_items"
    ),
    "pipeline.hour_checks": (
        "PROBES STAGES DTYPES Device DEVICES ROUNDING FP32_LIMIT FOUR_DIGITS ROUNDINGS "
        "OTHER_RESPONSES RESPONSES Command Difference Item Size SIZES write_data checks compare "
        "measurements"
    ),
    "pipeline.hour_probes": "NO_ROOM main machine graphs weights",
    "pipeline.judge": (
        "MAX_NEW_TOKENS MAX_SEQ_LEN BATCH_SIZE DRAWS Share Judgement evaluate_by_rule "
        "judge_model rule_scores perplexity accuracy_by_flaw"
    ),
    "pipeline.known_models": "show_model model_facts",
    "pipeline.plan": (
        "BANDWIDTH_SHARE RoleMemory StageMemory StepTime Seconds NoTokenizer StagePlan "
        "build_plan recomputing_options with_recomputation recomputation"
    ),
    "pipeline.plan_report": (
        "GIB COMMON_CARDS show_plans described_plan to_dict lines Speed expected_speeds "
        "launch_words"
    ),
    "pipeline.plan_search": (
        "MOST_ROWS Change Planner Planned plan_stage plan_file planning "
        "BatchOptions batch_options resolved largest_rows search"
    ),
    "pipeline.recipe": "Recipe read_recipe options_of_stage check_stages checked_stages",
    "pipeline.run": (
        "RECORD How HEADER PipelineRecord run_pipeline make_state result_rows outputs"
    ),
    "pipeline.stages": (
        "RANK MODEL_OPTIONS Stage STAGES names_model check_stage check_as_verb "
        "with_verb_defaults restated write_placeholder with_placeholders as_planned"
    ),
    "pipeline.tune": (
        "STUDY DEFAULT_STEPS LENGTHS OCTAVES POLL_SECONDS Search run_tune make_search "
        "open_study RunningTrial run_trials show_trials"
    ),
    "pipeline.verbs": (
        "ConfigT pipeline doctor report rollouts models inspect score push export "
        "extract accept parsed_config"
    ),
    "report.curves": "METRICS Metric Curve Chart charts_of standard_error chart_data thin",
    "report.html": "FILE LiveReport render_report page render write_whole",
    "report.markup": (
        "HUGE safe without_controls number amount short duration operations value_text "
        "visible sample_text sample_html histogram"
    ),
    "report.rollouts": (
        "Rollout FILE MOST_UNPACKED open_rollouts as_member read_rollouts RolloutQuery "
        "show_rollouts select_rollouts summary_text rollout_text"
    ),
    "report.run_data": "MOST_METRICS PHASES OTHER RunData read_runs read_run read_metrics",
    "report.sections": (
        "results settings differences data_rows source_rows length_rows bad_rows answers "
        "rollout_data"
    ),
    "report.trackers": "TRACKERS_FILE PROJECT TensorBoard RunTracker",
    "report.verdict": (
        "TITLES WORDS Change title_of outcome_of what_was_trained changes_of cost doubts"
    ),
    "rl.builtin_rewards": (
        "PREFIX BuiltinReward builtin_function is_remote exact_match regex number_equals length "
        "json_valid json_schema math_equal format_tags repetition_penalty soft_overlong ifeval "
        "judge python_tests BUILTINS"
    ),
    "rl.external_rewards": (
        "JUDGE_SECONDS REMOTE_SECONDS RUBRIC RemoteReward Judge make_judge_reward "
        "SANDBOX_SECONDS SANDBOX_BYTES PythonTests program_in run_tests"
    ),
    "rl.metrics": (
        "WINDOW PATIENCE RATIO_TOLERANCE MISMATCH_TOLERANCE MASKED_TOLERANCE LENGTH_DRIFT FALL "
        "GUARDED Diagnostics"
    ),
    "rl.rewards": "VERL OPENRLHF",
    "rl.agent_programs": (
        "MODEL_NAME OFFERED Program AgentFunction CALL_NUMBER AgentCommand NoRewardError "
        "reward_and_metrics"
    ),
    "rl.advice": "FullWhileDecodingError FullAfterReleaseError memory_advice",
    "rl.agent_server": "HOST AgentServer",
    "algos.distillation": "generalized_jsd with_one_rest",
    "rl.config": "DistillConfig",
    "rl.learn.served_teacher": "PROBE TeacherError ServedTeacher open_teacher",
    "rl.learn.teacher": "TeacherPrompts Teacher load_teacher answer_of",
    "rl.role_config": "DistillLoss TeacherConfig",
    "rl.served_teacher": (
        "PROBE TeacherError score_body read_prompt_logprobs ServedTeacher open_teacher"
    ),
    "rl.teacher": "TeacherPrompts answer_of",
    "rl.agents": (
        "PATIENCE QUIET OVER AgentFailedError AgentLimits Episode Call AgentModel Agents"
    ),
    "rl.conversations": "Conversation PromptTokens Conversations",
    "rl.draw.completions": "CompletionPool CompletionServer ServerError read_answer",
    "rl.environment": "EnvironmentFailedError Environment TurnTokens Episodes",
    "rl.environment_adapters": "ReasoningGym Gymnasium OpenEnv McpServer",
    "rl.play.environment": "EnvironmentFailedError Environment StatefulEnvironment",
    "rl.play.environment_adapters": "ReasoningGym Gymnasium OpenEnv McpServer",
    "rl.play.mcp_tools": "mcp_tool_schema",
    "rl.play.players": "Episodes UserDraw UserPlayer load_environment load_player",
    "rl.play.stateful_environment": "RESERVED is_stateful StatefulEnvironment",
    "rl.play.turn_tokens": "TurnTokens",
    "rl.play.verifiers_environment": "Verifiers",
    "rl.response.turn_tokens": "TurnTokens prompt_messages",
    "rl.stateful_environment": "RESERVED is_stateful StatefulEnvironment load_environment",
    "rl.verifiers_environment": "Verifiers",
    "rl.draw.engine_checks": "VLLM_RANKS check_servers check_vllm vllm_rank",
    "rl.draw.rollout_engines": "RolloutError Drawn ServerEngine",
    "rl.draw.rollout_servers": "EngineError RolloutServer RolloutServers vllm_rank",
    "rl.draw.server_engine": "engine_of_addresses server_engine ServerEngine RolloutServer",
    "rl.draw.transformers_engine": "transformers_engine TransformersEngine",
    "rl.play.agent_programs": (
        "OFFERED AgentFunction CALL_NUMBER AgentCommand Program NoRewardError reward_and_metrics"
    ),
    "rl.play.agent_server": "HOST AgentServer",
    "rl.play.agents": ("HOST PATIENCE QUIET AgentFailedError AgentLimits Agents HOST AgentServer"),
    "rl.play.conversations": (
        "MODEL_NAME OVER Conversation PromptTokens Conversations Episode Call AgentModel"
    ),
    "runtime.data_audit": "STAGES RowFindings Findings audit_data show_audit",
    "runtime.describe": "inspect_directory describe",
    "rl.draw.prompt_stream": "PromptStream",
    "rl.prompt_stream": "Pool PromptStream",
    "runtime.shared_stream": "SharedStream",
    "runtime.streaming": "MOST_HUB_ROWS with_large_hub_data_streamed SharedStream",
    "rl.rollout_engines": "RolloutError Drawn ServerEngine",
    "rl.rollout_servers": (
        "Body CONNECT_SECONDS LOAD_SECONDS UNLOAD_SECONDS PATIENCE MOST_FAILURES VLLM_RANKS "
        "EngineError ServerError FullServerError LostAdapterError DeniedError ServerAnswer "
        "RolloutServer vllm_rank to_sglang from_sglang read_answer are_logprobs RolloutServers"
    ),
    "rl.rollouts_ahead": "Begin RolloutsAhead",
    "rl.vllm_server": (
        "END_SECONDS start_vllm sleeps serve_command serve_environment ServerProcess"
    ),
    "runtime.sharing": "REPOSITORY saved_directory push_directory export_gguf",
    "runtime.seeds": "Spread spreads show_spreads check_starts_runs run_seeds",
    "serving.chat": "COMMANDS Conversation ChatSession run_chat",
    "serving.config": (
        "BASE AnswerConfig ChatConfig ServeConfig NamedSource find_models model_name"
    ),
    "serving.decoder": (
        "PROMPT_TOKENS STOPPING TokenLogprobs RunningAnswer AnswerDecoder sampling_of"
    ),
    "serving.grammars": "GrammarError GrammarState Grammars",
    "serving.models": "NO_LIMIT BaseBatch ServedModel open_models open_adapter AnswerScorer",
    "serving.server": "PATIENCE HEALTH PAGE Service make_app Server run_server make_service",
    "serving.verbs": "ConfigT chat serve votes_path",
    "serving.votes": "VoteFile",
    "supervised.best_of_n": "ScoredAnswer choose_answers write_kept_answers",
    "supervised.harness": (
        "DEFAULT_POSITIONS DEFAULT_NEW_TOKENS ItemT ValueT Request measure_tasks Tasks "
        "find_tasks HarnessModel"
    ),
    "supervised.kto": (
        "Reference make_unpaired_layout kto_objective estimate_kl kto_batch_loss means_by_label "
        "say_balance balance_warning"
    ),
    "supervised.measure": (
        "ROWS_AT_A_TIME T Judge Pairs evaluate_model show_measures score_rows "
        "measure_policy measure_answers sample_losses own_scores mean_and_error scorer_of "
        "model_judge chunks"
    ),
    "supervised.score": "ROWS_AT_A_TIME Scorer score_files output_file",
    "tinker.adapters": (
        "OPTIMIZER_FILE CHECKPOINT_FILE LORA_ALPHA Adapting Datum DatumBatch AdamParams Base "
        "open_base TrainedAdapter make_batch in_shapes numbers_on copy_values SavedAdapter "
        "read_saved"
    ),
    "tinker.config": "KEY_PREFIX TinkerConfig",
    "tinker.formats": (
        "MAX_SAMPLES MAX_ENTRIES NO_LOGPROB ValueT JsonFields ForwardBackward parse_message "
        "forward_backward forward_backward_output sample_request sample_response adapting "
        "content_of adam_params"
    ),
    "tinker.losses": "Numbers RATIO_MASK READS SETTINGS DatumLoss make_loss",
    "tinker.processes": (
        "ParamsT ResultT FULL ProcessError OutOfStepError agreed Channel Called CalledT "
        "collective follow"
    ),
    "tinker.samplers": (
        "NEW_TOKENS_MULTIPLE MAX_TOP SampleOptions SampleRequest SampledSequence SampleResult "
        "Sampler"
    ),
    "tinker.server": (
        "API POLL_SECONDS MAX_MESSAGE_BYTES MAX_BODY_BYTES OWNER CLIENT_VERSION Answer Links "
        "Routes make_app run_server"
    ),
    "tinker.service": (
        "Category KEPT_BYTES MOST_NUMBER NotFoundError Result Job TrainingRun TinkerService "
        "end_of_time kept_facts"
    ),
    "tinker.store": (
        "SCHEME KINDS UNNAMED KEPT_UNNAMED KEPT_RESULTS now Weights parse_path RunStore Store "
        "size_of"
    ),
    "tinker.together": "MAX_CPU_TOKENS Share SharedBase",
    "tinker.verbs": "checked tinker",
    "tinker.worker": "Output SampleBody Worker",
}


@pytest.mark.parametrize("module", FORMER)
def test_former_names_are_those_of_what_took_their_place(module, monkeypatch):
    # An editable installation of an older checkout has modules of these names.
    own = [each for each in sys.meta_path if not each.__module__.startswith("__editable__")]
    monkeypatch.setattr(sys, "meta_path", own)
    found = importlib.import_module(f"dschat_lora.{module}")
    names, lost = FORMER[module].split(), []
    try:
        lost = [name for name in names if not hasattr(found, name)]
    except ModuleNotFoundError as error:
        if str(error.name).startswith("dschat_lora"):
            raise
        pytest.skip(f"{error.name} is not installed")
    assert not lost
