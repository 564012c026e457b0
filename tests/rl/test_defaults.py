"""Defaults of step 3 that depend on what else is typed, on processes, or on a model's size."""

from dataclasses import replace

import pytest

from data.hand_tokenizers import build_byte_tokenizer
from dschat_lora.config.options import build_config, parse_config
from dschat_lora.data.prepare import prepare
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.algorithms import RolloutCorrection
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.engines import server_addresses
from dschat_lora.rl.options.role_config import RoleConfig

pytestmark = pytest.mark.usefixtures("first_rows")


@pytest.fixture
def batches(monkeypatch, tmp_path):
    """``batches(processes, *argv)``: generation batches of a run of that many processes."""
    monkeypatch.chdir(tmp_path)

    def call(processes, *argv):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        return check_rlhf(parse_config(RlhfConfig, list(argv))).batch.generation_batches

    return call


@pytest.mark.parametrize(
    ("processes", "argv", "expected"),
    [
        (1, [], 4),  # of 16
        (2, [], 2),
        (3, [], 2),  # 96: 48 would be too few
        (8, [], 1),
        (4, ["--actor_lora_dim", "4", "--tensor_parallel_size", "2"], 2),
        (1, ["--per_device_generation_batch_size", "16"], 1),
        (1, ["--per_device_training_batch_size", "8"], 1),
        (1, ["--gradient_accumulation_steps", "1"], 1),
        (1, ["--generation_batches", "1"], 1),
        (1, ["--num_generations", "8"], 4),
    ],
)
def test_an_iteration_has_64_responses_where_no_size_of_a_batch_is_typed(
    batches, processes, argv, expected
):
    assert batches(processes, *argv) == expected


@pytest.mark.parametrize(
    ("parameters", "dim", "given", "warns"),
    [
        (1_300_000_000, 16, (), True),
        (999_999_999, 16, (), False),
        (1_300_000_000, 16, ("critic_lora_learning_rate",), False),
        (1_300_000_000, 16, ("actor_lora_learning_rate",), True),
        (1_300_000_000, 0, (), False),
    ],
)
def test_the_default_rate_of_a_large_models_adapter_is_warned_of(parameters, dim, given, warns):
    found = RoleConfig(role="critic", lora_dim=dim).rate_warning(parameters, given=given)
    assert (found is not None) == warns
    if found:
        assert found.startswith("--critic_lora_learning_rate 0.0005, the default")
        assert "1.3 billion parameters" in found


@pytest.mark.parametrize(
    ("argv", "share", "trains"),
    [
        ([], 0.05, 0),
        (["--eval_prompts", "0"], 0.0, 3),
        (["--eval_prompts", "0", "--eval_ratio", "0.1"], 0.1, 0),
        (["--eval_ratio", "0"], 0.0, 3),
    ],
)
def test_without_prompts_to_evaluate_three_copies_of_one_are_trained_on(
    argv, share, trains, tmp_path
):
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "Say hi."}\n' * 3)
    config = parse_config(RlhfConfig, [*argv, "--data_path", str(path)])
    assert config.data.data.eval_ratio == replace(config).data.data.eval_ratio == share
    run = {"phase": 3, "seed": 0, "eos_id": 2, "kind": "prompts", "cache_dir": tmp_path}
    found = prepare(config.data.data, build_byte_tokenizer(), **run).audit
    assert (found.train_rows, found.eval_rows) == (trains, 0 if trains else 1)


def test_greedy_responses_have_no_importance_weights():
    words = "--importance_cap 2 weighs by the probability .* --no-do_sample draws none"
    with pytest.raises(ValueError, match=words):
        parse_config(RlhfConfig, ["--importance_cap", "2", "--no-do_sample"])


@pytest.mark.parametrize(
    ("argv", "noted"),
    [
        (["--top_p", "0.9"], True),
        (["--rollout_temperature", "0.8"], True),
        (["--rollout_temperature", "0.8", "--temperature", "0.8"], False),
        (["--top_k", "9", "--importance_cap", "2"], False),
    ],
)
def test_a_sampler_that_differs_from_the_policy_unweighted_is_noted(batches, capsys, argv, noted):
    batches(1, *argv)
    assert ("--importance_cap 2 weighs tokens" in capsys.readouterr().out) == noted


