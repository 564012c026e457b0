"""Options of engines: what is refused, what is weighed, and which addresses are read."""

from types import SimpleNamespace

import pytest

from dschat_lora.addons.engines.checks import check_vllm
from dschat_lora.addons.engines.facts import server_addresses
from dschat_lora.config.options import build_config, parse_config
from dschat_lora.config.when import without_effect
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.algorithms import RolloutCorrection
from dschat_lora.rl.options.config import RlhfConfig, RolloutConfig

pytestmark = pytest.mark.usefixtures("first_rows")

NOBODY = "http://127.0.0.1:9"  # where nothing listens
VLLM = ["--rollout_engine", "vllm"]
STARTED = [*VLLM, "--actor_lora_dim", "4", "--vllm_command", "true"]
SERVED = ["--rollout_engine", NOBODY, "--actor_lora_dim", "4"]
GRPO = ["--algorithm", "grpo", "--num_generations", "2"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--rollout_engine", "sglang"],
            "own, vllm, or comma-separated addresses of servers such as http://",
        ),
        (
            ["--rollout_engine", f"{NOBODY},ftp://a"],
            "--rollout_engine must be own, .*, got .*,ftp://a",
        ),
        (
            ["--rollout_engine", NOBODY],
            "sends the actor's adapter to the engine, but all",
        ),
        (
            ["--rollout_engine", NOBODY, "--actor_lora_dim", "4"],
            f"--rollout_engine {NOBODY} cannot be reached: .*refused; start `vllm serve",
        ),
        (
            ["--rollouts_ahead", "1"],
            "--rollouts_ahead 1 has .*_engine own generates in the training .*`dschat-lora serve",
        ),
        (
            ["--rollouts_ahead", "1", "--rollout_engine", NOBODY, "--environment", "json:loads"],
            "--rollouts_ahead 1 .*an --environment or agent waits for each turn",
        ),
        (
            ["--rollouts_ahead", "1", *SERVED, "--rollout_correction", "none"],
            "--rollouts_ahead 1 trains on responses of older .*--rollout_correction none turns",
        ),
        (
            ["--rollouts_ahead", "1", *SERVED, "--no-do_sample"],
            "--rollouts_ahead 1 .*, but --no-do_sample turns that off",
        ),
        (
            [*VLLM, "--actor_lora_dim", "4", "--vllm_command", "no-such-vllm serve"],
            "--vllm_command starts with no-such-vllm, which is not a program on .*: install vLLM",
        ),
        (
            [*VLLM, "--actor_lora_dim", "4", "--vllm_command", "' x"],
            '--vllm_command "\' x": No clo',
        ),
        (
            [*VLLM, "--actor_lora_dim", "600", "--vllm_command", "true"],
            "--actor_lora_dim 600 exceeds vLLM's maximum of 512",
        ),
        (
            [*VLLM, "--actor_lora_dim", "4", "--rollouts_ahead", "1", "--no-do_sample"],
            "--rollouts_ahead 1 .*, but --no-do_sample turns that off",
        ),
        (
            VLLM,
            "--rollout_engine vllm sends the actor's adapter to the engine, but all",
        ),
        (
            [*VLLM, "--vllm_gpu_memory_utilization", "1"],
            "--vllm_gpu_memory_utilization must be between 0 and 1, got 1",
        ),
        (["--rollouts_ahead", "-1"], r"--rollouts_ahead must be in \[0, 16\], got -1"),
        (["--rollouts_ahead", "17"], r"--rollouts_ahead must be in \[0, 16\], got 17"),
        (
            ["--use_rollout_logprobs", *VLLM],
            "--use_rollout_logprobs needs --rollout_engine own; vllm uses other",
        ),
    ],
)
def test_an_engine_that_cannot_be_used_is_refused_with_what_would_do(
    monkeypatch, tmp_path, argv, words
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        check_rlhf(parse_config(RlhfConfig, [*GRPO, *argv]))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], None),
        (STARTED, RolloutCorrection(2.0)),
        ([*STARTED, "--no-do_sample"], None),
        ([*STARTED, "--rollout_correction", "none"], None),
        ([*STARTED, "--importance_cap", "3"], RolloutCorrection(3.0)),
    ],
)
def test_responses_of_other_engines_are_weighed(monkeypatch, tmp_path, argv, expected):
    monkeypatch.chdir(tmp_path)
    config = check_rlhf(parse_config(RlhfConfig, [*GRPO, *argv]))
    assert config.ppo.correction == expected


BAD_ADDRESSES = (
    *("http://127.0.0.1:80x", "http://127.0.0.1:99999", "http://h:0", "http://:80", "http://[::1"),
    *("http://" + 64 * "a", "http://user@h", "http://h?x", "ftp://h", "h:80", "http://h,"),
)


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_addresses_that_are_none_are_refused_in_one_line(address):
    with pytest.raises(ValueError, match="addresses of servers such as") as error:
        RolloutConfig(rollout_engine=address)
    assert address in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.smoke
def test_addresses_may_have_names_numbers_ports_and_paths():
    typed = "http://127.0.0.1:8000/v1, https://[::1]:80/v1/,http://my_host/a/b,http://my_host/a/b/"
    expected = ("http://127.0.0.1:8000", "https://[::1]:80", "http://my_host/a/b")
    assert server_addresses(RolloutConfig(rollout_engine=typed).rollout_engine) == expected


def test_vllm_is_told_how_long_rows_are_rotated():
    rope = '{"rope_type": "linear", "factor": 2.0}'
    source = SimpleNamespace(rope_scaling=rope)
    inputs = SimpleNamespace(sources=SimpleNamespace(by_role={"actor": source}))
    options = {"rollout_engine": "vllm", "actor_lora_dim": 4, "vllm_command": "true"}
    with pytest.raises(ValueError, match="trained with --rope_scaling .*: pass it to vLLM"):
        check_vllm(build_config(RlhfConfig, options), inputs)
    options["vllm_command"] = "true --hf-overrides {}"
    check_vllm(build_config(RlhfConfig, options), inputs)


def test_notes_name_options_of_servers_that_are_without_effect():
    def notes(line):
        typed = ["--algorithm", "grpo", *line.split()]
        return without_effect(parse_config(RlhfConfig, typed))

    assert notes("--rollout_timeout 9") == ["--rollout_timeout has no effect without a server"]
    assert notes("--rollout_engine own --rollout_adapter_dir d") == [
        "--rollout_adapter_dir has no effect with --rollout_engine own"
    ]
    assert notes("--rollout_engine vllm --merge_for_rollouts --rollout_timeout 9") == [
        "--merge_for_rollouts has no effect with --rollout_engine vllm"
    ]
