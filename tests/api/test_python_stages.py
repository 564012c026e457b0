"""Training in Python: the same numbers as the commands, objects as inputs, errors as exceptions."""

import gzip
import inspect
import io
import json
import os
import pydoc
import re
import runpy
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from traceback import format_exception
from types import SimpleNamespace
from unittest.mock import patch

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dschat_lora as dl
from api.own_scorer import Style
from api.programs import (
    PAIRS,
    ROLLOUTS,
    ROWS,
    SHORT,
    brevity,
    compared,
    numbers,
    rightness,
    write_rows,
)
from dschat_lora.api.options import option_values
from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.commands.train import run_stage
from dschat_lora.config.held import held_object
from dschat_lora.config.options import command_line, options_in_python
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.engine.rendezvous import LAUNCHED
from dschat_lora.models.fingerprint import saved_model
from dschat_lora.report import terminal
from dschat_lora.rl.options.config import RlhfConfig
from helpers.addons import of_the_whole
from helpers.launcher import ROOT

pytestmark = pytest.mark.stage
HOLED = pd.DataFrame([*ROWS, {"prompt": "a"}])


def by_command(stage, tmp_path, **options):
    """The run of the command with these options, no line of which is wider than the terminal."""
    home = tmp_path / f"{stage}-by-command"
    options = {k: v for k, v in options.items() if k != "quiet"}
    argv = command_line({**options, "output_dir": home})
    with patch.object(terminal, "columns", lambda: 80), redirect_stdout(io.StringIO()) as shown:
        run_stage(stage, argv=argv, program=stage)
    lines = shown.getvalue().splitlines()
    assert len(lines) > 20
    wide = [each.rstrip("\\").split() for each in lines if len(each) > 80]
    assert all(len(words) == 1 for words in wide), wide  # a path
    return dl.load(home)


@pytest.fixture(scope="module")
def sft():
    return dl.sft(data=ROWS, **SHORT)


@pytest.fixture(scope="module")
def scorer(sft):
    return dl.reward(sft, data=PAIRS, max_steps=2, max_seq_len=64, quiet=True)


def assert_same(run, other):
    assert numbers(run) == numbers(other)
    assert len(numbers(run)) > 3
    weights = "adapter_model.safetensors"
    assert (run.adapter / weights).read_bytes() == (other.adapter / weights).read_bytes()


