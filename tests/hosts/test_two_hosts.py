"""Two hosts: how runs over both train, and how they end when one fails or is lost."""

import json
import os
import random
import re
import signal
import sys
import time

import pytest

from dschat_lora.assets import BUNDLED_DATA
from helpers.hosts import ADDRESSES
from helpers.launcher import ROOT
from helpers.spread import ALL

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


@pytest.mark.thorough
def test_other_options_are_refused(hosts):
    runs, environment = [], hosts.environment()
    for number, (host, rate) in enumerate(zip(hosts.hosts.values(), (1e-3, 2e-3), strict=True)):
        argv = arguments(hosts, "options", "--learning_rate", rate)
        runs.append(host.launcher.start(argv, hosts.view, first=number, env=environment))
    assert ended(runs, 60) == [[2], [2]]
    (line,) = errors(runs[0])
    assert "--learning_rate (0.002 here, 0.001 there)" in line


@pytest.mark.thorough
def test_a_killed_process_ends_the_run_with_one_line_that_says_how_to_go_on(hosts):
    argv = arguments(hosts, "kill", "--max_steps", 6)
    runs = hosts.start([*argv, "--max_steps", 5000])
    until_step(hosts, "kill", 3)
    runs[1].kill()
    assert ended(runs, 20) == [[1], [-9]]
    (line,) = errors(runs[0])
    assert line.startswith("error: host B, rank 1 is gone (killed")
    remedy = re.search(r"last checkpoint (step-\d+); resume with (.*)", line)
    record = json.loads((hosts.hosts["A"].disk / "kill" / "run.json").read_text("utf-8"))
    assert record["status"].startswith("failed: host B, rank 1 is gone")
    resumed = hosts.start([*remedy[2].split(), "--max_steps", int(remedy[1][5:]) + 2])
    assert ended(resumed, 60) == [[0], [0]], resumed[0].output()


@pytest.mark.thorough
@pytest.mark.parametrize("lost", ["cable", "stopped"] if ALL else ["cable"])
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
        assert line.startswith("error: host B, rank 1 is gone (no sign of life for 3 s")
        if lost == "cable":
            assert runs[1].wait(20) == [1]
            (line,) = errors(runs[1])
            assert line.startswith("error: host A, rank 0 is gone (no sign of life for 3 s")
    finally:
        hosts.cable("up")
        runs[1].signal(signal.SIGCONT)
    assert (code, runs[1].wait(20)) == (1, [1])


# ---------------------------------------------------------------------------- make test-all

SHARED = {
    "ZeRO 0": ["--zero_stage", 0],
    "ZeRO 1": ["--zero_stage", 1],
    "ZeRO 2": ["--zero_stage", 2],
    "ZeRO 3": ["--zero_stage", 3],
    "tensor parallel": ["--tensor_parallel_size", 2, "--zero_stage", 2],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SHARED)
def test_four_processes_of_two_hosts_train_as_four_of_one(hosts, name):
    more = [*SHARED[name], "--per_device_train_batch_size", 1, "--max_steps", 3]
    whole, divided = f"one-{name}", f"two-{name}"
    run = hosts.hosts["A"].launcher.start(arguments(hosts, whole, *more), hosts.view, ranks=4)
    assert run.wait(240) == [0] * 4, run.output()
    runs = hosts.start(arguments(hosts, divided, *more), each=2)
    assert ended(runs, 240) == [[0, 0], [0, 0]], runs[0].output()
    assert losses(hosts, divided) == pytest.approx(losses(hosts, whole), abs=1e-6)


@pytest.mark.thorough
def test_tensor_parallelism_across_hosts_trains_as_on_one(hosts):
    more = ["--tensor_parallel_size", 2, "--max_steps", 3]
    run = hosts.hosts["A"].launcher.start(arguments(hosts, "tp-1", *more), hosts.view, ranks=2)
    assert run.wait(240) == [0, 0], run.output()
    assert ended(hosts.start(arguments(hosts, "tp-2", *more)), 240) == [[0], [0]]
    assert losses(hosts, "tp-2") == pytest.approx(losses(hosts, "tp-1"), abs=1e-6)


