"""benchmarks/gpu.sh runs to the end on a CPU, so that it works when a GPU is at hand."""

import importlib.util
import json
import math
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.common import turns
from benchmarks.common.pair_data import random_pairs
from benchmarks.common.report import PartReport, device_slug
from benchmarks.common.shapes import SHAPES, TINY, full_rows, micro_batches, mixed_rows, random_base
from benchmarks.common.turns import Runner, Work, times_ours
from benchmarks.contenders.common import ModelSize, Task, draw_adapters_
from benchmarks.contenders.supervised import CONTENDERS
from benchmarks.gpu import PARTS
from benchmarks.parts import supervised, throughput
from dschat_lora.data.samples import SequenceSample
from dschat_lora.engine.process_group import shutdown

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
README = ROOT / "benchmarks" / "README.md"
CHAT = "DeepSpeed-Chat's way"
USER = ["user-sft-1.3b", "user-ppo-1.3b", "user-sft-6.7b", "user-ppo-6.7b"]


def run(*parts, **variables):
    environment = {
        **os.environ,
        **variables,
        "PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [str(SCRIPT), *parts], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.thorough
@pytest.mark.stage
def test_a_throughput_part_runs_to_the_end_on_a_cpu_and_stores_its_numbers(tmp_path):
    result = run("throughput-1.3b", BENCH_OUTPUT=str(tmp_path))
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "cpu-tiny.json").read_text()
    entry = json.loads(text)["throughput-1.3b"]
    assert entry["status"] == "passed"
    assert all(entry["checks"].values())
    # Random weights know nothing: the loss is that of a uniform guess over the vocabulary.
    for loss in entry["loss_at_8"].values():
        assert loss == pytest.approx(math.log(512), abs=0.05)
    cases = {(case["case"], case["lora_dim"], case["workload"]): case for case in entry["cases"]}
    both = [("ours", "full"), ("ours", "mix"), (CHAT, "full"), (CHAT, "mix")]
    both += [("PEFT", "full"), ("PEFT", "mix")] if importlib.util.find_spec("peft") else []
    variants = [(f"ours, {way}", "mix") for way in ("recomputing", "dense mask")]
    variants.append((f"{CHAT}, recomputing", "full"))
    expected = [(name, 2, rows) for name, rows in both]
    assert set(cases) == {*expected, *((name, 8, rows) for name, rows in both + variants)}
    measured = entry["matmul_tflops"]["measured"]
    for (name, _, workload), case in cases.items():
        assert case["problem"] is None
        assert case["tokens_per_second"] == pytest.approx(case["tokens"] / case["step_seconds"])
        ours = cases["ours", case["lora_dim"], workload]
        assert case["tokens"] == ours["tokens"]
        assert case["tflops_per_device"] * case["step_seconds"] == pytest.approx(
            ours["tflops_per_device"] * ours["step_seconds"]
        )
        # padding, recomputation and logits of every token only add to what the model needs
        assert case["hardware_tflops_per_device"] > case["tflops_per_device"] > 0
        assert case["mfu"] is None  # a CPU is in no table
        assert case["mfu_measured"] == pytest.approx(case["tflops_per_device"] / measured)
        assert case["peak_memory_bytes"] > 0
        assert (case["estimated_gib"] is not None) == name.startswith("ours")
        rates = ours["tokens_per_second"] / case["tokens_per_second"]
        assert case["x_ours_median"] == pytest.approx(rates)  # of the one round
        assert 0 < case["update_milliseconds"] < 1e3 * case["step_seconds"]
    padded, packed = cases[CHAT, 8, "mix"], cases["ours", 8, "mix"]
    assert padded["positions"] == padded["samples"] * 32
    assert padded["samples"] == packed["samples"]
    assert cases["ours", 8, "full"]["positions"] == cases["ours", 8, "full"]["tokens"] == 256
    assert socket.gethostname() not in text.replace('"device": "cpu"', "")
    assert str(ROOT) not in text
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")))
def test_stored_results_hold_no_path_of_the_machine_they_come_from(path):
    assert not re.search(r"(?<![\w.])/\w", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("architecture", ["opt", "llama"])
def test_random_models_of_a_shape_know_where_tokens_are(architecture):
    shape = replace(TINY["opt-1.3b"], architecture=architecture)
    model = random_base(shape, dtype=torch.float32, device=torch.device("cpu"))
    ids = torch.tensor([[7, 8, 8, 8]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids).last_hidden_state[0]
        fresh = type(model)(model.config)
        fresh.load_state_dict(model.state_dict())
        expected = fresh.base_model(input_ids=ids).last_hidden_state[0]
    assert not torch.equal(hidden[2], hidden[3])
    torch.testing.assert_close(hidden, expected)


def test_samples_of_a_shape_are_as_long_as_the_documentation_says():
    lengths = [len(s.input_ids) for row in mixed_rows(SHAPES["opt-1.3b"]) for s in row]
    assert sum(lengths) / len(lengths) == pytest.approx(239, abs=0.5)
    assert 0.95 * 8 * 2048 < sum(lengths) <= 8 * 2048
    assert max(lengths) <= 512
    rows = full_rows(SHAPES["opt-1.3b"])
    assert [[len(sample.input_ids) for sample in row] for row in rows] == [[512]] * 32


@pytest.mark.parametrize(
    ("tokens", "expected"), [(16384, [8]), (8192, [4, 4]), (6144, [3, 3, 2]), (100, [1] * 8)]
)
def test_micro_batches_hold_at_most_so_many_positions_but_a_row(tokens, expected):
    batches = micro_batches(full_rows(SHAPES["opt-1.3b"])[:8], tokens, multiple_of=2048)
    assert [len(batch.input_ids) for batch in batches] == expected
    assert {batch.input_ids.shape[1] for batch in batches} == {2048}


class Hungry:
    """A way to train that a micro-batch of more rows than one is too much for."""

    model = torch.nn.Linear(1, 1)

    def __init__(self):
        self.rows = []

    def step(self, batches):
        self.rows.append([len(batch.input_ids) for batch in batches])
        if len(batches[0].input_ids) > self.most:
            raise torch.OutOfMemoryError
        return False


@pytest.mark.parametrize(
    ("most", "rows", "problem"),
    [(1, [[4], [2, 2], [1] * 4, [1] * 4], None), (0, [[4], [2, 2], [1] * 4], "out of memory")],
    ids=["fits in the end", "never fits"],
)
def test_a_way_that_runs_out_of_memory_takes_smaller_micro_batches(most, rows, problem):
    way = Hungry()
    way.most = most
    case = throughput.Case("any", way, full_rows(TINY["opt-1.3b"])[:4], 1, 128)
    throughput._warm_up(case)
    assert way.rows == rows
    assert (problem or "") in (case.problem or "")
    assert (case.problem is None) == (problem is None)


@pytest.mark.thorough
@pytest.mark.stage
def test_the_ppo_part_finds_both_ways_to_do_the_same_work(tmp_path):
    result = run("ppo", BENCH_OUTPUT=str(tmp_path))
    assert result.returncode == 0, result.stderr
    entry = json.loads((tmp_path / "cpu-tiny.json").read_text())["ppo"]
    assert entry["status"] == "passed"
    assert entry["checks"]["both find the same within 0.0001"]
    assert all(entry["checks"].values())
    assert len(entry["apart"]) == 10
    assert max(entry["apart"].values()) <= 1e-4
    cases = {(case["setting"], case["contender"]): case for case in entry["cases"]}
    assert {setting for setting, _ in cases} == set(entry["mean_tokens"])
    for (setting, contender), case in cases.items():
        means = entry["mean_tokens"][setting]
        assert case["generated"] == pytest.approx(means["answer"] * entry["size"]["responses"])
        for work in case["works"]:
            assert set(work["seconds"]) == {"generation", "scoring", "training", "rest"}
            assert all(seconds > 0 for seconds in work["seconds"].values())
        if contender == "ours":
            assert case["times_ours"]["median"] == 1
            # the package holds each base once
            chat = cases[setting, "DeepSpeed-Chat's way"]
            assert case["weights_mib"] < 0.7 * chat["weights_mib"]


@pytest.fixture(scope="module")
def ways():
    """Every way to fine-tune, on 40 samples of 8 tokens, of which three are a prompt."""
    generator = np.random.default_rng(0)
    ids = generator.integers(4, 64, size=(40, 8), dtype=np.int32)
    labels = np.where(np.arange(8) < 3, np.int32(-100), ids)
    samples = [SequenceSample.of(*each) for each in zip(ids, labels, strict=True)]
    tiny = replace(
        task(0, micro_batch=4, accumulation=2),
        samples=samples,
        tokenizer=random_pairs(vocab_size=64, max_seq_len=24, limit=1).tokenizer,
        size=ModelSize(
            hidden_size=16,
            num_layers=1,
            num_heads=2,
            vocab_size=64,
            lora_dim=2,
            max_seq_len=24,
            rounds=1,
            seconds=1.0,
        ),
    )
    built = {name: build(tiny) for name, build in CONTENDERS["sft"].items()}
    for way in built.values():
        draw_adapters_(way.model)
    yield built
    shutdown()


@pytest.mark.stage
@pytest.mark.filterwarnings("ignore")
def test_all_ways_to_fine_tune_find_the_loss_of_the_untrained_model(ways):
    losses = {name: way.loss([0, 1, 2]) for name, way in ways.items()}
    # By hand from the full logits of one of them: five supervised tokens of each sample.
    chat = ways["DeepSpeed-Chat's way"]
    ids = torch.stack([chat._padded[0][number][:8] for number in range(3)])
    with torch.no_grad():
        logprobs = chat.model(input_ids=ids).logits.log_softmax(-1)
    picked = logprobs[:, 2:7].gather(-1, ids[:, 3:8, None])
    assert losses == pytest.approx(dict.fromkeys(ways, -picked.mean().item()), abs=1e-5)


@pytest.mark.stage
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONTENDERS["sft"])
def test_a_step_of_each_way_trains_its_adapters_and_counts_real_tokens(ways, name):
    way = ways[name]
    before = [p.detach().clone() for p in way.model.parameters() if p.requires_grad]
    work = way.step()
    after = [p for p in way.model.parameters() if p.requires_grad]
    # Two factors on each of six linear layers.
    assert len(after) == 12
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    packed = name == "ours" or "packing " in name
    # Eight samples of 8 tokens; packed, three of them fill a row of 24.
    assert work.amount == (72 if packed else 64)
    assert work.positions == (8 * 24 if "DeepSpeed" in name else work.amount)


def works(*steps):
    return [Work(amount, positions=0, seconds=s, cpu_seconds=2 * s) for amount, s in steps]


def test_contenders_are_compared_round_by_round_by_what_they_did():
    ours = Runner("ours", None, None, works=works((100, 1.0), (50, 1.0), (100, 2.0)))
    other = Runner("other", None, None, works=works((50, 1.0), (50, 3.0), (100, 8.0)))
    # A hundredth, a fiftieth and a fiftieth of a second each; three times a fiftieth and so on.
    times = times_ours(other, ours, "seconds")
    assert times["median"] == pytest.approx(3)
    assert times["quartile_1"] == pytest.approx(2.5)
    assert times["quartile_3"] == pytest.approx(3.5)
    assert times_ours(other, ours, "cpu_seconds") == times


class Clocked(Runner):
    """A contender whose step takes ten seconds of a clock that stands still otherwise."""

    clock = 0.0

    def receive(self):
        return "ready"

    def ask(self, method):
        if method == "peak_bytes":
            return 1
        Clocked.clock += 10
        return method


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 5), ({"seconds": 25}, 2), ({"seconds": 5}, 1)],
    ids=["all rounds", "ended in time", "one at least"],
)
def test_rounds_end_in_time(options, expected, monkeypatch):
    monkeypatch.setattr(Clocked, "clock", 0.0)
    monkeypatch.setattr(turns.time, "monotonic", lambda: Clocked.clock)
    runner, failed = Clocked("one", object(), None), Runner("two", None, None, problem="absent")
    turns.take_turns([runner, failed], rounds=5, **options)
    assert len(runner.works) == expected
    assert (runner.ready, runner.peak_bytes) == ("ready", 1)
    assert failed.works == []