def test_sft_has_the_numbers_of_the_command_bit_for_bit(sft, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    assert_same(sft, by_command("sft", tmp_path, data_path=path, **SHORT))


def test_reward_has_the_numbers_of_the_command_bit_for_bit(sft, scorer, tmp_path):
    path = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    options = {"model_name_or_path": sft.path, "max_steps": 2, "max_seq_len": 64}
    assert_same(scorer, by_command("reward", tmp_path, data_path=path, **options))


def test_dpo_has_the_numbers_of_the_command_bit_for_bit(sft, tmp_path):
    path = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    run = dl.dpo(sft, data=PAIRS, max_steps=2, max_seq_len=64, beta=0.3, quiet=True)
    options = {"model_name_or_path": sft.path, "max_steps": 2, "max_seq_len": 64, "beta": 0.3}
    assert_same(run, by_command("dpo", tmp_path, data_path=path, **options))


def test_rlhf_has_the_numbers_of_the_command_bit_for_bit(sft, scorer, tmp_path, monkeypatch):
    """A function and a reward model, whatever their order in Python."""
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    weighed = {"rewards": [scorer, brevity], "reward_weights": [0.5, 2.0]}
    run = dl.rlhf(sft, data=ROWS, **weighed, **ROLLOUTS)
    options = {
        "actor_model_name_or_path": sft.path,
        "critic_model_name_or_path": scorer.path,
        "reward_function": ["api.programs:brevity"],
        "reward_weights": [2.0, 0.5],
        "data_path": path,
    }
    assert_same(run, by_command("rlhf", tmp_path, **options, **ROLLOUTS))
    assert any("reward/brevity" in line for line in run.metrics)


@of_the_whole
def test_a_player_that_is_handed_over_has_the_numbers_of_the_command_bit_for_bit(sft, tmp_path):
    from helpers.players import BetterOfTwo

    run = dl.rlhf(sft, data=ROWS, environment=BetterOfTwo(), **ROLLOUTS)
    options = {
        "actor_model_name_or_path": sft.path,
        "environment": "helpers.players:BetterOfTwo",
        "data_path": write_rows(tmp_path / "rows.jsonl", ROWS),
    }
    assert_same(run, by_command("rlhf", tmp_path, **options, **ROLLOUTS))
    assert all("reward/BetterOfTwo" in line for line in run.metrics if line["kind"] == "train")


def test_a_scorer_of_ones_own_gives_several_rewards_as_functions_do(sft, tmp_path, monkeypatch):
    """By the command and in Python, each with a weight of its own."""
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    weights = [0.5, 2.0]
    functions = dl.rlhf(
        sft, data=ROWS, rewards=[brevity, rightness], reward_weights=weights, **ROLLOUTS
    )
    assert_same(
        dl.rlhf(sft, data=ROWS, rewards=[Style()], reward_weights=weights, **ROLLOUTS), functions
    )
    options = {
        "actor_model_name_or_path": sft.path,
        "reward_function": ["api.own_scorer:Style"],
        "reward_weights": weights,
        "data_path": path,
    }
    assert_same(by_command("rlhf", tmp_path, **options, **ROLLOUTS), functions)
    assert {"reward/brevity", "reward/rightness"} <= functions.metrics[-1].keys() | (
        functions.metrics[-2].keys()
    )


def test_an_algorithm_of_ones_own_is_a_function_or_a_name_and_learns_as_the_one_it_repeats(
    sft, tmp_path, monkeypatch
):
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    expected = dl.rlhf(sft, data=ROWS, rewards=brevity, **ROLLOUTS)
    run = dl.rlhf(sft, data=ROWS, rewards=brevity, **{**ROLLOUTS, "algorithm": compared})
    options = {
        "actor_model_name_or_path": sft.path,
        "reward_function": ["api.programs:brevity"],
        "data_path": path,
        **ROLLOUTS,
        "algorithm": "api.programs:compared",
    }
    assert_same(run, by_command("rlhf", tmp_path, **options))
    assert json.loads((run.path / "run.json").read_text())["config"]["algorithm"] == (
        "python:compared"
    )
    losses, others = ([x["loss"] for x in numbers(r) if "loss" in x] for r in (run, expected))
    assert losses == pytest.approx(others, abs=1e-6)
    assert max(map(abs, losses)) > 1e-3
    own = dl.Algorithm(
        lambda outcome: outcome.rewards["brevity"] * outcome.weights["brevity"] - outcome.kl,
        needs={"old_logprobs"},
        learns_from=lambda total, rewards: max(rewards["brevity"]) > 99,
        cliprange_high=0.5,
    )
    found = dl.rlhf(sft, data=ROWS, rewards=brevity, **{**ROLLOUTS, "algorithm": own})
    assert json.loads((found.path / "run.json").read_text())["config"]["cliprange_high"] == 0.5
    assert {line["equal_prompts"] for line in found.metrics if "equal_prompts" in line} == {2}


@of_the_whole
def test_rows_of_every_kind_give_the_same_run(sft, tmp_path):
    class Again:
        def __iter__(self):
            return iter(ROWS)

    def audited(rows):
        return [each["input_ids"] for each in dl.audit(rows, show=len(ROWS)).samples]

    indexed = torch.utils.data.Subset(ROWS, range(len(ROWS)))
    array = np.array(ROWS, dtype=object)
    file = write_rows(tmp_path / "r.jsonl", ROWS)
    assert len(expected := audited(ROWS)) > len(ROWS) / 2
    for rows in (datasets.Dataset.from_list(ROWS), indexed, array, file):
        assert audited(rows) == expected
    assert_same(dl.sft(data=Again(), **SHORT), sft)


def test_values_of_numpy_and_sets_are_those_of_python():
    given = {"lora_dim": np.int64(4), "packing": np.True_, "target_modules": {"v_proj", "q_proj"}}
    values = options_in_python(SupervisedConfig, given)
    assert values == {"lora_dim": 4, "packing": True, "target_modules": ("q_proj", "v_proj")}


def test_a_loaded_model_gives_the_run_of_its_files_and_is_not_changed(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    with torch.no_grad():  # a model of nobody's files
        model.get_input_embeddings().weight[5] += 0.25
    home = tmp_path / "model"
    model.save_pretrained(home)
    tokenizer.save_pretrained(home)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.config.architectures = None  # which saving notes
    config, size = model.config.to_dict(), len(tokenizer)
    run = dl.sft((model, tokenizer), data=ROWS, **SHORT)
    assert numbers(run) == numbers(dl.sft(home, data=ROWS, **SHORT))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert (model.config.to_dict(), len(tokenizer)) == (config, size)
    assert model.state_dict().keys() == weights.keys()
    asked = {"max_new_tokens": 8}
    texts = dl.generate((model, tokenizer), ["What is 2 plus 3?"], **asked)
    assert texts == dl.generate(home, ["What is 2 plus 3?"], **asked)
    first = saved_model(model, tokenizer)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] += 1e-3
    assert saved_model(model, tokenizer) != first  # for it is another one


def test_other_rows_are_not_taken_for_these(sft):
    """What was tokenised before is found by the rows' content."""
    others = [{**row, "completion": row["completion"].replace(".", "!")} for row in ROWS]
    assert numbers(dl.sft(data=others, **SHORT)) != numbers(sft)


@pytest.mark.thorough
def test_a_second_reward_model_scores_too(sft, scorer):
    """It reads the text, so its tokenizer may be another one; an ended response scores alike."""
    run = dl.rlhf(sft, data=ROWS, rewards=[scorer, brevity, str(scorer.adapter)], **ROLLOUTS)
    with gzip.open(run.path / "rollouts.jsonl.gz", "rt") as file:
        scores = [row["rewards"] for row in map(json.loads, file) if row["ended"]]
    assert len(scores) > 3
    for each in scores:
        assert each["adapter"] == pytest.approx(each["reward_model"], abs=1e-4)
    assert dl.rlhf(sft, data=ROWS, rewards=brevity, **ROLLOUTS).status == "finished"


def test_an_audit_of_rows_is_that_of_the_command(tmp_path, capsys):
    verbs = pytest.importorskip("dschat_lora.addons.audit.verbs")
    audit = dl.audit(PAIRS, stage="reward", show=1)
    write_rows(tmp_path / "pairs.jsonl", PAIRS)
    verbs.audit([str(tmp_path / "pairs.jsonl"), *"--stage reward --show 1 --json".split()])
    found = json.loads(capsys.readouterr().out)
    assert (audit.counts, audit.refusal) == (found["counts"], None)
    assert audit.samples[0]["input_ids"] == found["samples"][0]["input_ids"]
    assert audit.samples[0]["row"] == "data[0]"


def test_measures_are_those_of_the_command(sft, tmp_path, capsys):
    path = str(write_rows(tmp_path / "rows.jsonl", ROWS))
    command = pytest.importorskip("dschat_lora.addons.evaluation.verbs")
    found = dl.evaluate(sft, ROWS, judge_function=brevity, max_new_tokens=4)
    command.evaluate([str(sft.path), path, "--json"])
    alone = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in alone} == alone
    assert found["judge"] < 0
    merged = dl.merge(sft, tmp_path / "merged", dtype="fp32")
    whole = dl.evaluate(merged, ROWS)
    assert whole["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-4)
    loaded = dl.load(merged)
    assert (loaded.adapter, loaded.metrics, loaded.status) == (None, [], "finished")


def test_a_callback_sees_every_line_and_ends_the_run(tmp_path, sft):
    seen = []

    def stop(event, step, metrics):
        seen.append((event, step, metrics["loss"]))
        return "stop" if (event, step) == ("train", 2) else None

    options = {**SHORT, "max_steps": 6, "per_device_train_batch_size": 1}
    home = tmp_path / "run"
    run = dl.sft(data=ROWS, callbacks=[stop], output_dir=home, **options)
    assert (run.status, run.metrics[-1]["step"]) == ("stopped", 3)
    assert seen == [(line["kind"], line["step"], line["loss"]) for line in run.metrics]
    assert [path.name for path in (home / "checkpoints").iterdir()] == ["step-00000003"]
    resumed = dl.sft(data=ROWS, output_dir=home, resume="latest", quiet=True)
    assert_same(resumed, dl.sft(data=ROWS, **options))


@pytest.fixture
def _ctrl_c():
    """Ctrl-C interrupts, also where a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_saves_and_the_next_run_works(tmp_path, capsys):
    def interrupt(event, step, metrics):
        if (event, step) == ("train", 1):
            os.kill(os.getpid(), signal.SIGINT)

    options = {**SHORT, "max_steps": 6, "per_device_train_batch_size": 1, "quiet": False}
    home, handler = tmp_path / "run", signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        dl.sft(data=ROWS, callbacks=[interrupt], output_dir=home, **options)
    assert 'resume="latest"' in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is handler
    assert dl.load(home).status == "stopped"
    done = dl.sft(data=ROWS, output_dir=home, resume="latest", quiet=True)
    assert (done.status, done.metrics[-1]["step"]) == ("finished", 6)


def test_a_callback_that_stops_at_the_last_step_changes_nothing(sft):
    def stop(event, step, metrics):
        return "stop" if (event, step) == ("train", 2) else None

    run = dl.rlhf(sft, data=ROWS, rewards=brevity, callbacks=[stop], **ROLLOUTS)
    assert (run.status, run.metrics[-1]["kind"]) == ("finished", "eval")


@of_the_whole
def test_lists_of_a_frame_are_arrays(sft):
    question = {"role": "user", "content": "What is 2 plus 3?"}
    talk = [question, {"role": "assistant", "content": "5."}]
    plain, arrays = [{"messages": talk}], [{"messages": np.array(talk, dtype=object)}]
    assert (
        dl.audit(arrays, show=1).samples[0]["input_ids"]
        == (dl.audit(plain, show=1).samples[0]["input_ids"])
    )
    assert dl.generate(sft, [question], max_new_tokens=3) == (
        dl.generate(sft, [[question]], max_new_tokens=3)
    )


def test_after_a_failing_callback_and_a_run_within_a_run_the_next_run_works_in_any_thread(sft):
    def fail(event, step, metrics):
        raise ValueError("mine")

    with pytest.raises(RuntimeError, match="the callback fail failed") as raised:
        dl.sft(data=ROWS, callbacks=[fail], **SHORT)
    assert [each.name for each in raised.traceback][1:] == ["call"]
    assert raised.value.__cause__.__traceback__.tb_frame.f_code.co_name == "fail"
    with pytest.raises(RuntimeError, match="a run goes on in this process"):
        dl.sft(data=ROWS, callbacks=[lambda *line: dl.sft(data=ROWS, **SHORT)], **SHORT)
    found = []
    thread = threading.Thread(target=lambda: found.append(dl.sft(data=ROWS, **SHORT)))
    thread.start()
    thread.join()
    assert_same(found[0], sft)


def test_a_run_keeps_its_directory_where_the_program_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, loaded = dl.sft(data=ROWS, output_dir="run", **SHORT), dl.load("run")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert run.adapter == loaded.adapter == tmp_path / "run" / "adapter"


def test_ctrl_c_before_the_first_step_is_a_run_that_stopped(tmp_path):
    def interrupt(event, step, metrics):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dl.sft(data=ROWS, callbacks=[interrupt], output_dir=tmp_path / "run", **SHORT)
    assert dl.load(tmp_path / "run").status == "stopped"


def test_what_is_said_and_left_behind(sft, capsys, monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    before, hook = dict(os.environ), sys.excepthook
    run = dl.sft(data=ROWS, **{**SHORT, "quiet": False})
    out = capsys.readouterr().out
    assert f"output: {run.path} (started 20" in out
    assert "; temporary, deleted when Python exits; output_dir= keeps it)\n" in out
    assert re.search(r"finished 20\S+ \S+ after 0:00:\d\d\n", out)
    assert "data: your rows" in out
    assert "dschat-lora" not in out  # commands are no help here
    assert dict(os.environ) == before
    assert sys.excepthook is hook  # torch's puts [rank0]: before each line
    dl.sft(data=ROWS, **SHORT)
    assert capsys.readouterr().out == ""
    dry = dl.sft(data=ROWS, dry_run=True, **SHORT)
    assert (dry.status, dry.metrics, dry.summary) == ("dry run", [], {})


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"lora_dimm": 4}, TypeError, "unknown option --lora_dimm; did you mean --lora_dim?"),
        ({"lora_dim": "x"}, ValueError, "--lora_dim: must be a whole number, got 'x'"),
        ({"lora_dim": -1}, ValueError, "--lora_dim must be >= 0 (0 disables LoRA), got -1"),
        ({"dtype": "fp8"}, ValueError, "--dtype: must be one of auto, fp32, bf16, fp16, got 'fp8'"),
    ],
)
def test_a_mistake_is_an_exception_in_the_words_of_the_command(options, kind, message, capsys):
    with pytest.raises(kind) as raised:
        dl.sft(**options)
    assert str(raised.value) == message
    with pytest.raises(SystemExit) as ended:
        run_stage("sft", argv=command_line(options), program="sft")
    assert (ended.value.code, capsys.readouterr().err) == (2, f"error: {message}\n")


@pytest.mark.parametrize(
    ("kind", "data", "rows"),
    [
        (SupervisedConfig, HOLED, [*ROWS, {"prompt": "a", "completion": None}]),
        # Lists of a parquet file are arrays there.
        (
            SupervisedConfig,
            pd.DataFrame([{"messages": np.array([{"role": "user"}])}, {"text": pd.NA}]),
            [{"messages": [{"role": "user"}], "text": None}, {"messages": None, "text": None}],
        ),
        (SupervisedConfig, ["Some text.", "b c"], [{"text": "Some text."}, {"text": "b c"}]),
        (RlhfConfig, ["What is 2?"], [{"prompt": "What is 2?"}]),
        (RlhfConfig, SimpleNamespace(to_dicts=lambda: ROWS), ROWS),
    ],
    ids=["pandas", "arrays", "texts", "prompts", "polars"],
)
def test_tables_and_texts_are_rows(kind, data, rows):
    with ExitStack() as stack:
        named = option_values(kind, {"data_path": data}, stack)["data_path"]
        assert json.dumps([*held_object(named, "data_path")]) == json.dumps(rows)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: dl.sft("nosuch/model/here"), ValueError, "nosuch/model/here does not exist"),
        (lambda: dl.sft(data="nosuch.jsonl"), ValueError, "--data_path nosuch.jsonl does not"),
        (lambda: dl.sft(data=[{"answer": "4"}]), ValueError, "data[0]: row has ['answer']"),
        (lambda: dl.sft(data=[*ROWS, {"prompt": 4}]), ValueError, "data[36]: `prompt` must be"),
        (lambda: dl.sft(data=(r for r in ROWS)), ValueError, "data is a generator"),
        (lambda: dl.sft(data=[]), ValueError, "data has no rows"),
        (lambda: dl.sft(data=4), TypeError, "data must be a path, rows"),
        (lambda: dl.sft(data=[ROWS[0], None]), TypeError, "data[1] is None; rows are dicts"),
        (lambda: dl.sft(train_dataset=ROWS), TypeError, "--train_dataset; data takes files"),
        (lambda: dl.dpo(data=["What is 2?"]), TypeError, "{'prompt': 'What"),
        (lambda: dl.sft(4), TypeError, "model must be a name, a path, a Run"),
        (lambda: dl.sft((4, 5)), TypeError, "(model, tokenizer) of transformers, got a int"),
        (lambda: dl.sft("a", model_name_or_path="b"), TypeError, "an argument of its own, too"),
        (lambda: dl.sft(data=ROWS[0]), TypeError, "a single row goes into a list"),
        (lambda: dl.sft(callbacks=brevity), TypeError, "a list of functions, got a function"),
        (
            lambda: dl.sft(deepspeed_config={"a": {1}}),
            ValueError,
            "--deepspeed_config: is not JSON",
        ),
        (lambda: dl.sft(callbacks=[4]), TypeError, "callbacks must be functions"),
        (lambda: dl.sft(callbacks=[brevity]), TypeError, "metrics), brevity takes (responses)"),
        (
            lambda: dl.sft(deepspeed_config="a"),
            ValueError,
            "config a cannot be read: it is neither a file",
        ),
        (lambda: dl.rlhf(rewards=[4]), TypeError, "rewards must be functions"),
        (lambda: dl.rlhf(rewards=[brevity], reward_weights=[1, 2, 3]), ValueError, "3 weights"),
        (lambda: dl.rlhf(rewards=[brevity], reward_weights=2), ValueError, "a list of numbers"),
        (lambda: dl.rlhf(rewards=lambda text: 1.0), ValueError, "the reward function lambda must"),
        (lambda: dl.rlhf(algorithm="gpro"), ValueError, "--algorithm must be one of ppo"),
        (lambda: dl.rlhf(algorithm=4), ValueError, "--algorithm int must be a function"),
        (lambda: dl.rlhf(algorithm="json:nosuch"), ValueError, "json has no algorithm nosuch"),
        (lambda: dl.rlhf(algorithm="nosuch:x"), ValueError, "--algorithm nosuch:x cannot be imp"),
        (lambda: dl.Algorithm(brevity, needs={"luck"}), ValueError, "needs of an algorithm are"),
        pytest.param(
            *(lambda: dl.plan("sfft"), ValueError, "stage must be one of sft, reward"),
            marks=of_the_whole,
        ),
        (lambda: dl.generate(None, ["a"], max_tokens=3), TypeError, "unknown option --max_tokens"),
        (lambda: dl.generate("a", ["b"], model_name_or_path="c"), TypeError, "of its own, too"),
        pytest.param(
            *(lambda: dl.evaluate("a", ROWS, data_path="c"), TypeError, "of its own, too"),
            marks=of_the_whole,
        ),
        (lambda: dl.generate("a", ["b"], output_path="c"), TypeError, "of the command alone"),
        (lambda: dl.Run(".").generate([None]), TypeError, "prompts[0] must be a text or a list of"),
        (lambda: dl.generate(None, {"prompt": "a"}), TypeError, "prompts must be a list of texts"),
        (lambda: dl.load(None), TypeError, "path must be a directory or hub name, got NoneType"),
        (lambda: dl.load("nosuch/run/here"), ValueError, "nosuch/run/here"),
        (lambda: dl.load("nosuch"), ValueError, "nosuch: its configuration cannot be loaded"),
        (lambda: dl.sft(data="python:data"), ValueError, "data is an object of a Python program"),
        (lambda: dl.sft(ROWS), TypeError, "got list; rows are the argument data"),
        (lambda: dl.sft(rewards=[brevity]), TypeError, "rewards is an argument of dl.rlhf"),
        (lambda: dl.rlhf(reward=brevity), TypeError, "did you mean rewards?"),
        (lambda: dl.rlhf(rewards="brevity"), ValueError, "give a function itself, not its name"),
        (
            lambda: dl.rlhf(data=ROWS, algorithm="grpo"),
            ValueError,
            "critic must name a reward model (the",
        ),
        (lambda: dl.sft(resume="nosuch"), ValueError, "resume nosuch must be latest, auto, a"),
        (
            lambda: dl.sft(data=[{"Prompt": "a", "completion": "b"}]),
            dl.RowError,
            "data[0]: row lacks 'prompt'; it has ['Prompt', 'completion'] "
            "(did you mean --columns prompt=Prompt?)",
        ),
        (lambda: dl.sft(data=HOLED), dl.RowError, "data[36]: `completion` is empty"),
    ],
)
def test_what_cannot_be_used_is_one_clear_exception(call, kind, words):
    with pytest.raises(kind) as raised:
        call()
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    if call.__code__.co_names[1] != "Algorithm":
        assert [each.name for each in raised.traceback][1:] == ["<lambda>", "call"]
        assert (raised.value.__cause__, raised.value.__suppress_context__) == (None, True)


def test_all_frames_of_an_error_are_kept_where_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("DSCHAT_LORA_TRACEBACK", "1")
    with pytest.raises(TypeError) as raised:
        dl.sft(lora_dimm=4)
    assert raised.traceback[-1].name == "options_in_python"


def test_ipython_shows_an_error_by_the_cell_alone(monkeypatch):
    show = SimpleNamespace(structured_traceback=format_exception)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(InteractiveTB=show))
    monkeypatch.setitem(sys.modules, "IPython", shell)

    def run_cell():
        try:
            return dl.Run(".").generate(4)
        except TypeError as error:
            return error._render_traceback_()

    (_, cell, message) = run_cell()
    assert "in run_cell" in cell
    assert message == "TypeError: prompts must be a list of texts or of messages, got 4\n"


def test_a_reward_that_fails_raises_its_error_after_the_iterations_before_are_saved(sft, tmp_path):
    calls = []

    def fragile(responses):
        calls.append(len(responses))
        if len(calls) > 3:
            raise OverflowError("too hot")
        return [0.0] * len(responses)

    options = {**ROLLOUTS, "max_steps": 8}
    with pytest.raises(OverflowError, match="too hot") as raised:
        dl.rlhf(sft, data=ROWS, rewards=fragile, output_dir=tmp_path / "run", **options)
    assert [each.name for each in raised.traceback][1:] == ["call", "fragile"]
    fragile_frame = raised.traceback[-1].frame
    assert "responses" in fragile_frame.f_locals  # which a notebook shows
    (how_to_go_on,) = raised.value.__notes__
    assert how_to_go_on.endswith(
        f'resume with: output_dir={str(tmp_path / "run")!r}, resume="latest"'
    )
    assert raised.value.__cause__ is None
    assert any((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.thorough
def test_many_runs_keep_the_memory_of_a_few(launcher, tmp_path):
    """Ten by hand: 523 MiB after the second, 524 after the tenth."""
    script = Path(__file__).with_name("many_runs.py")
    running = launcher.start([], tmp_path, script=script)
    assert running.wait(timeout=300) == [0], running.output()
    sizes, tensors = json.loads(running.out().splitlines()[-1])
    assert sizes[-1] / sizes[1] < 1.05
    assert len({*tensors}) == 1


SCRIPT = Path(__file__).with_name("launched.py")


@pytest.mark.thorough
def test_a_launched_script_has_the_losses_of_one_process(launcher, tmp_path):
    """All four stages, with data in memory; by DeepSpeed's launcher and torchrun in test-all."""
    found = []
    for ranks in (1, 2):
        running = launcher.start([], tmp_path, ranks=ranks, script=SCRIPT)
        assert running.wait(timeout=240) == [0] * ranks, running.output()
        found.append(json.loads(running.output().splitlines()[-1]))
    alone, together = found
    assert alone.keys() == {"sft", "reward", "dpo", "rlhf"}
    for stage, losses in alone.items():
        assert len(losses) == 2
        assert together[stage] == pytest.approx(losses, rel=1e-4, abs=1e-5), stage


@pytest.mark.skipif(os.environ.get("DSCHAT_LORA_TESTS") != "all", reason="make test-all")
@pytest.mark.parametrize(
    "command", [["deepspeed", "--num_gpus", "2"], ["torchrun", "--nproc_per_node", "2"]]
)
def test_launchers_start_the_same_script(command, tmp_path):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    program = str(Path(sys.executable).with_name(command[0]))
    ended = subprocess.run(
        [program, *command[1:], str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert '"rlhf": [' in ended.stdout


@of_the_whole
def test_the_stub_is_that_of_the_functions():
    """A public signature does not change unnoticed: python scripts/api_stub.py writes it anew."""
    written = runpy.run_path(str(ROOT / "scripts" / "api_stub.py"))
    assert written["STUB"].read_text(encoding="utf-8") == written["stub"]()


@of_the_whole
def test_public_names():
    assert {*dl.__all__} >= {
        *("sft", "reward", "dpo", "rlhf", "load", "generate", "evaluate", "merge", "audit"),
        *("plan", "tune", "Trainer", "Run", "__version__"),
    }
    for name in dl.__all__:
        assert getattr(dl, name) is not None
        assert name.startswith("__") or inspect.getdoc(getattr(dl, name))
    assert sorted(dl.__all__) == dir(dl)
    with pytest.raises(AttributeError, match="'stf'; did you mean sft"):
        dl.stf  # noqa: B018


def test_editors_see_every_option_with_its_default():
    parameters = inspect.signature(dl.sft).parameters
    assert parameters["lora_dim"].default is None
    assert parameters["lora_dim"].annotation == "int | None"
    assert "packing" in parameters
    assert "options" not in parameters
    assert "reward_weights" in inspect.signature(dl.rlhf).parameters


@pytest.mark.parametrize("stage", [dl.sft, dl.reward, dl.dpo, dl.rlhf])
def test_help_has_20_everyday_options_and_says_where_all_are(stage):
    text = pydoc.render_doc(stage, renderer=pydoc.plaintext)
    lines = text.partition("Everyday options:\n")[2].splitlines()
    shown = [line.strip().partition("=")[0] for line in lines[:20]]
    lora_dim, rank = ("actor_lora_dim" if stage is dl.rlhf else "lora_dim"), "LoRA rank"
    assert any(line.startswith(f"        {lora_dim}=None: {rank}") for line in lines[:20])
    assert lines[20].strip() == ""
    assert f"`print(dl.{stage.__name__}.options)`" in lines[21]
    assert f"    {lora_dim}=None: {rank}" in str(stage.options)
    assert all(f", {name}: " in text.splitlines()[2] for name in shown)
    assert "neftune_noise_alpha" not in text
