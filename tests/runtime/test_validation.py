"""What is checked, filled in and refused before anything heavy is imported."""

import inspect
import json

import pytest

from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.config.options import parse_config
from dschat_lora.rl.loop import validation as rlhf
from dschat_lora.rl.options import inputs as rlhf_inputs
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.checks import apply_checks
from helpers.addons import of_addon
from helpers.step1 import ROOT, checked, write_adapter_config, write_jsonl

CONFIGS = ROOT / "configs" / "ds"


pytestmark = pytest.mark.usefixtures("own_directory", "first_rows")


@pytest.fixture
def adapter(tmp_path):
    """An adapter of rank 4 and alpha 32 on the bundled model."""
    return write_adapter_config(tmp_path / "earlier" / "adapter")


def rlhf_checked(*argv):
    function = ("--reward_function", "helpers.rlhf_course:vowels", "--algorithm", "ppo")
    return rlhf.check_rlhf(parse_config(RlhfConfig, [*function, *map(str, argv)]))


def json_file(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


# ---------------------------------------------------------------------------- defaults


def test_without_data_the_bundled_rows_are_used_with_a_length_that_fits_them():
    data = checked().data
    assert data.data_path == (str(BUNDLED_DATA["train"]),)
    assert data.eval_data_path == (str(BUNDLED_DATA["eval"]),)
    assert data.max_seq_len == 128


def test_users_length_and_held_out_rows_go_before_the_bundled_ones(tmp_path):
    own = write_jsonl(tmp_path / "own.jsonl", [{"text": "a"}])
    data = checked("--max_seq_len", 64, "--eval_data_path", own).data
    assert (data.max_seq_len, data.eval_data_path) == (64, (str(own),))


def test_users_data_is_not_mixed_with_the_bundled_rows(tmp_path):
    own = write_jsonl(tmp_path / "own.jsonl", [{"text": "a"}])
    data = checked("--data_path", own).data
    assert (data.data_path, data.eval_data_path, data.max_seq_len) == ((str(own),), (), 512)
    assert checked("--sft_only_data_path", own).data.data_path == ()


def test_first_line_says_what_is_trained_on_what(tmp_path, capsys):
    checked()
    assert capsys.readouterr().out == "model: the bundled tiny model; data: the bundled data\n"
    own = write_jsonl(tmp_path / "own.jsonl", [{"text": "a"}])
    checked("--model_name_or_path", "some/model", "--data_path", own)
    assert capsys.readouterr().out == f"model: some/model; data: {own}\n"


def test_other_ranks_say_nothing(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    checked()
    assert capsys.readouterr() == ("", "")


# ---------------------------------------------------------------------------- adapters


def test_adapter_is_continued_with_its_own_settings(adapter):
    lora = checked("--model_name_or_path", adapter).lora
    assert (lora.lora_dim, lora.lora_alpha, lora.use_rslora) == (4, 32.0, False)


def test_output_directory_of_a_stage_stands_for_its_adapter(adapter):
    assert checked("--model_name_or_path", adapter.parent).lora.lora_dim == 4


def test_equal_rank_continues_the_adapter(adapter):
    assert checked("--model_name_or_path", adapter, "--lora_dim", 4).lora.lora_dim == 4


# ---------------------------------------------------------------------------- contradictions


@pytest.mark.parametrize("name", ["expert_lora_alpha", "expert_learning_rate"])
def test_options_of_experts_are_named_as_the_role_has_them(name):
    with pytest.raises(ValueError, match=f"--actor_{name} needs --actor_lora_dim > 0"):
        rlhf_checked("--actor_lora_dim", 0, f"--actor_{name}", 1)
    frozen = ("--critic_lora_dim", 4, "--critic_expert_lora_dim", 0, f"--critic_{name}", 1)
    with pytest.raises(ValueError, match=f"--critic_{name} is for .* --critic_expert_lora_dim 0"):
        rlhf_checked(*frozen)


def test_deepspeed_file_settles_what_no_option_does():
    config = checked("--deepspeed_config", CONFIGS / "zero3_offload.json")
    assert (config.parallel.zero_stage, config.parallel.offload) == (3, True)
    assert checked("--deepspeed_config", CONFIGS / "bf16.json").model.dtype == "bf16"


def test_total_batch_counts_every_process(tmp_path, monkeypatch):
    path = json_file(tmp_path / "ds.json", {"train_batch_size": 32})
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert checked("--deepspeed_config", path).batch.per_device_train_batch_size == 16
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="sets train_batch_size to 32, but .* 3 processes is 48"):
        checked("--deepspeed_config", path)


# ---------------------------------------------------------------------------- lengths


def test_length_beyond_the_models_positions_is_refused():
    limit = json.loads((BUNDLED_MODEL / "config.json").read_text())["max_position_embeddings"]
    assert checked("--max_seq_len", limit).data.max_seq_len == limit
    with pytest.raises(
        ValueError, match=f"--max_seq_len is {limit + 1}, but the model has {limit}"
    ):
        checked("--max_seq_len", limit + 1)


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_default_length_follows_a_shorter_model(tmp_path, name):
    own = write_jsonl(tmp_path / "own.jsonl", [{"text": "a"}])
    model = tmp_path / "model"
    model.mkdir()
    json_file(model / "config.json", {name: 40})
    argv = ["--model_name_or_path", model, "--data_path", own]
    assert checked(*argv).data.max_seq_len == 40
    with pytest.raises(ValueError, match="--max_seq_len is 41, but the model has 40"):
        checked(*argv, "--max_seq_len", 41)


@pytest.mark.parametrize("content", ["{", "[]", '{"max_position_embeddings": "512"}'])
def test_damaged_model_configuration_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"--model_name_or_path.*config.json"):
        checked("--model_name_or_path", tmp_path)


