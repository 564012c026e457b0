"""Which checkpoint a run goes on from, and with which options, before anything heavy starts."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest

from dschat_lora.assets import BUNDLED_DATA
from dschat_lora.checkpoint.history import read_state, step_directory
from dschat_lora.checkpoint.manifest import write_manifest
from dschat_lora.data.digests import NOT_COMPARED
from dschat_lora.data.samples import SequenceSample, TokenSet
from dschat_lora.runtime.resume import (
    check_identity,
    options_to_keep,
    resumes_in_place,
    run_of,
    settle,
)
from helpers.step1 import ROOT, checked, parsed, refused, write_checkpoint, write_jsonl

__all__ = ["refused"]

IDENTITY = {
    "model": "aa", "tokenizer": "bb", "train_data": "cc", "eval_data": "dd",
    "dtype": "fp32", "adapter": "r 4, alpha 32", "packing": True, "rows": 40,
    "rows_per_step": 16,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_directory", "first_rows")


@pytest.fixture
def earlier(tmp_path):
    """``earlier(*argv, run=..., step=...)``: a checkpoint as a run of that command left it."""

    def make(*argv, run="out", step=5, world_size=1):
        config = checked(*argv)
        rows = config.batch.per_device_train_batch_size * world_size
        rows *= config.batch.gradient_accumulation_steps
        identity = IDENTITY | {"rows_per_step": rows}
        return write_checkpoint(tmp_path / run, config, identity, step=step)

    return make


def damage(directory):
    (directory / "state.json").write_text("{}")


def resolved(*argv):
    return settle(parsed(*argv), stage="sft")


def resumed(how, *argv):
    return resolved("--resume_from_checkpoint", how, *argv)


def no_resume(how, *argv):
    """The message of a resume that is refused."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        resumed(how, *argv)
    message = str(error.value)
    assert "\n" not in message
    return message


# ---------------------------------------------------------------------------- which checkpoint


def test_without_the_option_a_run_starts_afresh(earlier, capsys):
    earlier("--output_dir", "out")
    capsys.readouterr()
    config = resolved("--output_dir", "out")
    assert (config.checkpoint, config.rejected) == ("", ())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("how", ["latest", "auto", "out"])
def test_newest_checkpoint_is_gone_on_from(earlier, how, tmp_path, capsys):
    for step in (5, 20, 10):
        earlier(step=step)
    capsys.readouterr()
    config = resumed(how, *(["--output_dir", "out"] if how != "out" else []))
    assert config.checkpoint == str(step_directory(tmp_path / "out", 20))
    assert config.run.output_dir == "out"
    assert "output_dir" in config.given
    path = step_directory(tmp_path / "out", 20).relative_to(tmp_path)
    assert f"resuming from {path}, after step 20" in capsys.readouterr().out


def test_checkpoint_given_by_path_is_the_one(earlier, tmp_path):
    for step in (5, 20):
        earlier(step=step)
    config = resumed(step_directory(tmp_path / "out", 5), "--output_dir", "out")
    assert config.checkpoint == str(step_directory(tmp_path / "out", 5))
    assert resumes_in_place(config)


def test_path_may_be_relative_and_gives_the_directory_of_its_run(earlier, tmp_path):
    earlier()
    config = resumed("out/checkpoints/step-00000005")
    assert config.checkpoint == str(step_directory(tmp_path / "out", 5))
    assert config.run.output_dir == "out"
    assert resumes_in_place(config)


def test_home_is_understood_in_paths(earlier, tmp_path, monkeypatch):
    earlier()
    monkeypatch.setenv("HOME", str(tmp_path))
    for config in (
        resumed("~/out"),
        resumed("~/out/checkpoints/step-00000005"),
        resumed("latest", "--output_dir", "~/out"),
    ):
        assert config.checkpoint == str(step_directory(tmp_path / "out", 5))
        assert resumes_in_place(config)


@pytest.mark.parametrize("how", ["latest", "auto"])
def test_without_a_directory_the_last_default_one_is_looked_into(earlier, how, tmp_path):
    earlier(run="output/sft", step=50)
    earlier(run="output/sft-2", step=7)
    earlier(run="output/sft-4", step=9)  # not in a row with the others
    config = resumed(how)
    assert config.checkpoint == str(step_directory(tmp_path / "output/sft-2", 7))
    assert config.run.output_dir == "output/sft-2"


