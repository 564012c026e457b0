"""The search for a rate: its candidates, what the pruner is told, and what a kill leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from curve_run import loss

from dschat_lora.addons.planning import tune, verbs
from dschat_lora.addons.planning.config import TuneConfig
from helpers.spread import ALL
from helpers.step1 import ROOT, metrics

HERE = Path(__file__).parent
RATES = (1e-4, 1e-3, 1e-2)
OPTIONS = {"lora_dim": 4, "lora_learning_rate": 1e-3, "max_steps": 27}


pytestmark = pytest.mark.usefixtures("own_directory", "first_rows")


def search_of(options=None, stage="sft", **own):
    return tune.make_search(TuneConfig(**own), stage, {"lora_dim": 4, **(options or {})}, None)


# ---------------------------------------------------------------------------- candidates


@pytest.mark.smoke
def test_rates_around_the_published_rule_begin_with_it():
    """The bundled model is 128 wide, and of no family with an exponent of its own."""
    rates = [each["lora_learning_rate"] for each in search_of().candidates]
    rule = 5e-5 * (2000 / 128) ** 0.5 * 10
    assert rates == pytest.approx([rule * n for n in (1, 2, 1 / 2, 4, 1 / 4, 8, 1 / 8)], rel=5e-3)


def test_a_rate_that_is_given_stands_in_the_middle():
    candidates = search_of({"lora_learning_rate": 1e-3}).candidates
    assert candidates[0] == {"lora_learning_rate": 1e-3}
    assert search_of({"lora_learning_rate": 1e-2}, rates=RATES).values("lora_learning_rate") == [
        *RATES
    ]


def test_every_rate_is_tried_with_every_rank_and_batch():
    search = search_of({"lora_learning_rate": 9e-3}, rates=RATES, ranks=(4, 8), batches=(8, 32))
    rows = [tuple(each.values()) for each in search.candidates]
    assert rows == [(r, k, b) for r in (1e-2, 1e-3, 1e-4) for k in (4, 8) for b in (8, 32)]


def test_a_larger_batch_makes_fewer_steps_of_as_many_rows():
    search = search_of({"max_steps": 54}, rates=RATES, batches=(8, 32))
    large = search.of_run(search.candidates[1])
    assert (large["per_device_train_batch_size"], large["max_steps"]) == (32, round(54 / 4))
    assert search.of_run(search.candidates[0])["max_steps"] == 54
    # Decisions are after as many rows of each: 4 steps of the small batch, 1 of the large one.
    assert (search.min_steps, large["eval_interval"]) == (4, 1)


def test_options_of_adapters_go_with_ranks_that_are_searched():
    search = tune.make_search(TuneConfig(ranks=(8, 16, 8)), "sft", {"target_modules": ["q"]}, None)
    assert search.values("lora_dim") == [8, 16]
    assert len(search.candidates) == 14  # each once


def test_all_weights_have_a_rate_of_their_own_name():
    search = tune.make_search(TuneConfig(), "sft", {}, None)
    assert [*search.candidates[0]] == ["learning_rate"]
    ranked = tune.make_search(TuneConfig(ranks=(4,)), "sft", {}, None)
    assert [*ranked.candidates[0]] == ["lora_learning_rate", "lora_dim"]


def test_a_search_beside_a_file_tries_all_weights_in_its_runs(monkeypatch):
    searches = []
    Path("silent.yaml").write_text("seed: 7\n", encoding="utf-8")
    monkeypatch.setattr(verbs, "require_packages", lambda *_, **__: None)
    search = tune.make_search
    monkeypatch.setattr(
        tune, "run_tune", lambda config, *given: searches.append(search(config, *given))
    )
    for words in ("", "--config silent.yaml", "--learning_rate 3e-3"):
        verbs.tune(["sft", *words.split()])
    verb, file, rate = searches
    assert [each.options["lora_dim"] for each in searches] == [16, 0, 16]
    assert (*verb.candidates[0], *file.candidates[0]) == ("lora_learning_rate", "learning_rate")
    assert rate.candidates[0] == {"lora_learning_rate": 3e-3}
    bare = search(TuneConfig(), "sft", {}, None)
    assert bare.options == {"lora_dim": 0}


def test_step_3_is_searched_by_the_actor_and_its_reward():
    options = {"actor_lora_dim": 4, "algorithm": "grpo", "reward_function": ["builtin:length=9"]}
    options |= {"num_generations": 2}
    search = tune.make_search(TuneConfig(batches=(16,)), "rlhf", options, None)
    assert [*search.candidates[0]] == ["actor_lora_learning_rate", "per_device_training_batch_size"]
    assert (search.metric, search.rises) == ("reward", True)
    rule = 5e-4 * (2000 / 128) ** 0.5 * 0.14
    assert search.candidates[0]["actor_lora_learning_rate"] == pytest.approx(rule, rel=5e-3)


@pytest.mark.parametrize(
    ("metric", "rises"),
    [("loss", False), ("accuracy", True), ("greedy_reward", True), ("kl", False)],
)
def test_measures_rise_or_fall(metric, rises):
    assert search_of(metric=metric).rises is rises


@pytest.mark.parametrize(
    ("options", "own", "message"),
    [
        ({"eval_interval": 3}, {}, "--eval_interval is set by the search: remove"),
        ({"max_steps": 4}, {"min_steps": 5}, "--min_steps 5 must be at most --max_steps, 4"),
        ({}, {"min_steps": 3, "batches": (8, 32)}, "of batches of 8 are less than a step of .* 4$"),
        ({"data_path": ["no.jsonl"]}, {}, "--data_path no.jsonl does not exist"),
    ],
)
def test_mistakes_that_a_search_shows_are_named(options, own, message):
    with pytest.raises(ValueError, match=message):
        search_of(options, **own)


# ---------------------------------------------------------------------------- searches


@pytest.fixture
def searched(monkeypatch, capsys):
    """``searched(**own)``: a search over runs that are only curves; its trials and output."""
    optuna = pytest.importorskip("optuna", reason="needs dschat_lora[planning]")

    def call(options=None, **own):
        monkeypatch.setattr(tune, "PACKAGE", "curve_run")
        monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{HERE}")
        config = TuneConfig(**{"rates": RATES, "output_dir": "out", **own})
        capsys.readouterr()
        tune.run_tune(config, "sft", {**OPTIONS, **(options or {})}, None)
        backend = optuna.storages.journal.JournalFileBackend("out/study.log")
        storage = optuna.storages.JournalStorage(backend)
        study = optuna.load_study(study_name="tune", storage=storage)
        return study.trials, capsys.readouterr().out

    return call


def test_trials_that_fall_behind_end_at_their_rung(searched):
    """Rungs after 1, 3 and 9 steps; one in three goes on, and the first to come always."""
    trials, said = searched()
    assert [each.params["lora_learning_rate"] for each in trials] == pytest.approx(
        [1e-3, 1e-4, 1e-2]
    )
    assert [each.state.name for each in trials] == ["COMPLETE", "PRUNED", "PRUNED"]
    assert trials[0].value == pytest.approx(loss(1e-3, 1234, 27))
    # The largest rate is ahead until the second rung, and loses at the third.
    assert [loss(1e-2, 0, n) < loss(1e-3, 0, n) for n in (1, 3, 9)] == [True, False, False]
    assert [max(each.intermediate_values) for each in trials[1:]] == [1, 3]
    assert "best: trial-00" in said
    assert "dschat-lora sft --lora_dim 4 --lora_learning_rate 0.001 --max_steps 27" in said
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "lora_learning_rate 0.0001" in page
    # What was pruned has saved, and made hardly a step more.
    stopped = int(Path("out/trial-01/seed-1234/checkpoints/step").read_text())
    assert 1 <= stopped < 27


def test_a_measure_that_is_to_rise_is_best_where_it_is_greatest(searched):
    trials, said = searched(metric="reward")
    assert [each.state.name for each in trials] == ["COMPLETE", "PRUNED", "PRUNED"]
    assert trials[0].value == pytest.approx(-loss(1e-3, 1234, 27))
    assert "the greatest held-out reward is best" in said
    assert "best: trial-00" in said


def test_in_python_a_search_gives_its_best_options_and_trials(searched, monkeypatch):
    import dschat_lora as dl

    trials, _ = searched()
    tuned = dl.tune("sft", rates=RATES, output_dir="python", **OPTIONS)
    assert tuned.best == trials[0].params
    assert tuned.value == trials[0].value
    assert [each["ended"] for each in tuned.trials] == ["whole", "pruned", "pruned"]
    assert tuned.command == (
        "dschat-lora sft --lora_dim 4 --lora_learning_rate 0.001 --max_steps 27"
    )
    assert (tuned.path / "report.html").is_file()


@pytest.mark.parametrize(
    ("stage", "given", "error", "message"),
    [
        (
            "sftx",
            {},
            ValueError,
            "stage must be one of sft, reward, dpo, rlhf, distill, got 'sftx'",
        ),
        ("sft", {"lora_dimm": 4}, TypeError, "did you mean --lora_dim?"),
        ("sft", {"rates": [-1.0]}, ValueError, "rates must be > 0"),
        ("sft", {"data": [{"text": "a"}]}, TypeError, "data_path must be a path or a name"),
        ("rlhf", {"reward_function": len}, TypeError, "reward_function must be a path or a name"),
    ],
)
def test_mistakes_in_python_are_named(stage, given, error, message):
    import dschat_lora as dl

    with pytest.raises(error) as raised:
        dl.tune(stage, **given)
    assert message in str(raised.value)


def test_seeds_count_by_their_mean_and_run_at_a_time(searched):
    trials, _ = searched({"seed": 3}, seeds=2, rates=(1e-3,), min_steps=3)
    assert trials[0].value == pytest.approx((loss(1e-3, 3, 27) + loss(1e-3, 4, 27)) / 2)
    assert trials[0].intermediate_values[3] == pytest.approx(
        (loss(1e-3, 3, 3) + loss(1e-3, 4, 3)) / 2
    )


@pytest.mark.smoke
def test_the_command_is_that_of_the_best_trial_with_its_steps(searched):
    _, said = searched(rates=(1e-3,), batches=(4, 2), trials=1)
    assert "--max_steps 14 --per_device_train_batch_size 4\n" in said
    assert "the least held-out loss is best" in said


def test_the_seed_that_fails_says_why(searched):
    with pytest.raises(ValueError, match="no trial finished"):
        searched({"seed": 665}, seeds=2, rates=(1e-2,))
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "failed: the loss is nan" in page


def test_a_trial_that_fails_says_why_and_others_go_on(searched):
    trials, said = searched({"seed": 666}, jobs=2, reduction_factor=9, min_steps=27)
    assert sorted(each.state.name for each in trials) == ["COMPLETE", "COMPLETE", "FAIL"]
    assert "failed: the loss is nan" in said
    assert "best: trial-00" in said


def test_trials_beyond_the_listed_ones_lie_between_them(searched, monkeypatch):
    monkeypatch.setattr(tune.Search, "of_run", lambda *_: {**OPTIONS, "eval_interval": 27})
    trials, _ = searched(trials=5)
    rates = [each.params["lora_learning_rate"] for each in trials]
    assert len(rates) == 5
    assert len({*rates[3:]} - {*RATES}) == 2
    assert all(min(RATES) <= each <= max(RATES) for each in rates)


def test_an_unknown_measure_ends_the_search_and_its_runs(searched):
    with pytest.raises(ValueError, match=r"^--metric score must be one of loss, reward$"):
        searched(metric="score")
    assert not _runs_here()


def test_a_directory_of_a_search_is_gone_on_with_or_refused(searched):
    searched(rates=(1e-3,))
    with pytest.raises(ValueError, match="out contains a search: continue it with --resume"):
        searched(rates=(1e-3,))
    with pytest.raises(ValueError, match=r"--resume: lora_dim was 4, now 8; restore it"):
        searched({"lora_dim": 8}, rates=(1e-3,), resume=True)
    with pytest.raises(ValueError, match="--resume: new contains no search"):
        searched(output_dir="new", resume=True)
    trials, _ = searched(rates=(1e-3,), resume=True)
    assert [each.state.name for each in trials] == ["COMPLETE"]


def test_the_lock_of_a_search_links_to_its_file_so_that_that_of_a_killed_one_is_given_up(
    searched, monkeypatch
):
    """Optuna gives up what is 30 seconds old, but waits without end for a link to nothing."""
    lock, links = sys.modules["optuna"].storages.journal.JournalFileSymlinkLock, []
    acquire = lock.acquire

    def noted(self):
        acquire(self)
        links.append(Path("out/study.log.lock").exists())
        return True

    monkeypatch.setattr(lock, "acquire", noted)
    searched(rates=(1e-3,))
    assert links == [True] * len(links) != []


@pytest.mark.parametrize("number", [signal.SIGKILL, *[signal.SIGTERM] * ALL])
def test_a_search_that_is_killed_goes_on_from_the_checkpoints(searched, number):
    options = {**OPTIONS, "max_steps": 400}
    program = (
        "from dschat_lora.addons.planning.config import TuneConfig\n"
        "from dschat_lora.addons.planning import tune\n"
        "tune.PACKAGE = 'curve_run'\n"
        f"tune.run_tune(TuneConfig(rates=(1e-3,), output_dir='out'), 'sft', {options}, None)\n"
    )
    paths = {"PYTHONPATH": f"{ROOT}:{HERE}"}
    process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **paths})
    log = Path("out/trial-00/seed-1234/metrics.jsonl")
    _wait(lambda: log.exists() and '"step": 30}' in log.read_text())
    process.send_signal(number)
    assert process.wait() == (-9 if number == signal.SIGKILL else 128 + number)
    _wait(lambda: not _runs_here())
    trials, _ = searched({"max_steps": 400}, rates=(1e-3,), resume=True)
    assert trials[0].value == pytest.approx(loss(1e-3, 1234, 400))
    steps = [line["step"] for line in metrics("out/trial-00/seed-1234", "train")]
    assert steps == list(range(1, 401))
    output = Path("out/trial-00/seed-1234.log").read_text()
    assert output.startswith("from step 0\nfrom step ")
    assert not output.startswith("from step 0\nfrom step 0")


def _wait(happened, seconds=300):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def _runs_here():
    """Processes of curves that were started in this directory."""
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if "curve_run" in (path / "cmdline").read_text().split("\0"):
                processes += [path.name] * ((path / "cwd").readlink() == Path.cwd())
        except OSError:
            continue
    return processes


@pytest.mark.stage
def test_a_trial_that_is_not_ended_is_the_run_of_its_command(launcher, monkeypatch):
    pytest.importorskip("optuna", reason="needs dschat_lora[planning]")
    # Of so many steps a trial that has lost at the first one is ended before its last.
    short = ["--lora_dim", "4", "--max_seq_len", "32", "--max_steps", "12", "--eval_iters", "1"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the trials
    verbs.tune(["sft", *short, "--rates", "1e-3", "1e-5", "--output_dir", "out"])
    plain = [*short, "--eval_interval", "1", "--output_dir", "plain"]
    running = launcher.start([*plain, "--lora_learning_rate", "1e-3"], Path.cwd())
    assert running.wait() == [0], running.output()
    losses = [
        [(line["step"], line["loss"]) for line in metrics(home) if "loss" in line]
        for home in ("out/trial-00/seed-1234", "plain")
    ]
    assert losses[0] == losses[1]
    status = json.loads(Path("out/trial-01/seed-1234/run.json").read_text())["status"]
    assert status.startswith("interrupted by SIGTERM at step")
