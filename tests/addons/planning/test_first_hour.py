"""``doctor --first_hour``: what fails or hangs leaves the rest, and what is compared."""

import gzip
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dschat_lora.addons.planning import first_hour, hour_checks, verbs
from dschat_lora.addons.planning.first_hour import Hour, run_items
from dschat_lora.addons.planning.hour_checks import Command, Difference, Item, Size
from dschat_lora.report.log import jsonable

MACHINE = {"card": "Card <1>", "memory_bytes": 2**34, "driver": "1.2", "versions": {"torch": "3"}}
GOOD = "pass"
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
HANG = "import subprocess; subprocess.run(['sleep', '30'])"
ODD = "its results cannot be read: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
RAISES = "raise RuntimeError('CUDA error: an illegal memory access was encountered')"


def start(words, environment, output):
    """As the product's, of an interpreter that starts in no time; ``words`` are a program."""
    with output.open("wb") as out, output.with_suffix(".log").open("wb") as log:
        return first_hour.ProcessGroup(
            [sys.executable, "-S", "-c", *words],
            env=environment,
            stdout=out,
            stderr=log,
            start_new_session=True,
        )


def command(name, program=GOOD, **options):
    return Command(name, (program,), "cuda", **options)


def item(name, *programs, found=0.0, **options):
    commands = tuple(command(f"{name}-{n}", p, **options) for n, p in enumerate(programs))
    return Item(name, commands, lambda: {"differences": [Difference("loss", found, 0.5)]})


@pytest.fixture
def hour(tmp_path):
    (tmp_path / "work").mkdir()
    return Hour(tmp_path / "work", start)


def test_a_crash_a_hang_and_an_exception_leave_the_other_checks(hour, tmp_path, capsys):
    def raises():
        raise KeyError("loss")

    checks = [
        item("crash", CRASH),
        item("hang", HANG, seconds=0.3),
        item("exception", RAISES),
        Item("unreadable", (command("unreadable"),), raises),
        item("too large", "raise SystemExit(3)", refusals={3: "no room"}),
        Item("objected", (command("plan", "print(7)", objection=str.strip),), raises),
        Item("odd", (command("odd", objection=json.loads),), raises),
        item("off", GOOD, found=0.6),
        item("good", GOOD, found=0.4),
    ]
    row = {"tokens_per_second": 5000.0, "peak_bytes": 2**30, "planned_bytes": 2**31}
    speed = [Item("speed", (command("speed"),), lambda: dict(row))]
    passed = run_items(hour, MACHINE, {"checks": checks, "measurements": speed}, tmp_path)
    assert not passed
    results = json.loads((tmp_path / "first_hour.json").read_text())
    states = {each["name"]: (each["state"], each["reason"]) for each in results["checks"]}
    illegal = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert states == {
        "crash": ("failed", "crash-0: killed by SIGSEGV"),
        "hang": ("failed", "hang-0: no end within 0.3 s"),
        "exception": ("failed", f"exception-0: exit code 1: {illegal}"),
        "unreadable": ("failed", "its results cannot be read: KeyError: 'loss'"),
        "too large": ("not run", "no room"),
        "objected": ("not run", "7"),
        "odd": ("failed", ODD),
        "off": ("failed", ""),
        "good": ("passed", ""),
    }
    assert results["measurements"][0]["peak_bytes"] == 2**30
    page = (tmp_path / "first_hour.html").read_text()
    assert "Card &lt;1&gt;" in page
    assert all(name in page for name in states)
    assert illegal in page
    out = capsys.readouterr().out
    assert len(re.findall(r"^(?:  |X |- )\S", out, re.MULTILINE)) == 10
    assert "checks: 1 passed, 6 failed, 2 not run" in out
    assert f"attach it and {tmp_path / 'first_hour.json'} to a bug report" in out


def test_a_command_that_is_out_of_time_does_not_go_on(hour):
    processes = []
    hour.start = lambda *given: processes.append(start(*given)) or processes[-1]
    hour.run(command("hang", HANG, seconds=0.3))
    (process,) = processes
    assert process.poll() == -signal.SIGKILL


def test_what_is_killed_is_killed_with_what_it_has_started(tmp_path):
    program = "import subprocess; p = subprocess.Popen(['sleep', '30']); print(p.pid, flush=True)"
    output = tmp_path / "hang.out"
    process = start([f"{program}; p.wait()"], os.environ, output)
    while not output.read_text().endswith("\n"):
        assert process.poll() is None
    process.kill()
    deadline = time.monotonic() + 10
    with suppress(psutil.NoSuchProcess):  # a zombie, as long as nobody has waited for it
        child = psutil.Process(int(output.read_text()))
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "it goes on"
    process.kill()  # does nothing to one that has ended