@pytest.mark.thorough
def test_ppo_on_two_hosts_is_that_of_one(hosts):
    script = ROOT / "training" / "step3_rlhf" / "main.py"

    def argv(name):
        return [
            *("--data_path", BUNDLED_DATA["eval"], "--eval_data_path", BUNDLED_DATA["eval"]),
            *("--reward_function", "dschat_lora.assets.toy_world:reward", "--dtype", "fp32"),
            *("--actor_lora_dim", 4, "--critic_lora_dim", 4, "--max_steps", 2, "--seed", 3),
            *("--max_prompt_seq_len", 32, "--max_answer_seq_len", 8, "--eval_prompts", 4),
            *("--sample_generations", 0, "--per_device_generation_batch_size", 2),
            *("--per_device_training_batch_size", 2, "--output_dir", hosts.view / name),
        ]

    def metrics(name):
        path = hosts.hosts["A"].disk / name / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        names = ("reward", "kl", "policy_loss", "value_loss")
        return [[m[n] for n in names] for m in lines if m["kind"] == "train"]

    run = hosts.hosts["A"].launcher.start(argv("ppo-1"), hosts.view, ranks=2, script=script)
    assert run.wait(240) == [0, 0], run.output()
    runs = hosts.start(argv("ppo-2"), script=script)
    assert ended(runs, 240) == [[0], [0]], runs[0].output()
    assert len(metrics("ppo-1")) >= 1
    for two, one in zip(metrics("ppo-2"), metrics("ppo-1"), strict=True):
        assert two == pytest.approx(one, abs=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_torchrun_starts_again_what_lost_a_process(hosts, rendezvous, unbroken):
    name, started = f"restart-{rendezvous}", []
    for number, host in enumerate(hosts.hosts.values()):
        where = ["--node_rank", number, "--master_addr", ADDRESSES["A"], "--master_port", 29711]
        if rendezvous == "c10d":  # where the hosts' names do not resolve
            where = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{ADDRESSES['A']}:29722"]
            where += ["--rdzv_conf", f"is_host={1 - number}", "--local_addr", ADDRESSES[host.name]]
        argv = arguments(hosts, name, "--max_steps", 8, "--resume_from_checkpoint", "auto")
        started.append(
            host.popen(
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", 2),
                *("--nproc_per_node", 1, *where, "--max-restarts", 2),
                *(ROOT / "training" / "step1_sft" / "main.py", *argv),
            )
        )
    until_step(hosts, name, 4)
    hosts.hosts["B"].run("pkill", "-9", "-f", "^[^ ]*python -u ")  # the rank, not its agent
    assert [each.wait(180) for each in started] == [0, 0]
    assert losses(hosts, name) == unbroken


@pytest.mark.thorough
def test_a_full_disk_ends_both_hosts_and_the_last_checkpoint_goes_on(hosts, unbroken):
    a, where = hosts.hosts["A"], hosts.view / "full"
    kept = where / "checkpoints" / "step-00000002"
    a.run("mkdir", where)
    a.run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", where)
    argv = [*arguments(hosts, "full", "--max_steps", 8), "--resume_from_checkpoint", "auto"]
    runs = hosts.start(argv)
    a.run("sh", "-c", f"while [ ! -e {kept} ]; do sleep 0.1; done")
    a.run("sh", "-c", f"cat /dev/zero > {where}/filler || true")
    assert ended(runs, 60) == [[1], [1]], runs[0].output() + runs[1].output()
    (line,) = errors(runs[0])
    assert "No space left on device" in line
    a.run("rm", where / "filler")
    assert ended(hosts.start(argv), 120) == [[0], [0]]
    a.run("cp", "-r", where, f"{where}-copy")
    a.run("umount", where)
    assert losses(hosts, "full-copy") == unbroken


FAULTS = ("kill", "stop", "cut", "kill the first", "slow link")
NUM_FAULTS = int(os.environ.get("DSCHAT_LORA_FAULTS", "20"))


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(NUM_FAULTS))
def test_a_random_fault_loses_nothing(hosts, number, unbroken):
    draw = random.Random(number)
    fault, name = FAULTS[number % len(FAULTS)], f"random-{number}"
    argv = arguments(hosts, name, "--max_steps", 8, "--distributed_timeout", 4)
    argv += ["--resume_from_checkpoint", "auto"]
    runs = hosts.start(argv)
    until_step(hosts, name, draw.randint(2, 5))
    time.sleep(draw.random())
    begun = time.monotonic()
    b = hosts.hosts["B"]
    if fault.startswith("kill"):
        runs[0 if fault == "kill the first" else 1].kill()
    elif fault == "stop":
        runs[1].signal(signal.SIGSTOP)
    elif fault == "cut":
        hosts.cable("down")
    else:
        limit = ["rate", "2mbit", "burst", "32kbit", "latency", "400ms"]
        b.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
    lost = 0 if fault == "kill the first" else 1
    try:
        (code,) = runs[1 - lost].wait(60)
        seconds = time.monotonic() - begun
        if fault == "cut":
            runs[1].wait(60)
    finally:
        hosts.cable("up")
        if fault == "slow link":
            b.run("tc", "qdisc", "del", "dev", "eth0", "root")
        runs[lost].signal(signal.SIGCONT)
    runs[lost].wait(60)
    # It may have been at its end.
    assert code in (0, 1)
    assert fault == "slow link" or seconds < 20
    if code:
        assert len(errors(runs[1 - lost])) == 1
        assert ended(hosts.start(argv), 120) == [[0], [0]]
    assert losses(hosts, name)[-8:] == unbroken


@pytest.fixture(scope="module")
def unbroken(hosts):
    """Losses of a run of eight steps that nothing disturbs."""
    assert ended(hosts.start(arguments(hosts, "unbroken", "--max_steps", 8)), 120) == [[0], [0]]
    return losses(hosts, "unbroken")