def test_checkpoint_of_another_directory_begins_a_run_of_its_own(earlier):
    earlier()
    config = resumed("out", "--output_dir", "fork")
    assert config.run.output_dir == "fork"
    assert not resumes_in_place(config)


def test_directory_by_another_name_is_the_same(earlier, tmp_path):
    earlier()
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("out")
    for name in ("link", "sub/../out", tmp_path / "out"):
        assert resumes_in_place(resumed("latest", "--output_dir", name))
        assert resumes_in_place(resumed("out", "--output_dir", name))


def test_directory_of_the_process_is_never_the_checkpoints(earlier):
    earlier("--output_dir", "somewhere/else")
    assert resumed("out").run.output_dir == "out"


def test_damaged_checkpoints_are_passed_over_by_name(earlier, tmp_path, capsys):
    for step in (5, 10, 20):
        earlier(step=step)
    damage(step_directory(tmp_path / "out", 20))
    (step_directory(tmp_path / "out", 10) / "manifest.json").unlink()
    capsys.readouterr()
    config = resumed("latest", "--output_dir", "out")
    assert config.checkpoint == str(step_directory(tmp_path / "out", 5))
    assert config.rejected == tuple(
        str(step_directory(tmp_path / "out", step).relative_to(tmp_path)) for step in (20, 10)
    )
    notes = [line for line in capsys.readouterr().out.splitlines() if "rejected" in line]
    assert len(notes) == 2
    assert notes[0].startswith("  note         checkpoint rejected: out/checkpoints/step-00000020/")
    assert notes[1].endswith("out/checkpoints/step-00000010/manifest.json is missing")


def test_checkpoint_given_by_path_is_not_replaced_by_another(earlier):
    earlier(step=5)
    damage(earlier(step=9))
    message = no_resume("out/checkpoints/step-00000009")
    assert message.startswith(
        "--resume_from_checkpoint out/checkpoints/step-00000009 cannot be used: "
        "out/checkpoints/step-00000009/state.json "
    )
    assert message.endswith("; use latest to resume from the newest valid checkpoint")


def test_no_sound_checkpoint_is_an_error_that_names_each(earlier):
    for step in (5, 9):
        damage(earlier(step=step))
    message = no_resume("latest", "--output_dir", "out")
    start = "--resume_from_checkpoint latest: no checkpoint in out is valid: "
    assert message.startswith(start + "out/checkpoints/step-00000009/state.json ")
    assert "; out/checkpoints/step-00000005/state.json " in message


def test_auto_starts_afresh_where_no_checkpoint_is_sound(earlier, capsys):
    damage(earlier())
    capsys.readouterr()
    config = resumed("auto", "--output_dir", "out")
    assert (config.checkpoint, config.rejected) == ("", ())
    out = capsys.readouterr().out
    assert "checkpoint rejected: out/checkpoints/step-00000005/state.json" in out
    assert "no checkpoint to resume from in out: starting from scratch" in out


@pytest.mark.parametrize("options", [[], ["--output_dir", "out"]])
def test_auto_starts_afresh_where_there_is_nothing(options, capsys):
    assert resumed("auto", *options).checkpoint == ""
    where = " in out" if options else ""
    assert (
        capsys.readouterr().out == f"no checkpoint to resume from{where}: starting from scratch\n"
    )


def test_copy_of_a_checkpoint_needs_a_directory_for_the_run(earlier, tmp_path):
    shutil.copytree(earlier(), tmp_path / "kept")
    assert run_of(tmp_path / "kept") is None
    message = no_resume("kept")
    assert message == "--resume_from_checkpoint kept is not part of a run; give an --output_dir"
    config = resumed("kept", "--output_dir", "new")
    assert config.checkpoint == str(tmp_path / "kept")
    assert not resumes_in_place(config)