def test_nothing_begins_once_the_time_is_over(hour, tmp_path):
    short = Hour(hour.work, start, seconds=0.0)
    assert not run_items(short, MACHINE, {"checks": [item("late", CRASH)]}, tmp_path)
    (late,) = json.loads((tmp_path / "first_hour.json").read_text())["checks"]
    assert (late["state"], late["reason"]) == ("not run", "no time")
    assert not list(hour.work.iterdir())


def test_a_command_that_the_total_time_cuts_short_has_not_failed(hour, monkeypatch):
    monkeypatch.setattr(first_hour, "LEAST_SECONDS", 0.0)
    short = Hour(hour.work, start, seconds=0.3)
    outcome = short.run(command("cut", HANG, seconds=5.0))
    assert (outcome.state, outcome.reason) == ("not run", "no time")


def test_a_reference_that_several_checks_need_runs_once(hour, tmp_path):
    shared = command("reference", f"open({str(tmp_path / 'runs')!r}, 'a').write('x')")
    for name in "ab":
        hour.measure(Item(name, (shared, command(name)), lambda: {"differences": []}))
    assert (tmp_path / "runs").read_text() == "x"


@pytest.mark.smoke
def test_all_twelve_checks_are_named_and_fail_one_by_one(hour, tmp_path):
    hour.start = lambda words, environment, output: start([RAISES], environment, output)
    checks = hour_checks.checks(hour.work, "bf16")
    assert len({each.name for each in checks}) == 12
    run_items(hour, MACHINE, {"checks": checks}, tmp_path)
    results = json.loads((tmp_path / "first_hour.json").read_text())["checks"]
    assert [each["state"] for each in results] == ["failed"] * 12
    assert all("illegal memory access" in each["reason"] for each in results)


def test_without_bitsandbytes_what_needs_four_bits_is_not_run(hour, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    hour.start = lambda words, environment, output: start([GOOD], environment, output)
    items = {
        "checks": hour_checks.checks(hour.work, "bf16"),
        "measurements": hour_checks.measurements(hour.work, "bf16", 10**10),
    }
    needs = "needs dschat_lora[qlora]"
    assert {each.name: each.lacks for kind in items.values() for each in kind if each.lacks} == {
        "sft on a 4-bit base against the CPU": needs,
        "SFT, opt-6.7b, 4-bit base": needs,
    }
    lacking = {kind: [each for each in items[kind] if each.lacks] for kind in items}
    lacking["checks"].append(item("good", GOOD))
    assert run_items(hour, MACHINE, lacking, tmp_path)
    results = json.loads((tmp_path / "first_hour.json").read_text())
    for four_bits in (results["checks"][0], results["measurements"][0]):
        assert (four_bits["state"], four_bits["reason"]) == ("not run", needs)
    assert [*hour.done] == ["good-0"], "no other command was begun"


def test_what_is_no_number_is_shown_and_kept_as_json(hour, tmp_path, capsys):
    checks = [item("nan", GOOD, found=math.nan)]
    speed = [Item("speed", (), lambda: {"tokens_per_second": None})]
    assert not run_items(hour, MACHINE, {"checks": checks, "measurements": speed}, tmp_path)
    text = (tmp_path / "first_hour.json").read_text()
    (nan,) = json.loads(text, parse_constant=pytest.fail)["checks"]
    assert nan["state"] == "failed"
    assert nan["differences"][0]["holds"] is False
    assert "loss: nan, allowed 0.5" in (tmp_path / "first_hour.html").read_text()
    assert "X nan: failed, loss nan, allowed 0.5" in capsys.readouterr().out


def test_the_checks_alone_decide_the_exit_code_and_one_must_have_run(hour, tmp_path):
    good = {"checks": [item("good", GOOD)], "measurements": [item("slow", RAISES)]}
    assert run_items(hour, MACHINE, good, tmp_path)
    none = {"checks": [item("no", "raise SystemExit(3)", refusals={3: "no room"})]}
    assert not run_items(hour, MACHINE, none, tmp_path)


def test_the_results_name_neither_host_nor_directories_nor_variables(hour, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    where = f"{Path.home()}/private/model.py"
    program = f"raise SystemExit({f'{where} on {socket.gethostname()}: lost'!r})"
    run_items(hour, MACHINE, {"checks": [item("one", program)]}, tmp_path)
    for name in ("first_hour.json", "first_hour.html"):
        text = (tmp_path / name).read_text()
        assert "model.py on HOST: lost" in text
        assert "private" not in text
        assert "hf_secret" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Permission denied: '/home/alice'", "Permission denied: 'DIRECTORY'"),
        ("cannot write /home/alice: No space left", "cannot write DIRECTORY: No space left"),
        ("/home/alice smith/x.py", "DIRECTORY x.py"),
        ("/data/alice", "DIRECTORY"),
        ("-I/home/bob/include -I/home/alice", "DIRECTORY DIRECTORY"),
        ("alice@n7: refused by n8.cluster.example.org", "USER@HOST: refused by n8.DOMAIN"),
        ("n7.cluster.example.org:29500 of malice", "HOST:29500 of malice"),
        ("dschat_lora/engine/gpu.py:12, ../secret/y", "gpu.py:12, DIRECTORY"),
        ("lost /data/secret/m.safetensors.", "lost m.safetensors."),
        ("5 tokens/s of facebook/opt-1.3b", "5 tokens/s of facebook/opt-1.3b"),
        ("https://download.pytorch.org/whl/cu126", "https://download.pytorch.org/whl/cu126"),
    ],
)
def test_a_path_leaves_the_name_of_its_file_and_none_of_user_or_domain(monkeypatch, text, shown):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setattr(first_hour, "_full_host_name", lambda: "n7.cluster.example.org")
    monkeypatch.setattr(socket, "gethostname", lambda: "n7")
    assert first_hour.public(text) == shown