def task(samples, *, micro_batch, accumulation):
    return Task(
        kind="sft",
        samples=[None] * samples,
        tokenizer="",
        micro_batch=micro_batch,
        accumulation=accumulation,
        dtype="fp32",
        threads=1,
        size=ModelSize(1, 1, 1, 1, 1, 1, rounds=1, seconds=1.0),
    )


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(1000, (4, 4)), (500, (2, 4)), (380, (2, 3)), (100, (1, 2)), (1, (1, 1))],
)
def test_a_step_of_packed_rows_holds_as_many_samples_as_one_without_packing(num_rows, expected):
    assert task(1000, micro_batch=4, accumulation=4).rows_like_samples(num_rows) == expected


def test_windows_take_every_row_once_an_epoch_in_whole_steps_alone():
    windows = task(10, micro_batch=2, accumulation=2).windows(10, 2, 2)
    first, second = ([next(windows) for _ in range(2)] for _ in range(2))
    for epoch in (first, second):
        assert [[len(micro) for micro in window] for window in epoch] == [[2, 2], [2, 2]]
        numbers = [n for window in epoch for micro in window for n in micro]
        assert len(set(numbers)) == 8
        assert set(numbers) <= set(range(10))
    assert first != second


def test_results_of_a_run_to_keep_have_a_file_of_their_own(tmp_path):
    assert PartReport(tmp_path, "sft", tiny=True, file="sft").finish()
    assert PartReport(tmp_path, "sft", tiny=True).finish()
    entries = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert {name: entry["sft"]["tiny"] for name, entry in entries.items()} == {
        f"{device_slug()}-sft.json": False,
        f"{device_slug()}-tiny.json": True,
    }


