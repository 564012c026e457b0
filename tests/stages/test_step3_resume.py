"""Step 3 that is interrupted and goes on: the same run, bit for bit."""

import json
import random
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dschat_lora.config.addons import installed
from helpers.launcher import ROOT, STEP1, undisturbed_runs
from helpers.rlhf_course import save_family, write_prompts, write_texts
from helpers.spread import ALL
from helpers.step1 import metrics
from stages.test_resume_command import (
    RESUME,
    TIMES,
    files_of,
    last_step,
    lines_of,
    names,
    record,
    state_of,
    wait_for_steps,
)

pytestmark = pytest.mark.stage

STEP3 = ROOT / "training" / "step3_rlhf" / "main.py"
# Twelve prompts make three iterations of four steps an epoch; the last iteration is cut short.
STEPS, ITERATIONS = 14, 4
# Where ZeRO shards, an epoch is not ended.
FEWER = 10
# The interval of evaluations ends within iterations, that of checkpoints within and at their end.
COMMON = f"""
    --data_path prompts.jsonl --eval_data_path held.jsonl --eval_prompts 3 --eval_interval 7
    --max_prompt_seq_len 14 --max_answer_seq_len 4 --num_train_epochs 9 --max_steps {STEPS}
    --actor_lora_learning_rate 5e-3 --critic_lora_learning_rate 5e-3 --critic_learning_rate 1e-3
    --ppo_epochs 2 --num_generations 2 --adaptive_kl_target 0.5 --kl_horizon 40
    --reward_scaling running --enable_ema --ema_decay 0.8
    --unsupervised_dataset_name texts.jsonl --unsup_coef 0.3
    --save_interval 3 --save_total_limit 0 --sample_generations 1
    --output_dir out --resume_from_checkpoint auto
""".split()
STREAM = "--streaming --shuffle_buffer_size 5 --preprocessing_num_workers 1"
if "streaming" not in installed():
    STREAM = ""
