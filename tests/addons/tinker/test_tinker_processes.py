"""The Tinker API in several processes: the numbers of one, and a process that is lost."""

import signal
import socket

import pytest

for each in ("tinker", "uvicorn"):
    pytest.importorskip(each, reason="the extra [tinker] is not installed")

import tinker
from tinker import types

from addons.tinker import tinker_runs
from addons.tinker.served import datum
from addons.tinker.tinker_runs import started_server, stopped_server
from dschat_lora.models.source import find_model
from helpers.spread import ALL

pytestmark = [
    pytest.mark.stage,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def differences(found, expected):
    """The largest difference of numbers in nested lists, relative to the largest number."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        return max(map(differences, found, expected), default=0.0)
    if isinstance(expected, float):
        return abs(found - expected) / max(1.0, abs(expected))
    assert found == expected
    return 0.0


@pytest.mark.thorough
def test_processes_and_zero_stages_give_what_one_process_gives(ranks, tmp_path):
    stages = (2, None, 1) if ALL else (2, None)
    expected = tinker_runs.train(tmp_path / "one", range(len(stages)))
    # One after another in a directory, each from where the last one ended.
    for step, zero_stage in enumerate(stages):
        options = {"directory": str(tmp_path / "several"), "steps": [step]}
        if zero_stage is None:
            (outcome,) = tinker_runs.train(**options)
        else:
            run = "addons.tinker.tinker_runs:train"
            (outcome,), nothing = ranks(2).run(run, **options, zero_stage=zero_stage)
            assert nothing is None
        for name in ("outputs", "answers", "prompts"):
            difference = differences(outcome[name], expected[step][name])
            assert difference < 1e-5, (step, name, difference)
        for name, tolerance in (("weights", 1e-5), ("moments", 1e-4)):
            for own, others in zip(outcome[name], expected[step][name], strict=True):
                assert own.keys() == others.keys()
                for key, value in others.items():
                    largest = max(1.0, float(value.abs().max()))
                    assert float((own[key] - value).abs().max()) < tolerance * largest, (step, key)
    moved = [w["lm_head.lora_B"] for w in (expected[0]["weights"][0], expected[-1]["weights"][0])]
    assert float((moved[0] - moved[1]).abs().max()) > 5e-4 * (len(stages) - 1)


@pytest.mark.thorough
def test_a_process_that_is_lost_ends_the_server_which_goes_on_where_it_was(
    launcher, tmp_path, monkeypatch
):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def start():
        return started_server(launcher, tmp_path, port, ranks=2, env={})

    def train(steps, strike=lambda: None):
        trainer = client.create_lora_training_client(
            base_model=find_model(None).base, rank=4, seed=3
        ).result()
        losses = []
        for step in steps:
            data = [datum([10 + n, 41, 7, 300, 52]) for n in (step, step + 5, step + 7)]
            sent = trainer.forward_backward(data, "cross_entropy")
            stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
            if step == 1:
                strike()
            losses.append(sent.result().metrics["loss:sum"])
            losses.append(stepped.result().metrics["grad_norm"])
        return losses

    running = [start()]

    def strike():
        running[0].kill(1)
        assert running[0].wait() == [1, -signal.SIGKILL]
        assert running[0].err() == (
            "error: rank 1 is gone (killed, or the network is cut); start it again with the same "
            "--state_dir, and it goes on\n"
        )
        running.append(start())

    client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key="tml-local")
    struck, undisturbed = train(range(3), strike), train(range(3))
    client.close("success")
    assert struck == pytest.approx(undisturbed, rel=1e-5)
    stopped_server(running[1], [0, 0])
    assert "1 runs go on, 2 requests wait" in running[1].out()