def test_an_unknown_part_is_refused_by_name_before_anything_runs():
    result = run("decode", "thruput")
    assert result.returncode == 2
    assert "unknown part 'thruput'" in result.stderr
    assert all(part in result.stderr for part in PARTS)
    assert "== decode" not in result.stdout


@pytest.mark.parametrize(
    ("asked", "ran"),
    [(["decode", "5"], ["decode", *USER]), ([], [n for n, part in PARTS.items() if part.group])],
    ids=["a name and a group", "all"],
)
def test_a_part_that_fails_is_reported_and_the_others_still_run(asked, ran, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--limited", "--output", "/nonexistent", *asked])
    assert gpu.main() == 1
    told = capsys.readouterr().out
    assert re.findall(r"== (\S+) \(at most (\d+) s\)", told) == [
        (name, str(PARTS[name].seconds)) for name in ran
    ]
    assert f"failed: {' '.join(ran)}\n" in told


def test_a_part_that_takes_too_long_is_ended(monkeypatch, tmp_path, capfd):
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setitem(PARTS, "decode", PARTS["decode"]._replace(seconds=1))
    assert not gpu.passes("decode", tmp_path, tiny=True)
    assert "decode: stopped after 1 s; what it had measured is kept" in capfd.readouterr().err


def test_parts_and_groups_end_in_time_even_if_all_have_to_be_killed(monkeypatch):
    assert max(part.seconds for part in PARTS.values()) <= 240
    for group in {part.group for part in PARTS.values()}:
        own = [part.seconds + 5 for part in PARTS.values() if part.group == group]
        assert sum(own) <= 10 * 60
    monkeypatch.setenv("BENCH_SFT", "1")  # of make bench
    assert supervised.CPU["sft"].seconds < PARTS["sft"].limit() <= 10 * 60 - 5


def test_the_documentation_gives_the_parts_limits_and_groups_that_hold():
    text = README.read_text()
    table = re.findall(r"^\| `(\S+)` \| (\S+) \| (\d+) s \|", text, re.MULTILINE)
    assert table == [(n, str(p.group or "-"), str(p.seconds)) for n, p in PARTS.items()]
    lines = re.findall(r"^benchmarks/gpu\.sh (\d) +# (\d+) minutes at most", text, re.MULTILINE)
    # with five seconds more for each to be killed in
    minutes = {
        group: math.ceil(sum(p.seconds + 5 for p in PARTS.values() if p.group == group) / 60)
        for group in sorted({part.group or 0 for part in PARTS.values()} - {0})
    }
    assert {int(group): int(most) for group, most in lines} == minutes
    assert f"every part with a group, {sum(minutes.values())} minutes at most" in text
