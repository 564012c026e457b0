"""Two hosts: how runs over both train, and how they end when one fails or is lost."""

import json
import re
import signal
import time

import pytest

pytestmark = pytest.mark.stage


def arguments(hosts, name, *more, rows="rows.jsonl"):
    return [
        *("--data_path", hosts.view / rows, "--eval_data_path", hosts.view / rows),
        *("--lora_dim", 4, "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2),
        *("--dtype", "fp32", "--seed", 3, "--sample_generations", 0, "--save_interval", 2),
        *("--output_dir", hosts.view / name, *more),
    ]


def losses(hosts, name):
    path = hosts.hosts["A"].disk / name / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [m["loss"] for m in map(json.loads, lines) if m["kind"] == "train"]


def until_step(hosts, name, step):
    deadline = time.monotonic() + 120
    while len(losses(hosts, name)) < step:
        assert time.monotonic() < deadline, f"{name} took no {step} steps"
        time.sleep(0.05)


def ended(runs, within):
    """Exit codes of both hosts' processes, which have ended within so many seconds."""
    deadline = time.monotonic() + within
    return [run.wait(max(0.1, deadline - time.monotonic())) for run in runs]


def errors(run, size=1):
    """What a host's processes said of errors; no traceback is among it."""
    said = "".join(run.err(rank) for rank in range(size))
    assert "Traceback" not in said, said
    return [line for line in said.splitlines() if "error: " in line]


@pytest.fixture(scope="module")
def one_host(hosts):
    """Losses of a run of two processes on host A."""
    argv = arguments(hosts, "one", "--max_steps", 4)
    run = hosts.hosts["A"].launcher.start(argv, hosts.view, ranks=2)
    assert run.wait() == [0, 0], run.output()
    return losses(hosts, "one")


def test_two_hosts_train_as_two_processes_of_one_do(hosts, one_host):
    runs = hosts.start(arguments(hosts, "two", "--max_steps", 4))
    assert ended(runs, 120) == [[0], [0]], runs[0].output() + runs[1].output()
    assert losses(hosts, "two") == pytest.approx(one_host, abs=1e-6)
    assert not (hosts.hosts["B"].disk / "two").exists()


def test_a_mistake_on_any_host_is_told_once_on_the_first(hosts):
    hosts.write("only_a.jsonl", '{"text": "a"}\n', hosts="A")
    runs = hosts.start(arguments(hosts, "missing", rows="only_a.jsonl"))
    assert ended(runs, 60) == [[2], [2]]
    (line,) = errors(runs[0])
    assert line.startswith("host B, rank 1: error: --data_path ")
    assert "only_a.jsonl" in line
    assert errors(runs[1]) == []
    assert not (hosts.hosts["A"].disk / "missing").exists()


def test_other_rows_under_the_same_name_are_refused(hosts):
    row = {"prompt": "\n\nHuman: What is 1?\n\nAssistant:", "completion": " One."}
    for host, rows in (("A", [row] * 20), ("B", [row] * 19 + [{**row, "completion": " Two."}])):
        hosts.write("other.jsonl", "".join(json.dumps(r) + "\n" for r in rows), hosts=host)
    runs = hosts.start(arguments(hosts, "other", rows="other.jsonl"))
    assert ended(runs, 60) == [[2], [2]]
    (line,) = errors(runs[0])
    assert re.match(r"error: host B, rank 1 differs from host A, rank 0 in the data to train", line)
    assert errors(runs[1]) == []


def test_other_options_are_refused(hosts):
    runs, environment = [], hosts.environment()
    for number, (host, rate) in enumerate(zip(hosts.hosts.values(), (1e-3, 2e-3), strict=True)):
        argv = arguments(hosts, "options", "--learning_rate", rate)
        runs.append(host.launcher.start(argv, hosts.view, first=number, env=environment))
    assert ended(runs, 60) == [[2], [2]]
    (line,) = errors(runs[0])
    assert "--learning_rate (0.002 here, 0.001 there)" in line


def test_a_killed_process_ends_the_run_with_one_line_that_says_how_to_go_on(hosts):
    argv = arguments(hosts, "kill", "--max_steps", 6)
    runs = hosts.start([*argv, "--max_steps", 5000])
    until_step(hosts, "kill", 3)
    runs[1].kill()
    assert ended(runs, 20) == [[1], [-9]]
    (line,) = errors(runs[0])
    assert line.startswith("error: host B, rank 1 is gone (killed")
    found = re.search(r"last checkpoint (step-\d+); resume with (.*)", line)
    record = json.loads((hosts.hosts["A"].disk / "kill" / "run.json").read_text("utf-8"))
    assert record["status"].startswith("failed: host B, rank 1 is gone")
    resumed = hosts.start([*found[2].split(), "--max_steps", int(found[1][5:]) + 2])
    assert ended(resumed, 60) == [[0], [0]], resumed[0].output()


@pytest.mark.parametrize("lost", ["cable", "stopped"])
def test_a_silent_peer_is_given_up(hosts, lost):
    runs = hosts.start(arguments(hosts, lost, "--max_steps", 5000, "--distributed_timeout", 3))
    until_step(hosts, lost, 2)
    if lost == "cable":
        hosts.cable("down")
    else:
        runs[1].signal(signal.SIGSTOP)
    try:
        (code,) = runs[0].wait(20)
        (line,) = errors(runs[0])
        assert line.startswith("error: host B, rank 1 is gone (not heard of for 3 s")
        if lost == "cable":
            assert runs[1].wait(20) == [1]
            (line,) = errors(runs[1])
            assert line.startswith("error: host A, rank 0 is gone (not heard of for 3 s")
    finally:
        hosts.cable("up")
        runs[1].signal(signal.SIGCONT)
    assert (code, runs[1].wait(20)) == (1, [1])
