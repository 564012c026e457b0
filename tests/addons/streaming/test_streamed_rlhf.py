"""Step 3 with data that is read while training: the run of prepared data, and mixtures."""

import gzip
import json
from collections import Counter
from functools import cache
from unittest import mock

import pytest

from dschat_lora.addons.streaming.loader import StreamLoader
from dschat_lora.config.options import parse_config
from dschat_lora.data.sources import StreamError
from dschat_lora.rl.loop.train import run_rlhf
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.config import RlhfConfig
from helpers.addons import of_the_whole
from helpers.ranks import RanksFailedError
from helpers.rlhf_course import save_family, train_rlhf, write_texts
from helpers.spread import ALL
from helpers.step1 import metrics, write_jsonl

pytestmark = pytest.mark.stage

# Iterations of four prompts, two steps each.
COMMON = """
    --num_generations 2 --per_device_generation_batch_size 8 --generation_batches 1 --eval_prompts 0
    --per_device_training_batch_size 4 --max_prompt_seq_len 14 --max_answer_seq_len 4
    --eval_ratio 0 --num_train_epochs 9 --save_interval 0 --save_minutes 0 --log_rollouts 99
    --preprocessing_num_workers 1
""".split()
REWARDED = ["--algorithm", "grpo", "--reward_function", "helpers.rlhf_course:vowels"]
SIZES = {"a": 12, "b": 6}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with a tiny actor and two files of prompts, each of letters of its own."""
    home = tmp_path_factory.mktemp("streamed")
    for name, size in SIZES.items():
        rows = [{"prompt": name * (1 + n), "completion": "ok" * (1 + n % 3)} for n in range(size)]
        write_jsonl(home / f"{name}.jsonl", rows)
    write_texts(home / "texts.jsonl", 11)
    return home


@pytest.fixture(scope="module")
def run(home, ranks):
    """``run(*options)``: the directory of a run, and its lines of metrics by kind."""
    models = save_family("opt", home / "opt", layers=1)

    @cache
    def call(*options, by="helpers.rlhf_course:train_rlhf"):
        out = home / str(len(list(home.iterdir())))
        argv = [*COMMON, "--actor_model_name_or_path", models["actor"], "--output_dir", out]
        argv += [models["base"] if each == "BASE" else each for each in options]
        (report,) = ranks(1).run(by, argv=list(map(str, argv)))
        lines = json.loads(report["lines"])
        return out, [line for line in lines if line["kind"] == "train"]

    return call


def figures(lines):
    """What depends on nothing but the data and the options."""
    names = ("step", "iteration", "loss", "text_loss", "grad_norm", "reward", "samples", "tokens")
    return [{name: line[name] for name in names} for line in lines]


def weights(out):
    return (out / "actor/adapter/adapter_model.safetensors").read_bytes()


def rollouts(out):
    """Of each iteration, (letters of a prompt, tokens of its response) of every response."""
    found = {}
    with gzip.open(out / "rollouts.jsonl.gz", "rt") as file:
        for row in map(json.loads, file):
            own = found.setdefault(row["iteration"], [])
            own.append((row["prompt"].removeprefix("</s>"), row["length"]))
    return [found[number] for number in sorted(found)]


def assert_counted(out, lines):
    """Responses and tokens of each source are those whose prompts have its letter."""
    for line, drawn in zip(lines, rollouts(out), strict=True):
        for name in SIZES:
            own = [len(prompt) + length for prompt, length in drawn if prompt[0] == name]
            assert line[f"samples/{name}.jsonl"] == len(own)
            assert line[f"tokens/{name}.jsonl"] == sum(own)
        assert line["tokens"] == line["tokens/a.jsonl"] + line["tokens/b.jsonl"]


@pytest.mark.parametrize("streaming", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_metrics_count_responses_tokens_and_epochs_of_each_source(run, home, streaming):
    paths = [home / "a.jsonl:1", home / "b.jsonl:3"]
    options = ["--streaming", "--shuffle_buffer_size", 4] if streaming else []
    out, lines = run(*REWARDED, "--data_path", *paths, "--max_steps", 18, *options)
    assert_counted(out, lines)
    for line in lines:
        # Of prepared files by the epochs of all, a part of whose 18 rows each share is.
        if not streaming:
            assert line["epochs/a.jsonl"] == pytest.approx(line["epoch"] * 4.5 / 12)
            assert line["epochs/b.jsonl"] == pytest.approx(line["epoch"] * 13.5 / 6)
    if streaming:
        assert [sum(line[f"samples/{n}.jsonl"] for line in lines) for n in SIZES] == [18, 54]
        assert lines[3]["epochs/b.jsonl"] == 2
        assert all(line["epoch"] == line["epochs/a.jsonl"] < 0.75 for line in lines)


def test_sources_that_were_read_often_enough_end_a_run(run, home):
    paths = [home / "a.jsonl:1", home / "b.jsonl:3"]
    options = ["--streaming", "--shuffle_buffer_size", 5, "--max_repeats", 1, 2]
    out, lines = run(*REWARDED, "--data_path", *paths, "--max_steps", 99, *options)
    seen = Counter(prompt for drawn in rollouts(out) for prompt, _ in drawn[::2])
    assert seen == {"a" * (1 + n): 1 for n in range(12)} | {"b" * (1 + n): 2 for n in range(6)}
    assert [line["updates"] for line in lines] == [2] * 6
    assert [line["iteration"] for line in lines] == list(range(1, 7))
    assert json.loads((out / "run.json").read_text())["status"] == "finished"
    assert (out / "actor/adapter/adapter_model.safetensors").is_file()


def test_a_run_that_would_use_rows_too_often_is_refused_before_it_trains(run, home):
    paths = [home / "a.jsonl:1", home / "b.jsonl:3"]
    with pytest.raises(RanksFailedError) as caught:
        run(*REWARDED, "--data_path", *paths, "--max_steps", 18, "--max_repeats", 5, by=PLANNED)
    # 2.25 times in each of two epochs.
    assert "--max_repeats 5: the run would use rows of b.jsonl 6 times" in str(caught.value)


PLANNED, LOST = "test_streamed_rlhf:planned", "test_streamed_rlhf:lost"


def planned(argv):
    """On a rank: a dry run."""
    group = [mock.patch(f"dschat_lora.runtime.run.{n}") for n in ("init_distributed", "shutdown")]
    with group[0], group[1]:
        run_rlhf(check_rlhf(parse_config(RlhfConfig, [*argv, "--dry_run"])))


# A pass of 18 prompts ends in an iteration of two, one of eleven texts in a step of three.
BESIDE = """
    --algorithm distill --teacher_model_name_or_path BASE --distill_loss jsd --on_policy_share 0.6
    --unsup_coef 0.5 --actor_lora_learning_rate 5e-3 --max_steps 14