@pytest.mark.parametrize("how", ["latest", "auto"])
def test_living_run_is_not_gone_on_with(earlier, how, tmp_path):
    earlier()
    code = (
        "from pathlib import Path; from dschat_lora.report.directory import open_alone\n"
        "file = open_alone(Path('out/metrics.jsonl')); print('open', flush=True); input()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as living:
        assert living.stdout.readline() == "open\n"
        message = no_resume(how, "--output_dir", "out")
        assert message.startswith("another run is writing to out; ")
        living.communicate("\n")
    assert resumed(how, "--output_dir", "out").checkpoint


# ---------------------------------------------------------------------------- which options


def test_options_of_the_checkpoint_are_taken_over(earlier, tmp_path):
    own = write_jsonl(tmp_path / "own.jsonl", [{"text": "a"}])
    earlier(
        *("--data_path", own, "--lora_dim", 8, "--lora_dropout", 0.1, "--no-packing"),
        *("--max_steps", 30, "--zero_stage", 2, "--seed", 7, "--target_modules", "q_proj", "fc1"),
    )
    config = resumed("out")
    assert config.data.data_path == (str(own),)
    assert (config.lora.lora_dim, config.lora.lora_dropout) == (8, 0.1)
    assert config.lora.target_modules == ("q_proj", "fc1")
    assert (config.data.packing, config.run.seed, config.optim.max_steps) == (False, 7, 30)
    assert config.parallel.zero_stage == 2
    assert {"data_path", "lora_dim", "packing", "zero_stage", "output_dir"} <= config.given
    assert "learning_rate" not in config.given


def test_an_option_of_the_checkpoint_that_no_installed_add_on_has_is_refused(earlier):
    checkpoint = earlier("--output_dir", "out")
    state = json.loads((checkpoint / "state.json").read_text())
    state["options"] |= {"brevity_words": 20, "of_an_older_version": 1}
    resume = ("--output_dir", "out", "--resume_from_checkpoint", "latest")
    for addons in ({}, {"addons": {"brevity_words": "brevity"}}):
        (checkpoint / "state.json").write_text(json.dumps(state | addons))
        write_manifest(checkpoint, kind="checkpoint")
        if not addons:
            assert resolved(*resume).checkpoint
    with pytest.raises(ValueError, match="made with --brevity_words 20 of the add-on brevity,"):
        resolved(*resume)


@pytest.mark.parametrize("value", [0, 60])
def test_an_option_of_the_checkpoint_that_is_gone_is_refused_where_it_did_something(earlier, value):
    checkpoint = earlier("--output_dir", "out")
    state = json.loads((checkpoint / "state.json").read_text())
    state["options"]["lr_probe"] = state["config"]["lr_probe"] = value
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint, kind="checkpoint")
    words = "was made with --lr_probe 60, an option that was removed in version 0.3.0"
    with pytest.raises(ValueError, match=words) if value else nullcontext():
        assert resumed("out").checkpoint


def test_options_of_one_process_are_not_taken_over(earlier):
    config = checked("--output_dir", "other", "--deepspeed")
    assert options_to_keep(config) == {}
    earlier("--output_dir", "other", "--deepspeed", "--dry_run")
    config = resumed("out")
    assert (config.run.output_dir, config.run.dry_run) == ("out", False)
    assert not config.parallel.deepspeed
    assert config.run.resume_from_checkpoint == "out"


def test_typed_option_wins_with_a_note(earlier, capsys):
    earlier("--max_steps", 30, "--zero_stage", 2)
    capsys.readouterr()
    config = resumed("out", "--max_steps", 60, "--zero_stage", 2, "--learning_rate", 1e-3)
    assert (config.optim.max_steps, config.optim.learning_rate) == (60, 1e-3)
    notes = [line for line in capsys.readouterr().out.splitlines() if "from here on" in line]
    assert notes == [
        "  note         --learning_rate 0.001 from here on, 5e-05 so far",
        "  note         --max_steps 60 from here on, 30 so far",
    ]


def test_output_directory_is_no_difference_worth_a_note(earlier, capsys):
    earlier("--output_dir", "out")
    capsys.readouterr()
    resumed("latest", "--output_dir", "./out")
    assert "note" not in capsys.readouterr().out


def test_options_that_the_state_depends_on_cannot_change_and_all_are_listed(earlier):
    earlier("--lora_dim", 8, "--seed", 7, "--target_modules", "q_proj", "fc1")
    message = no_resume(
        *("out", "--lora_dim", 4, "--seed", 8, "--target_modules", "q_proj", "--max_steps", 9)
    )
    assert message == (
        "--resume_from_checkpoint out/checkpoints/step-00000005: the run differs: "
        "--lora_dim was 8, now 4; --seed was 7, now 8; --target_modules was q_proj fc1, now q_proj"
    )