# name: (ranks, reward model, options)
RUNS = {
    "1 rank": (1, "reward", ""),
    "1 rank, ZeRO 3": (
        1,
        "reward",
        f"--zero_stage 3 --max_steps {FEWER} --reward_scaling initial --critic_warmup_iterations 2",
    ),
    # A buffer holds a little more than an iteration.
    "2 ranks": (2, "reward", f"--zero_stage 2 --max_steps {FEWER} {STREAM}"),
    "2 ranks, ZeRO 3": (2, "reward", f"--zero_stage 3 --max_steps {FEWER}"),
    "every weight of the critic": (1, "whole", "--actor_zero_stage 0 --critic_zero_stage 2"),
}
TERM, KILL = signal.SIGTERM, signal.SIGKILL
SHORT = [("1 rank", TERM), ("2 ranks", KILL)]
POINTS = [(name, number) for name in RUNS for number in (TERM, KILL)] if ALL else SHORT
ROLES = ("actor", "critic", "actor_ema")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Paths of a tiny actor and of reward models, of one layer."""
    return save_family("opt", tmp_path_factory.mktemp("models"), layers=1)


@pytest.fixture(scope="module")
def start(launcher, models, tmp_path_factory):
    """``start(name, home, *argv)``: (its directory, the run of this name on its way there)."""

    def call(name, home=None, *argv, ranks=None, sizes=True):
        usual, critic, options = RUNS[name]
        if home is None:
            home = tmp_path_factory.mktemp("run")
            write_prompts(home / "prompts.jsonl", 12)
            write_prompts(home / "held.jsonl", 3, seed=1)
            write_texts(home / "texts.jsonl", 7)
        line = [
            *["--actor_model_name_or_path", models["actor"]],
            *["--critic_model_name_or_path", models[critic], *COMMON],
            *(sizes_of(usual) if sizes else []),
            *[*options.split(), *argv],
        ]
        return home, launcher.start(line, home, ranks=ranks or usual, script=STEP3)

    return call


def sizes_of(ranks):
    return [
        *["--per_device_generation_batch_size", 4 // ranks, "--generation_batches", 2],
        *["--per_device_training_batch_size", 2 // ranks, "--gradient_accumulation_steps", 2],
    ]


@pytest.fixture(scope="module")
def undisturbed(start):
    """``undisturbed(name)``: where the run of this name wrote, without a pause."""
    return undisturbed_runs(start)


def progress_of(checkpoint):
    """What a checkpoint says but for times and options."""
    state = state_of(checkpoint)
    state["parts"]["progress"].pop("seconds")
    return state


def weights_of(directory):
    """Bytes of every file of tensors."""
    return {name: data for name, data in files_of(directory).items() if name.endswith("tensors")}


def lines_but_times(out):
    """``metrics.jsonl`` without what depends on time, as in :func:`lines_of`."""
    return [
        {k: v for k, v in line.items() if not k.endswith(("_seconds", "_tflops_per_device"))}
        for line in lines_of(out)
    ]


def assert_same_run(found, expected):
    """The same metrics, evaluations, last state and files."""
    assert lines_but_times(found) == lines_but_times(expected)
    last = f"checkpoints/{names(expected)[-1]}"
    assert names(expected)[-1] == f"step-{last_step(expected):08d}"
    assert progress_of(found / last) == progress_of(expected / last)
    for part in (last, *ROLES):
        assert weights_of(found / part) == weights_of(expected / part)
        assert weights_of(found / part)
    for name in ("results", "answers"):
        assert record(found)[name] == record(expected)[name]
    assert record(found)["status"] == "finished"


def test_the_run_takes_all_its_parts_along(undisturbed):
    """What a resumed run has to restore is there, and changes on the way."""
    out = undisturbed("1 rank")
    trains = metrics(out, "train")
    assert [line["iteration"] for line in trains] == list(range(1, ITERATIONS + 1))
    assert [line["updates"] for line in trains] == [4] * (ITERATIONS - 1) + [2]
    assert len({line["kl_coef"] for line in trains}) == ITERATIONS
    assert all(line["scaled_reward"] != line["reward"] for line in trains)
    assert len({line["text_loss"] for line in trains}) == ITERATIONS
    first, last = (load_file(out / role / "adapter" / WEIGHTS) for role in ("actor", "actor_ema"))
    assert any((first[key] - last[key]).abs().max() > 1e-4 for key in first)


WEIGHTS = "adapter_model.safetensors"


def test_intervals_that_end_within_iterations_are_kept(undisturbed):
    out = undisturbed("1 rank")
    # an epoch ends every 12 steps, the interval of evaluations every 7, iterations every 4
    assert [line["step"] for line in metrics(out, "eval")] == [0, 8, 12, 14]
    saved = [f"step-{step:08d}" for step in (4, 8, 12, 14)]
    assert names(out) == saved


@pytest.mark.parametrize(
    ("name", "number"), POINTS, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_interrupted_and_resumed_equals_uninterrupted(name, number, start, undisturbed):
    whole = undisturbed(name)
    home, running = start(name)
    # A killed run has a checkpoint to go on from once it has two iterations.
    some = 2 if number == KILL else random.Random(f"{name} {number}").randint(1, 2)
    wait_for_steps(running, home / "out", some)
    running.signal(number)
    codes = running.wait()
    assert set(codes) == {143 if number == TERM else -KILL}, running.output()
    left = names(home / "out") if (home / "out" / "checkpoints").is_dir() else []
    kept = [name for name in left if name.startswith("step-")]
    assert not (home / "out" / "actor").exists()

    _, running = start(name, home)
    assert not any(running.wait()), running.output()
    begun = f"resuming from out/checkpoints/{kept[-1]}" if kept else "starting from scratch"
    assert begun in running.out()
    assert_same_run(home / "out", whole)


def test_every_run_is_interrupted_in_a_long_test():
    assert {name for name, _ in SHORT} <= RUNS.keys()
    assert TIMES.fullmatch("step_seconds")


# ---------------------------------------------------------------------------- another shape


@pytest.fixture
def copy_of(tmp_path, undisturbed):
    """``copy_of(name, step)``: a run of this name that ended after a step, on its own."""

    def copy(name, step=STEPS):
        whole = undisturbed(name)
        shutil.copytree(whole, tmp_path / "out", symlinks=True)
        for data in ("prompts.jsonl", "held.jsonl", "texts.jsonl"):
            shutil.copy(whole.parent / data, tmp_path / data)
        for each in names(tmp_path / "out"):
            if int(each.removeprefix("step-")) > step:
                shutil.rmtree(tmp_path / "out" / "checkpoints" / each)
        return tmp_path / "out"

    return copy


@pytest.mark.thorough
def test_resumed_where_no_evaluation_is_due_it_has_none(start, copy_of, undisturbed):
    out = copy_of("1 rank", step=4)
    _, running = start("1 rank", out.parent)
    assert not any(running.wait()), running.output()
    assert "resuming from out/checkpoints/step-00000004" in running.out()
    assert_same_run(out, undisturbed("1 rank"))


@pytest.mark.parametrize(("name", "ranks"), [("1 rank", 2), *[("2 ranks, ZeRO 3", 1)] * ALL])
def test_other_number_of_processes_keeps_responses_and_rows(
    start, copy_of, undisturbed, name, ranks
):
    out = copy_of(name, step=8)
    decoded = ("--max_num_seqs", "4")  # of which nothing depends either
    _, running = start(name, out.parent, *decoded, ranks=ranks, sizes=False)
    assert not any(running.wait()), running.output()
    assert "--max_num_seqs 4 from here on, auto so far" in running.out()
    assert "a step keeps 4 rows" in running.out()
    assert "an iteration keeps 8 rows" in running.out()
    trains, expected = (metrics(each, "train") for each in (out, undisturbed(name)))
    for ours, theirs in zip(trains, expected, strict=True):
        for figure in ("step", "iteration", "samples", "tokens", "supervised_tokens", "updates"):
            assert ours[figure] == theirs[figure]
        for figure in ("reward", "kl", "policy_loss", "value_loss", "text_loss", "grad_norm"):
            assert ours[figure] == pytest.approx(theirs[figure], abs=1e-5, rel=1e-4), figure
        assert ours["kl_coef"] == pytest.approx(theirs["kl_coef"], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--num_generations 4", "--num_generations was 2, now 4"),
        ("--ppo_epochs 3", "--ppo_epochs was 2, now 3"),
        ("--no-enable_ema", "--enable_ema was True, now False"),
        ("--reward_scaling none", "--reward_scaling was running, now none"),
        ("--generation_batches 4", "an iteration had 8 rows"),
        ("--gradient_accumulation_steps 1", "a step had 4 rows"),
    ],
)
def test_another_run_is_refused_in_one_line(start, copy_of, change, message):
    out = copy_of("1 rank")
    before = files_of(out)
    _, running = start("1 rank", out.parent, *change.split())
    assert running.wait() == [2], running.output()
    assert running.err().startswith("error: --resume_from_checkpoint ")
    assert f"the run differs: {message}" in running.err()
    assert running.err().count("\n") == 1
    assert files_of(out) == before


def test_other_data_is_refused_in_one_line(start, copy_of):
    out = copy_of("1 rank")
    write_texts(out.parent / "texts.jsonl", 8)
    write_prompts(out.parent / "held.jsonl", 3, seed=2)
    _, running = start("1 rank", out.parent)
    assert running.wait() == [2], running.output()
    assert running.err().count("\n") == 1
    assert "the run differs: the evaluation data (was " in running.err()
    assert "the pretraining text (was " in running.err()


def test_finished_run_goes_on_with_more_steps(start, copy_of, undisturbed):
    out = copy_of("1 rank")
    before = lines_but_times(out)
    _, running = start("1 rank", out.parent, "--max_steps", STEPS + 4)
    assert not any(running.wait()), running.output()
    assert lines_but_times(out)[: len(before)] == before
    assert last_step(out) > STEPS


def test_checkpoint_of_another_stage_is_refused(launcher, start, copy_of, tmp_path):
    out = copy_of("1 rank")
    argv = ["--data_path", "rows.jsonl", "--eval_ratio", 0, "--max_steps", 1, "--eval_iters", 0]
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "abc", "completion": " de"}) + "\n", encoding="utf-8"
    )
    running = launcher.start([*argv, "--output_dir", "sft"], tmp_path)
    assert running.wait() == [0], running.output()
    checkpoint = Path("sft") / "checkpoints" / "step-00000001"
    _, running = start("1 rank", tmp_path, "--resume_from_checkpoint", checkpoint)
    assert running.wait() == [2], running.output()
    assert running.err() == (
        f"error: --resume_from_checkpoint {checkpoint} belongs to a run of the stage sft, not "
        "rlhf; use the command that wrote it\n"
    )
    running = launcher.start([*argv, *RESUME, "latest"], out.parent, script=STEP1)
    assert running.wait() == [2], running.output()
    assert "belongs to a run of the stage rlhf, not sft" in running.err()
    assert running.err().count("\n") == 1