# ---------------------------------------------------------------------------- output directory


@pytest.mark.parametrize("left", ["metrics.jsonl", "adapter", "model", "checkpoints"])
def test_directory_of_an_earlier_run_is_refused_and_kept(tmp_path, left):
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_text("{}")
    (out / left).write_text("{}") if left == "metrics.jsonl" else (out / left).mkdir()
    with pytest.raises(ValueError, match=f"{left}.*--overwrite_output_dir"):
        checked("--output_dir", out)
    assert checked("--output_dir", out, "--overwrite_output_dir").run.output_dir == str(out)
    assert (out / left).exists()


def test_directory_of_a_run_that_failed_before_its_first_result_is_taken(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    checked("--output_dir", tmp_path)


def test_directory_with_other_things_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    checked("--output_dir", tmp_path / "out")
    checked("--output_dir", tmp_path / "new" / "deep")


def test_home_directory_is_understood_in_quotes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "out" / "adapter").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds an earlier run"):
        checked("--output_dir", "~/out")


def test_first_rank_alone_judges_the_directory_which_it_may_have_made(tmp_path, monkeypatch):
    (tmp_path / "out" / "adapter").mkdir(parents=True)
    monkeypatch.setenv("RANK", "1")
    checked("--output_dir", tmp_path / "out")


def test_directory_that_the_model_comes_from_is_never_overwritten(adapter):
    (adapter.parent / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="--overwrite_output_dir would delete .*the run starts"):
        checked(
            "--model_name_or_path",
            adapter.parent,
            "--output_dir",
            adapter.parent,
            "--overwrite_output_dir",
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lora_alpha", 8], ["--lora_alpha has no effect without --lora_dim"]),
        (["--eot_token", "X"], ["--eot_token has no effect without --add_eot_token"]),
        (["--lora_dim", 4, "--learning_rate", 1e-4], ["--learning_rate has no effect"]),
        (["--lora_dim", 4, "--learning_rate", 1e-4, "--lora_lr_multiplier", 3], []),
        (["--lora_dim", 4, "--learning_rate", 1e-4, "--no-only_optimize_lora"], []),
        (["--learning_rate", 1e-4], []),
    ],
)
def test_option_without_effect_is_named(options, words, capsys):
    checked(*options)
    notes = [line for line in capsys.readouterr().out.splitlines() if "note" in line]
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


# ---------------------------------------------------------------------------- composition


def test_checks_resolve_in_turn_and_the_first_mistake_is_told():
    def add(config, inputs):
        return [*config, inputs]

    def refuse(config, inputs):
        raise ValueError(f"after {config}")

    assert apply_checks([], "x", [add, lambda config, inputs: None, add]) == ["x", "x"]
    with pytest.raises(ValueError, match=r"after \['x'\]"):
        apply_checks([], "x", [add, refuse, add, refuse])


@pytest.mark.parametrize(
    ("modules", "checks"),
    [
        ([rlhf, rlhf_inputs], rlhf.RLHF_CHECKS),
        *(([each], each.GLUE_CHECKS) for each in of_addon("glue.validation")),
        *(([each], each.NLG_CHECKS) for each in of_addon("nlg.validation")),
    ],
)
def test_every_check_of_a_stage_is_in_its_list_once(modules, checks):
    own = {
        each
        for module in modules
        for each in vars(module).values()
        if inspect.isfunction(each)
        and each.__module__ == module.__name__
        and not each.__name__.startswith("_")
        and list(inspect.signature(each).parameters) in (["config", "inputs"], ["config", "source"])
    }
    assert len(own) > 3
    assert own <= set(checks)
    assert len(set(checks)) == len(checks)