@pytest.mark.parametrize(
    "change",
    """
    lora_dim=5 lora_alpha=5 use_rslora lora_module_name=fc train_bias=all modules_to_save=fc
    no-only_optimize_lora add_eot_token eot_token=x max_seq_len=64 overlong=truncate bad_rows=skip
    train_on_prompt train_empty_think no-packing data_split=1,1,1 eval_ratio=0.2 seed=3
    """.split(),
)
def test_each_option_that_the_state_depends_on_is_fixed(earlier, change):
    earlier("--lora_dim", 8)
    name, _, value = change.partition("=")
    message = no_resume("out", f"--{name}", *([value] if value else []))
    option = name.removeprefix("no-")
    assert f"the run differs: --{option} was " in message


def test_same_value_typed_again_is_no_difference(earlier, tmp_path):
    earlier("--lora_dim", 8, "--seed", 7)
    assert resumed("out", "--lora_dim", 8, "--seed", 7).checkpoint
    # Also where the value was that of the bundled data.
    assert resumed("out", "--max_seq_len", 128, "--data_path", BUNDLED_DATA["train"]).checkpoint


def test_typed_option_does_away_with_the_one_it_stands_in_for(earlier):
    earlier("--lora_lr_multiplier", 2, "--lora_dim", 8)
    config = resumed("out", "--lora_learning_rate", 1e-3)
    assert config.optim.lora_lr_multiplier is None
    assert config.optim.lora_learning_rate == 1e-3
    assert config.lora.lora_dim == 8


def test_checkpoint_is_not_evaluated_in_the_place_of_a_model(earlier):
    earlier()
    assert "give an adapter with --model_name_or_path" in no_resume("out", "--num_train_epochs", 0)


def test_smaller_micro_batch_is_found_that_keeps_the_rows(earlier, monkeypatch):
    earlier("--per_device_train_batch_size", 8, "--gradient_accumulation_steps", 3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert shape(resumed("out")) == (6, 2)


# ---------------------------------------------------------------------------- rows of a step


def shape(config):
    return config.batch.per_device_train_batch_size, config.batch.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("world_size", "options", "expected"),
    [
        (1, [], (4, 4)),
        (2, [], (4, 2)),
        (4, [], (4, 1)),
        (8, [], (2, 1)),
        (16, [], (1, 1)),
        (1, ["--per_device_train_batch_size", 8], (8, 2)),
        (2, ["--per_device_train_batch_size", 8], (8, 1)),
        (2, ["--gradient_accumulation_steps", 2], (4, 2)),
        (2, ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 4], (2, 4)),
    ],
)
def test_a_step_keeps_its_rows_on_other_numbers_of_processes(
    earlier, monkeypatch, capsys, world_size, options, expected
):
    earlier("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 4)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    capsys.readouterr()
    config = resumed("out", *options)
    assert shape(config) == expected
    assert expected[0] * expected[1] * world_size == 16
    micro, steps = expected
    note = (
        f"  note         --per_device_train_batch_size {micro} --gradient_accumulation_steps "
        f"{steps}: a step keeps 16 rows"
    )
    assert (note in capsys.readouterr().out.splitlines()) == (expected != (4, 4))
    assert {"per_device_train_batch_size", "gradient_accumulation_steps"} <= config.given


def test_rows_of_several_processes_come_together_on_one(earlier):
    earlier("--per_device_train_batch_size", 4, world_size=4)
    config = resumed("out")
    assert shape(config) == (4, 4)
    assert "gradient_accumulation_steps" in config.given


@pytest.mark.parametrize(
    ("world_size", "options", "now"),
    [
        (3, [], (4, 1, 12)),
        (32, [], (1, 1, 32)),
        (1, ["--per_device_train_batch_size", 3], (3, 5, 15)),
        (1, ["--per_device_train_batch_size", 32], (32, 1, 32)),
        (2, ["--gradient_accumulation_steps", 4], (4, 4, 32)),
    ],
)
def test_rows_that_cannot_be_kept_are_refused(earlier, monkeypatch, world_size, options, now):
    earlier("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 4)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    micro, steps, rows = now
    assert no_resume("out", *options).endswith(
        f"the run differs: a step had 16 rows, now --per_device_train_batch_size {micro} x "
        f"--gradient_accumulation_steps {steps} x {world_size} processes is {rows}"
    )


def test_rows_and_options_that_differ_are_listed_together(earlier):
    earlier("--seed", 1)
    message = no_resume("out", "--seed", 2, "--per_device_train_batch_size", 3)
    assert "--seed was 1, now 2; a step had 16 rows, now " in message


# ---------------------------------------------------------------------------- identity


def test_run_of_the_same_identity_is_let_through(earlier):
    checkpoint = earlier()
    assert read_state(checkpoint)["identity"] == IDENTITY
    check_identity(checkpoint, IDENTITY)
    assert run_of(checkpoint).name == "out"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model", "the base model's weights (was aa, now other)"),
        ("tokenizer", "the tokenizer (was bb, now other)"),
        ("train_data", "the training data (was cc, now other)"),
        ("eval_data", "the evaluation data (was dd, now other)"),
        ("dtype", "--dtype (was fp32, now other)"),
        ("adapter", "the adapter (was r 4, alpha 32, now other)"),
        ("packing", "whether rows are packed (was True, now other)"),
        ("rows", "the number of rows after packing (was 40, now other)"),
        ("rows_per_step", "the rows of a step (was 16, now other)"),
    ],
)
def test_each_part_of_the_identity_counts(earlier, name, text):
    with pytest.raises(ValueError, match="the run differs") as error:
        check_identity(earlier(), IDENTITY | {name: "other"})
    hint = "; --accept_changed_data resumes anyway" * (name in ("train_data", "eval_data", "rows"))
    assert str(error.value).endswith(f"the run differs: {text}{hint}")