def test_the_directories_of_user_and_command_are_known_with_spaces_too(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/shared disk/alice smith")
    (tmp_path / "my thesis").mkdir()
    monkeypatch.chdir(tmp_path / "my thesis")
    shown = first_hour.public(f"/shared disk/alice smith/x.py; '/data/alice smith'; {Path.cwd()}/y")
    assert shown == "x.py; 'DIRECTORY'; DIRECTORY"


def test_a_machine_without_a_card_is_told_so(monkeypatch, capsys):
    def no_card(hour, command):
        (hour.work / "machine.json").write_text('{"versions": {}, "cuda": null}')
        return first_hour.CommandResult()

    monkeypatch.setattr(Hour, "run", no_card)
    with pytest.raises(ValueError, match="--first_hour needs a GPU, and torch sees none"):
        verbs.doctor(["--first_hour"])
    assert capsys.readouterr().out == ""


def test_commands_on_the_card_take_the_first_one_and_inherit_no_launcher(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setenv("RANK", "1")
    variables = first_hour.environment_of(command("x"))
    assert variables["DS_ACCELERATOR"] == "cuda"
    assert variables["CUDA_VISIBLE_DEVICES"] == "3"
    assert "RANK" not in variables
    assert first_hour.environment_of(replace(command("x"), device="cpu"))["DS_ACCELERATOR"] == "cpu"


def write_run(directory, steps, rollouts=()):
    directory.mkdir()
    rows = [{"kind": "eval", "loss": 9.0}, *({"kind": "train"} | step for step in steps)]
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(jsonable(row)) + "\n" for row in rows)
    )
    if rollouts:
        with gzip.open(directory / "rollouts.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rollouts)
    return directory


def differences(*arguments):
    rows = hour_checks.compare(*arguments)["differences"]
    return {each.quantity: each for each in rows}


def test_the_largest_relative_difference_of_a_step_counts(tmp_path):
    steps = [{"loss": 2.0, "grad_norm": 1.0}, {"loss": 4.0, "grad_norm": 0.5}]
    theirs = write_run(tmp_path / "cpu", steps)
    other = [{"loss": 2.0002, "grad_norm": 1.0}, {"loss": 4.0002, "grad_norm": 0.45}]
    apart = differences("sft", theirs, write_run(tmp_path / "card", other), "fp32")
    assert apart["loss"].found == pytest.approx(1e-4)
    assert apart["gradient norm"].found == pytest.approx(0.1)
    assert not apart["gradient norm"].holds
    # 8 roundings of bf16's 8 bits of precision, and of fp16's 11
    apart = differences("sft", theirs, tmp_path / "card", "bf16")
    assert apart["loss"].allowed == 8 / 256
    assert apart["loss"].holds
    assert differences("sft", theirs, tmp_path / "card", "fp16")["loss"].allowed == 8 / 2048


def test_a_loss_that_is_no_number_does_not_hold_nor_do_missing_steps(tmp_path):
    theirs = write_run(tmp_path / "cpu", [{"loss": 2.0, "grad_norm": 1.0}] * 2)
    ours = write_run(tmp_path / "nan", [{"loss": n, "grad_norm": 1.0} for n in (math.nan, 2.0)])
    apart = differences("sft", theirs, ours, "bf16")
    assert not apart["loss"].holds
    assert apart["gradient norm"].holds
    fewer = write_run(tmp_path / "fewer", [{"loss": 2.0, "grad_norm": 1.0}])
    with pytest.raises(ValueError, match="1 steps on the card, 2 in the reference"):
        hour_checks.compare("sft", theirs, fewer, "bf16")


def rollout(prompt, response, reward, values, iteration=1):
    row = {"iteration": iteration, "prompt": prompt, "response": response, "reward": reward}
    row |= {"rewards": {}, "advantage": 0.0, "kl": 0.0, "length": len(values)}
    return row | {"tokens": response.split(), "token_value": values}


def test_rlhf_compares_scores_of_equal_responses_and_values_up_to_another_token(tmp_path):
    steps = [{"sampler_error": 0.01}]
    theirs = [rollout("p", "a b", 2.0, [1.0, 1.0]), rollout("q", "a b c", 1.0, [1.0, 3.0, 9.0])]
    ours = [rollout("q", "a b d", 7.0, [1.5, 3.0, 2.0]), rollout("p", "a b", 2.2, [1.0, 1.1])]
    ours.append(rollout("p", "z", 0.0, [0.0], iteration=2))
    apart = differences(
        "rlhf",
        write_run(tmp_path / "cpu", steps, theirs),
        write_run(tmp_path / "card", steps, ours),
        "bf16",
    )
    assert apart["other responses"].found == 0.5
    assert apart["scores"].found == pytest.approx(0.2 / 2)
    assert apart["values"].found == pytest.approx((0.1 + 0.5) / (1 + 1 + 1 + 3))
    assert apart["log-probabilities of decoding"].found == 0.01
    assert "loss" not in apart


def test_a_speed_row_is_the_median_step_after_two_beside_the_plan(tmp_path):
    rates = [1.0, 2.0, 50.0, 30.0, 40.0]
    steps = [
        {"tokens_per_second": r, "step_seconds": 1 / r, "peak_memory_bytes": 100 - r} for r in rates
    ]
    write_run(tmp_path / "sft-opt-125m", steps)
    (tmp_path / "plan-sft-opt-125m.out").write_text(
        '{"peak": 77, "cache": 0, "phases": {"training": 77}}'
    )
    size = Size("facebook/opt-125m", 2, 128)
    items = hour_checks.measurements(tmp_path, "bf16", 10**10, [size])
    assert [each.name for each in items] == [
        "SFT, opt-125m",
        "GRPO, opt-125m",
        "SFT, opt-125m, 4-bit base",
    ]
    plan = items[0].commands[0]
    assert plan.objection('{"fits": true}') == ""
    objection = plan.objection('{"fits": false, "peak": 3221225472}')
    assert objection == "takes 3 GiB by dschat-lora plan, more than this card has room for"
    row = items[0].read()
    assert (row["tokens_per_second"], row["step_seconds"]) == (40.0, 1 / 40)
    assert (row["peak_bytes"], row["planned_bytes"]) == (99.0, 77)


def test_the_plan_of_rlhf_is_with_the_cache_that_a_run_keeps_during_updates(tmp_path):
    step = {"tokens_per_second": 1.0, "step_seconds": 1.0, "peak_memory_bytes": 90}
    write_run(tmp_path / "rlhf-opt-125m", [step])
    (tmp_path / "plan-rlhf-opt-125m.out").write_text(
        '{"peak": 70, "cache": 40, "phases": {"training": 60, "generation": 70}}'
    )
    size = Size("facebook/opt-125m", 2, 128)
    row = hour_checks.measurements(tmp_path, "bf16", 10**10, [size])[1].read()
    assert row["planned_bytes"] == 60 + 40


def test_a_module_is_started_as_a_process(tmp_path):
    process = first_hour.start_python(["this"], os.environ, tmp_path / "this.out")
    assert process.wait(30) == 0
    assert "Beautiful is better" in (tmp_path / "this.out").read_text()
    endless = first_hour.start_python(["timeit", "-n1", "while 1: pass"], {}, tmp_path / "t")
    with pytest.raises(subprocess.TimeoutExpired):
        endless.wait(0.1)
    endless.kill()
    assert endless.wait(30) != 0