NOBODY = "http://127.0.0.1:9"  # where nothing listens
VLLM = ["--rollout_engine", "vllm"]
SERVED = ["--rollout_engine", NOBODY, "--actor_lora_dim", "4"]
GRPO = ["--algorithm", "grpo", "--num_generations", "2"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--rollout_engine", "sglang"],
            "own, transformers, vllm, or addresses of servers such as http://",
        ),
        (
            ["--rollout_engine", f"{NOBODY},ftp://a"],
            "--rollout_engine must be own, .*, got .*,ftp://a",
        ),
        (["--rollout_engine", NOBODY], "hands over the actor's adapter, and all weights train"),
        (
            ["--rollout_engine", NOBODY, "--actor_lora_dim", "4"],
            f"--rollout_engine {NOBODY} cannot be asked: .*refused; start there `vllm serve",
        ),
        (
            ["--rollout_engine", "transformers", "--zero_stage", "3", "--actor_lora_dim", "4"],
            "--rollout_engine transformers needs whole weights, which ZeRO 3 shards",
        ),
        (
            ["--rollout_correction", "tis", "--importance_cap", "2"],
            "--importance_cap 2 is --rollout_correction tis by token with that threshold: give it",
        ),
        (
            ["--rollout_correction", "mis", "--no-do_sample"],
            "--rollout_correction mis weighs by the probability .* --no-do_sample draws none",
        ),
        (
            ["--rollouts_ahead", "1"],
            "--rollouts_ahead 1 has servers draw .*--rollout_engine own draws in the processes",
        ),
        (
            ["--rollouts_ahead", "2", "--rollout_engine", "transformers"],
            "--rollout_engine transformers draws in the processes .*`dschat-lora serve",
        ),
        (
            ["--rollouts_ahead", "1", "--rollout_engine", NOBODY, "--environment", "json:loads"],
            "--rollouts_ahead 1 .*an --environment or agent waits for each turn",
        ),
        (
            ["--rollouts_ahead", "1", *SERVED, "--rollout_correction", "none"],
            "--rollouts_ahead 1 learns from responses of older .*--rollout_correction none leaves",
        ),
        (
            ["--rollouts_ahead", "1", *SERVED, "--no-do_sample"],
            "--rollouts_ahead 1 .*, and --no-do_sample leaves no weights",
        ),
        (
            ["--oversample", "1.5", "--rollout_engine", "transformers"],
            "--oversample 1.5 gives up responses .*--rollout_engine transformers do not",
        ),
        (
            [*VLLM, "--actor_lora_dim", "4", "--vllm_command", "no-such-vllm serve"],
            "--vllm_command begins with no-such-vllm, which is no program on .*: install vLLM",
        ),
        (
            [*VLLM, "--actor_lora_dim", "4", "--vllm_command", "' x"],
            '--vllm_command "\' x": No clo',
        ),
        (
            [*VLLM, "--actor_lora_dim", "600", "--vllm_command", "true"],
            "--actor_lora_dim 600 is more than the 512 that vLLM takes",
        ),
        (
            [*VLLM, "--actor_lora_dim", "4", "--rollouts_ahead", "1", "--no-do_sample"],
            "--rollouts_ahead 1 .*, and --no-do_sample leaves no weights",
        ),
        (VLLM, "--rollout_engine vllm hands over the actor's adapter, and all weights train"),
        (
            [*VLLM, "--vllm_gpu_memory_utilization", "1"],
            "--vllm_gpu_memory_utilization must be between 0 and 1, got 1",
        ),
        (["--oversample", "0.9"], r"--oversample must be in \[1, 10\], got 0.9"),
        (["--oversample", "1e6"], r"--oversample must be in \[1, 10\], got 1000000"),
        (["--rollouts_ahead", "-1"], r"--rollouts_ahead must be in \[0, 16\], got -1"),
        (["--rollouts_ahead", "17"], r"--rollouts_ahead must be in \[0, 16\], got 17"),
        (
            ["--rollout_correction", "mis", "--rollout_is_threshold_lower", "3"],
            r"--rollout_is_threshold_lower must be in \[0, 2\), below --rollout_is_threshold",
        ),
        (
            ["--use_rollout_logprobs", "--rollout_engine", "transformers"],
            "--use_rollout_logprobs is of --rollout_engine own; those of transformers are of other",
        ),
    ],
)
def test_an_engine_that_cannot_be_used_is_refused_with_what_would_do(batches, argv, words):
    with pytest.raises(ValueError, match=words):
        batches(1, *GRPO, *argv)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], None),
        (["--rollout_engine", "transformers"], RolloutCorrection(2.0)),
        (["--rollout_engine", "transformers", "--no-do_sample"], None),
        (["--rollout_engine", "transformers", "--rollout_correction", "none"], None),
        (["--rollout_engine", "transformers", "--importance_cap", "3"], RolloutCorrection(3.0)),
        (
            [
                *("--rollout_correction", "mis", "--rollout_is", "sequence"),
                *("--rollout_is_threshold", "3", "--rollout_is_threshold_lower", "0.5"),
            ],
            RolloutCorrection(3.0, floor=0.5, level="sequence", masks=True),
        ),
    ],
)
def test_responses_of_other_engines_are_weighed(monkeypatch, tmp_path, argv, expected):
    monkeypatch.chdir(tmp_path)
    config = check_rlhf(parse_config(RlhfConfig, [*GRPO, *argv]))
    assert config.ppo.correction == expected


def test_addresses_of_servers_are_taken_with_and_without_their_path():
    typed = f"{NOBODY}/v1, https://host/a/v1/,{NOBODY}/"
    config = parse_config(RlhfConfig, ["--rollout_engine", typed])
    assert server_addresses(config.batch.rollout_engine) == (NOBODY, "https://host/a")


def test_vllm_is_told_how_long_rows_are_rotated():
    from types import SimpleNamespace

    from dschat_lora.rl.loop.validation import with_rollout_engine

    rope = '{"rope_type": "linear", "factor": 2.0}'
    inputs = SimpleNamespace(
        sources=SimpleNamespace(by_role={"actor": SimpleNamespace(rope_scaling=rope)})
    )
    options = {"rollout_engine": "vllm", "actor_lora_dim": 4, "vllm_command": "true"}
    with pytest.raises(ValueError, match="trained with --rope_scaling .*: say the same to vLLM"):
        with_rollout_engine(build_config(RlhfConfig, options), inputs)
    options["vllm_command"] = "true --hf-overrides {}"
    assert with_rollout_engine(build_config(RlhfConfig, options), inputs)