def test_every_difference_of_identity_is_listed(earlier):
    checkpoint = earlier()
    with pytest.raises(ValueError, match="the run differs") as error:
        check_identity(checkpoint, dict.fromkeys(IDENTITY) | {"dtype": "fp32"})
    message = str(error.value)
    assert message.startswith(f"--resume_from_checkpoint {checkpoint}: ")
    assert message.count("; ") == 7
    assert message.count("now None") == 8


def test_data_that_changed_are_refused_with_the_place_or_accepted_by_an_option(earlier, capsys):
    samples = [SequenceSample.of([n, n], [-100, n]) for n in range(70)]
    before, now = (TokenSet.of(each).identity for each in (samples, samples[:69]))
    checkpoint = earlier()
    state = json.loads((checkpoint / "state.json").read_text())
    state["identity"] |= {"train_data": before.digest.to_dict(), "rows": 41}
    (checkpoint / "state.json").write_text(json.dumps(state))
    current = IDENTITY | {"train_data": before, "eval_data": before, "rows": 41}
    words = f"the evaluation data {NOT_COMPARED}"
    with pytest.raises(ValueError, match="the run differs") as error:
        check_identity(checkpoint, current)
    assert str(error.value).endswith(f"differs: {words}; --accept_changed_data resumes anyway")
    current |= {"train_data": now, "rows": 40}
    with pytest.raises(
        ValueError, match=r"now 69; the first difference is in samples 65 to 70\); "
    ):
        check_identity(checkpoint, current)
    check_identity(checkpoint, current, accepts_changed_data=True)
    assert f"  note         accepted: {words}\n" in capsys.readouterr().out
    current |= {"tokenizer": "other"}
    with pytest.raises(ValueError, match=r"65 to 70\)$"):
        check_identity(checkpoint, {**current, "eval_data": "dd", "rows": 41})
    with pytest.raises(ValueError, match="the run differs") as error:
        check_identity(checkpoint, current, accepts_changed_data=True)
    assert str(error.value).endswith("differs: the tokenizer (was bb, now other)")


