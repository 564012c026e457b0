"""Defaults of step 3 that depend on what else is typed, on processes, or on a model's size."""

from dataclasses import replace

import pytest

from data.hand_tokenizers import build_byte_tokenizer
from dschat_lora.config.options import parse_config
from dschat_lora.data.prepare import prepare
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.algorithms import RolloutCorrection
from dschat_lora.rl.options.config import RlhfConfig
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
    warning = RoleConfig(role="critic", lora_dim=dim).rate_warning(parameters, given=given)
    assert (warning is not None) == warns
    if warning:
        assert warning.startswith("--critic_lora_learning_rate 0.0005, the default")
        assert "1.3 billion parameters" in warning


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
    audit = prepare(config.data.data, build_byte_tokenizer(), **run).audit
    assert (audit.train_rows, audit.eval_rows) == (trains, 0 if trains else 1)


@pytest.mark.parametrize(
    ("argv", "noted"),
    [
        (["--top_p", "0.9"], True),
        (["--temperature", "0.8"], False),
        (["--top_k", "9", "--importance_cap", "2"], False),
    ],
)
def test_a_sampler_that_differs_from_the_policy_unweighted_is_noted(batches, capsys, argv, noted):
    batches(1, *argv)
    assert (
        "--importance_cap 2 corrects this with importance weights" in capsys.readouterr().out
    ) == noted


def test_responses_are_weighed_by_the_options_of_sequences(batches):
    argv = ["--algorithm", "grpo", "--rollout_correction", "mis", "--rollout_is", "sequence"]
    argv += ["--rollout_is_threshold", "3", "--rollout_is_threshold_lower", "0.5"]
    correction = check_rlhf(parse_config(RlhfConfig, argv)).ppo.correction
    assert correction == RolloutCorrection(3.0, floor=0.5, level="sequence", masks=True)
