"""vLLM that a run starts: its command, that it ends with the run, and what a failure says."""

import json
import os
import signal
import sys
import time

import psutil
import pytest
from dschat_lora.rl.draw.vllm_server import ServerProcess, serve_command, serve_environment

from addons.engines import fake_vllm
from dschat_lora.addons.engines.completion_pool import CompletionPool
from dschat_lora.addons.engines.completions import CompletionServer
from dschat_lora.config.options import parse_config
from dschat_lora.engine.rendezvous import usable_port
from dschat_lora.rl.draw import vllm_server
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.engines import EngineError


def config_of(target, *argv):
    words = f"{fake_vllm.command_of(target)} --enforce-eager"
    typed = ["--rollout_engine", "vllm", "--vllm_command", words, "--actor_lora_dim", "12", *argv]
    return parse_config(RlhfConfig, typed)


def start(target, home):
    """A server, its process, and the ids of that and its child."""
    port = usable_port(None)
    server = CompletionServer(f"http://127.0.0.1:{port}", 5.0, log=home / "vllm" / "0.log")
    command = serve_command(config_of(target), "base", dtype="float32", port=port, sleeps=False)
    process = ServerProcess(server, command, serve_environment(None, sleeps=False))
    return server, process


def started(server, within=10.0):
    """What the program was started with, once it has said so."""
    end = time.monotonic() + within
    while not (text := server.log.read_text()).endswith("\n"):
        assert time.monotonic() < end
        time.sleep(0.02)
    return json.loads(text.splitlines()[0])


def are_gone(pids, within=5.0):
    end = time.monotonic() + within
    while time.monotonic() < end:
        alive = [p for p in pids if psutil.pid_exists(p)]
        if all(psutil.Process(p).status() == psutil.STATUS_ZOMBIE for p in alive):
            return True
        time.sleep(0.02)
    return False


def test_the_command_has_room_for_the_adapters_and_tokens_of_the_run():
    config = config_of("x", "--max_prompt_seq_len", "100", "--max_answer_seq_len", "30")
    *program, base = serve_command(config, "org/base", dtype="bfloat16", port=81, sleeps=True)[:6]
    assert program == [sys.executable, fake_vllm.__file__, "x", "serve", "--enforce-eager"]
    assert base == "org/base"
    words = " ".join(serve_command(config, "org/base", dtype="bfloat16", port=81, sleeps=True)[6:])
    assert words == (
        "--host 127.0.0.1 --port 81 --dtype bfloat16 --max-model-len 130 --max-lora-rank 16 "
        "--max-loras 1 --gpu-memory-utilization 0.3 --logprobs-mode processed_logprobs "
        "--uvicorn-log-level warning --enable-lora --enable-sleep-mode"
    )
    argv = ("--rollouts_ahead", "2", "--actor_expert_lora_dim", "33", "--trust_remote_code")
    typed = serve_command(config_of("x", *argv), "b", dtype="float32", port=81, sleeps=False)
    assert "--max-lora-rank 64 --max-loras 3" in " ".join(typed)
    assert typed[-2:] == ["--enable-lora", "--trust-remote-code"]


def test_the_environment_is_that_of_another_python_and_of_no_launch(monkeypatch):
    ours = {"RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": "/ours", "VLLM_API_KEY": "other"}
    for name, value in {**ours, "HF_HOME": "/hub", "ROLLOUT_API_KEY": ""}.items():
        monkeypatch.setenv(name, value)
    variables = serve_environment(None, sleeps=False)
    assert not ours.keys() & variables.keys()
    assert variables["HF_HOME"] == "/hub"
    assert variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert "VLLM_SERVER_DEV_MODE" not in variables
    monkeypatch.setenv("ROLLOUT_API_KEY", "secret")
    variables = serve_environment("3", sleeps=True)
    assert variables["VLLM_API_KEY"] == "secret"
    assert (variables["VLLM_SERVER_DEV_MODE"], variables["CUDA_VISIBLE_DEVICES"]) == ("1", "3")


def test_a_server_is_waited_for_and_ends_with_what_it_has_started(tmp_path):
    server, process = start("alone", tmp_path)
    process.wait(20.0)
    pids = started(server)["pids"]
    assert all(map(psutil.pid_exists, pids))
    process.close()
    assert are_gone(pids)
    # Whoever draws with it is told what its log says.
    (tmp_path / "vllm" / "0.log").write_text(
        "WARNING as by `OSError: x`\n(pid=1) CudaError: no memory\nending\n"
    )
    servers = CompletionPool([server], 1, lambda words: None, frozenset(), 64)
    with pytest.raises(EngineError, match=r"its log \S+/vllm/0.log says: CudaError: no memory\)$"):
        servers.load({"adapter": "/somewhere"})


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("broken", r"^it ended with exit code 3; its log \S+ says: .*ValueError: no such model$"),
        ("stubborn", r"^no answer after 1 seconds; raise --rollout_timeout .* says: loading$"),
    ],
)
def test_a_server_that_does_not_start_is_an_error_of_one_line(tmp_path, monkeypatch, target, words):
    monkeypatch.setattr(vllm_server, "END_SECONDS", 0.2)
    server, process = start(target, tmp_path)
    pids = started(server)["pids"]
    with pytest.raises(OSError, match=words):
        process.wait(1.0)
    process.close()
    assert are_gone(pids)


def test_a_program_that_is_not_there_is_an_error(tmp_path):
    server = CompletionServer("http://127.0.0.1:9", 5.0, log=tmp_path / "vllm" / "0.log")
    with pytest.raises(OSError, match="no-such-vllm"):
        ServerProcess(server, ["no-such-vllm"], {})


def test_no_server_outlives_a_run_that_is_killed(tmp_path):
    run = os.fork()
    if not run:
        start("alone", tmp_path)[1].wait(20.0)
        (tmp_path / "ready").touch()
        time.sleep(60)
        os._exit(1)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    server = CompletionServer("", 1.0, log=tmp_path / "vllm" / "0.log")
    assert are_gone(started(server)["pids"][:1])