def test_what_the_run_has_none_of_differs_in_a_few_words(earlier):
    data = TokenSet.of([SequenceSample.of([n, n], [-100, n]) for n in range(70)]).identity
    checkpoint = earlier()
    state = json.loads((checkpoint / "state.json").read_text())
    state["identity"] |= {"text": data.digest.to_dict(), "deepspeed_processes": 2}
    state["identity"]["streams"] = {"epoch": ["seed"]}
    (checkpoint / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="the run differs") as error:
        check_identity(checkpoint, IDENTITY | {"streams": {"epoch": ["seed"]}})
    processes, text = str(error.value).split("differs: ")[1].split("; ")
    assert processes.endswith("(was 2, now None)")
    assert text == "the pretraining text (was 70 samples, now None)"


def test_changed_data_are_accepted_of_a_checkpoint_alone(earlier):
    with pytest.raises(ValueError, match="--accept_changed_data needs --resume_from"):
        resolved("--accept_changed_data")
    earlier()
    assert "accept_changed_data" not in options_to_keep(resumed("out", "--accept_changed_data"))


def test_weights_of_another_type_are_no_other_model(earlier):
    with pytest.raises(ValueError, match="the run differs") as error:
        check_identity(earlier(), IDENTITY | {"dtype": "bf16", "model": "other"})
    assert str(error.value).endswith("differs: --dtype (was fp32, now bf16)")


def test_checkpoint_beyond_the_end_of_the_run_is_refused(earlier):
    checkpoint = earlier(step=5)
    for num_steps in (0, 5, 6):
        check_identity(checkpoint, IDENTITY, num_steps=num_steps)
    with pytest.raises(ValueError, match="is after step 5, and --max_steps or --num_train_epochs"):
        check_identity(checkpoint, IDENTITY, num_steps=4)


# ---------------------------------------------------------------------------- the whole check


def test_run_that_goes_on_in_its_directory_is_let_in(earlier):
    earlier("--lora_dim", 4)
    config = checked("--output_dir", "out", "--resume_from_checkpoint", "latest")
    assert config.lora.lora_dim == 4
    assert config.checkpoint


def test_occupied_directory_names_the_ways_out_in_a_sentence(earlier, refused, tmp_path):
    checkpoint = earlier()
    begin = "--output_dir out holds an earlier run"
    assert refused("--output_dir", "out") == (
        f"{begin} (metrics.jsonl, checkpoints, run.json); choose another directory, resume it "
        "with --resume_from_checkpoint latest or delete that run with --overwrite_output_dir"
    )
    shutil.rmtree(checkpoint)
    assert refused("--output_dir", "out") == (
        f"{begin} (metrics.jsonl, checkpoints, run.json); choose another directory or delete that "
        "run with --overwrite_output_dir"
    )
    (tmp_path / "out" / "run.json").unlink()
    assert refused("--output_dir", "out", "--overwrite_output_dir") == (
        "--output_dir out holds metrics.jsonl, checkpoints but no run.json, so no run wrote it; "
        "--overwrite_output_dir only deletes runs; choose another directory"
    )


def test_checkpoint_of_another_run_does_not_let_into_an_occupied_directory(earlier):
    earlier()
    earlier(run="other")
    with pytest.raises(ValueError, match="--output_dir other holds an earlier run"):
        checked("--output_dir", "other", "--resume_from_checkpoint", "out")


def test_going_on_and_starting_over_exclude_each_other(earlier, refused):
    earlier()
    message = refused(
        "--output_dir", "out", "--resume_from_checkpoint", "auto", "--overwrite_output_dir"
    )
    assert message == (
        "--resume_from_checkpoint resumes a run that --overwrite_output_dir would delete; give one"
    )


def test_auto_takes_the_directory_of_a_run_that_came_to_nothing(earlier, tmp_path):
    damage(earlier())
    options = ["--output_dir", "out", "--resume_from_checkpoint", "auto"]
    assert checked(*options).checkpoint == ""
    (tmp_path / "out" / "adapter").mkdir()
    with pytest.raises(ValueError, match="holds an earlier run"):
        checked(*options)


def test_other_ranks_wait_for_the_first_ones_word(earlier, monkeypatch, capsys):
    earlier("--lora_dim", 8)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    capsys.readouterr()
    config = checked("--output_dir", "out", "--resume_from_checkpoint", "latest", "--lora_dim", 4)
    assert config.checkpoint is None
    assert config.lora.lora_dim == 4
    assert capsys.readouterr().out == ""