""".split()


@pytest.fixture(scope="module")
def beside(run, home):
    """``beside(*options)``: a run that learns from answers of the data and from text, too."""

    def call(*options, shares=("", ""), **by):
        paths = [f"{home}/{name}.jsonl{share}" for name, share in zip(SIZES, shares, strict=True)]
        text = ["--unsupervised_dataset_name", home / "texts.jsonl"]
        return run("--data_path", *paths, *text, *BESIDE, *options, **by)

    return call


@of_the_whole
def test_answers_and_text_are_those_of_prepared_data_where_a_block_holds_all(beside):
    prepared, expected = beside()
    streamed, lines = beside("--streaming")
    assert figures(lines) == figures(expected)
    assert weights(streamed) == weights(prepared)
    assert len({line["text_loss"] for line in lines}) == len(lines) > 5


@of_the_whole
def test_answers_and_text_go_on_where_they_were(beside):
    small = ["--streaming", "--shuffle_buffer_size", 5, "--save_interval", 1]
    whole, expected = beside(*small, "--save_total_limit", 0, shares=(":1", ":3"))
    assert_counted(whole, expected)
    # Of eight responses three are answers, on average.
    state = json.loads((whole / "checkpoints/step-00000002/state.json").read_text())["parts"]
    assert [state[name]["used"] for name in ("stream", "answers")] == [4, 3]
    # Two steps of four texts each end in the second block of five.
    assert (state["pretraining"]["step"], state["pretraining"]["stream"]["used"]) == (2, 3)
    for step in (4, 10) if ALL else (10,):
        last = whole / f"checkpoints/step-{step:08}"
        resumed, lines = beside(*small, "--resume_from_checkpoint", last, shares=(":1", ":3"))
        assert figures(lines) == figures(expected)
        # The lines of the steps before are taken over.
        old = [line["step"] <= step for line in expected]
        assert [a["time"] == b["time"] for a, b in zip(lines, expected, strict=True)] == old
        assert weights(resumed) == weights(whole)


@of_the_whole
@pytest.mark.thorough
def test_text_that_is_lost_ends_a_run_between_two_iterations(beside):
    small = ["--streaming", "--shuffle_buffer_size", 5]
    whole, _ = beside(*small, "--save_interval", 1, "--save_total_limit", 0, shares=(":1", ":3"))
    lost, lines = beside(*small, shares=(":1", ":3"), by=LOST)
    assert [line["step"] for line in lines] == [2, 4]
    (last,) = lost.glob("checkpoints/step-*")
    assert last.name == "step-00000004"
    resumed, _ = beside(*small, "--resume_from_checkpoint", last, shares=(":1", ":3"))
    assert weights(resumed) == weights(whole)


def lost(argv):
    """On a rank: a run whose text cannot be read for the second step of its third iteration."""
    honest, steps = StreamLoader._window, iter(range(5))

    def window(self, *args):
        if next(steps, None) is None:
            raise StreamError("lost")
        return honest(self, *args)

    with mock.patch.object(StreamLoader, "_window", window), pytest.raises(StreamError):
        train_rlhf(argv)
    return {"lines": json.dumps(metrics(argv[argv.index("--output_dir") + 1]))}


@of_the_whole
@pytest.mark.thorough
def test_answers_are_read_as_often_as_prompts_need_them(beside):
    _, lines = beside("--streaming", "--max_repeats", 1, "--on_policy_share", 0)
    # Of 18 prompts, 36 answers.
    assert [line["samples"] for line in lines] == [8, 8, 8, 8, 4]
