"""Reward model and DPO as users type them, each command in a process of its own."""

import json
import math
import shutil
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.checkpoint.adapter_config import accept_adapter
from helpers.addons import PAGES, with_addon
from helpers.launcher import STEP1
from helpers.spread import ALL
from helpers.step1 import ROOT, metrics, run, write_jsonl
from helpers.trained import stock_scorer

MAX_SECONDS = 5.0
SCRIPTS = {
    "sft": STEP1,
    "reward": ROOT / "training" / "step2_reward" / "main.py",
    "dpo": ROOT / "training" / "step2_dpo" / "main.py",
}
DATA = "--data_path rows.jsonl --eval_data_path held.jsonl --max_seq_len 64".split()
SHORT = [*DATA, *"--per_device_train_batch_size 8 --lora_learning_rate 5e-3".split()]
LORA = [*SHORT, "--lora_dim", "4"]
# A step is all pairs, however many rows they fill. AdamW's usual epsilon would make steps of the
# rounding in gradients near zero.
WHOLE = [*LORA, *"--per_device_train_batch_size 64 --max_steps 2 --adam_epsilon 1e-3".split()]
# Fields of metrics.jsonl that other tools read.
PAIR_FIELDS = "accuracy margin chosen_score rejected_score chosen_length rejected_length".split()
TRL_FIELDS = """
    rewards/chosen rewards/rejected rewards/accuracies rewards/margins logps/chosen logps/rejected
""".split()
TRAIN_FIELDS = """
    kind step time epoch loss learning_rate lora_learning_rate grad_norm loss_scale skipped samples
    tokens supervised_tokens step_seconds tokens_per_second samples_per_second tflops_per_device
    hardware_tflops_per_device tflops_deepspeed_chat mfu peak_memory_bytes
""".split()
EVAL_FIELDS = "kind step time loss tokens samples length_correlation chosen_is_longer".split()
CALIBRATION = ["calibration_error", "reliability"]  # of scores, which say how sure they are


def rows_of(name, count):
    lines = Path(BUNDLED_DATA[name]).read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The directory the commands of this module run in."""
    home = tmp_path_factory.mktemp("home")
    same = [{"prompt": f"Say {i}.", "chosen": " Yes.", "rejected": " Yes."} for i in range(3)]
    write_jsonl(home / "rows.jsonl", rows_of("train", 40) + same[:2])
    write_jsonl(home / "held.jsonl", rows_of("eval", 13) + same[2:])
    return home


@pytest.fixture(scope="module")
def command(home, launcher):
    """``command(stage, *argv)``: how it ended."""

    def call(stage, *argv, code=0, ranks=1):
        running = launcher.start(argv, home, script=SCRIPTS[stage], ranks=ranks)
        codes = running.wait()
        assert set(codes) == {code}, running.output()
        return SimpleNamespace(out=running.out(), err=running.err())

    return call


def json_of(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def sft(home, command):
    """The directory of a step 1."""
    command("sft", *LORA, "--max_steps", 2, "--eval_iters", 1, "--output_dir", "sft")
    return home / "sft"


@pytest.fixture(scope="module")
def reward(home, command):
    """A reward model, as ``(directory, how it ended)``."""
    ended = command("reward", *[*LORA, "--max_steps", 4, "--eval_interval", 2], "--merge_adapter")
    return home / "output" / "reward", ended


@pytest.fixture(scope="module")
def dpo(home, command):
    """A DPO policy, as ``(directory, how it ended)``."""
    ended = command("dpo", *[*LORA, "--max_steps", 3, "--sample_generations", 1])
    return home / "output" / "dpo", ended


# ---------------------------------------------------------------------------- what runs leave

stage_test = pytest.mark.stage


@stage_test
@pytest.mark.parametrize("name", ["reward", "dpo"])
def test_first_line_says_what_is_used_and_the_default_directory_is_the_stages(request, home, name):
    directory, ended = request.getfixturevalue(name)
    assert ended.out.splitlines()[0] == "model: the bundled tiny model; data: rows.jsonl"
    assert f"output: output/{name}" in ended.out
    assert ended.err == ""
    record = json_of(directory / "run.json")
    assert (record["stage"], record["status"]) == (name, "finished")


@stage_test
@pytest.mark.parametrize("name", ["reward", "dpo"])
def test_identical_pairs_are_counted_in_the_audit_and_the_record(request, name):
    directory, ended = request.getfixturevalue(name)
    assert "identical    2 pairs of equal answers left out; eval 1" in ended.out
    audit = json_of(directory / "run.json")["data"]["audit"]
    assert (audit["identical_rows"], audit["eval_identical_rows"]) == (2, 1)
    assert (audit["train_samples"], audit["eval_samples"]) == (40, 13)
    assert audit["rows_by_type"] == {"preference": 42}


@stage_test
@pytest.mark.parametrize("name", ["reward", "dpo"])
def test_metrics_have_the_promised_fields_and_numbers(request, name):
    directory, _ = request.getfixturevalue(name)
    more = PAIR_FIELDS + (TRL_FIELDS if name == "dpo" else [])
    for line in metrics(directory):
        calibration = CALIBRATION if name == "reward" else []
        fields = TRAIN_FIELDS if line["kind"] == "train" else EVAL_FIELDS + calibration
        paired = (
            ["accuracy_change_standard_error"] if line["kind"] == "eval" and line["step"] else []
        )
        assert sorted(line) == sorted(fields + more + paired)
        for field in ["loss", *more]:
            assert math.isfinite(line[field]), field
        assert 0 <= line["accuracy"] <= 1
        difference = line["chosen_score"] - line["rejected_score"]
        assert line["margin"] == pytest.approx(difference, abs=1e-5)
        if name == "dpo":
            assert line["margin"] == line["rewards/margins"]
            # A tie is half right to us, wrong to TRL.
            assert line["rewards/accuracies"] <= line["accuracy"]
            assert line["chosen_score"] == line["rewards/chosen"]
            assert line["logps/chosen"] < 0
    evals = metrics(directory, "eval")
    assert [line["samples"] for line in evals] == [13] * len(evals)
    if name == "reward":
        assert all(sum(line["reliability"]["counts"]) == 13 for line in evals)


@stage_test
def test_evaluations_are_at_zero_each_interval_and_the_end(reward, dpo):
    assert [line["step"] for line in metrics(reward[0], "eval")] == [0, 2, 4]
    assert [line["step"] for line in metrics(dpo[0], "eval")] == [0, 3]
    shown = [line for line in reward[1].out.splitlines() if line.startswith("eval after step")]
    assert len(shown) == 3
    assert all("held-out accuracy" in line for line in shown)


@stage_test
def test_dpo_starts_at_its_reference(dpo):
    first = metrics(dpo[0], "eval")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    for name in ("margin", "chosen_score", "rejected_score"):
        assert first[name] == pytest.approx(0, abs=1e-5)
    assert metrics(dpo[0], "eval")[-1]["margin"] > 1e-3


@stage_test
def test_training_on_pairs_lowers_the_loss(reward):
    lines = metrics(reward[0], "train")
    assert [line["samples"] for line in lines] == [8, 8, 8, 8]
    first, *_, last = metrics(reward[0], "eval")
    assert last["loss"] < first["loss"]


@stage_test
def test_reward_adapter_is_a_sequence_classifier_whose_head_stock_peft_loads(reward):
    adapter = reward[0] / "adapter"
    fields = json_of(adapter / "adapter_config.json")
    assert (fields["task_type"], fields["modules_to_save"]) == ("SEQ_CLS", ["score"])
    names = {path.name for path in adapter.iterdir()}
    assert {"README.md", "tokenizer.json", "tokenizer_config.json"} <= names
    assert any("score" in name for name in load_file(adapter / "adapter_model.safetensors"))
    score = stock_scorer(BUNDLED_MODEL, adapter)
    scores = [
        [score(row["prompt"], row[answer]) for answer in ("chosen", "rejected")]
        for row in rows_of("eval", 13)
    ]
    last = metrics(reward[0], "eval")[-1]
    means = torch.tensor(scores, dtype=torch.float64).mean(0).tolist()
    assert means == pytest.approx([last["chosen_score"], last["rejected_score"]], abs=1e-5)
    assert sum(c > r for c, r in scores) / 13 == pytest.approx(last["accuracy"])


@stage_test
def test_merged_reward_model_scores_as_the_adapter_does(reward):
    assert json_of(reward[0] / "model" / "config.json")["architectures"] == [
        "OPTForSequenceClassification"
    ]
    merged = stock_scorer(reward[0] / "model")
    unmerged = stock_scorer(BUNDLED_MODEL, reward[0] / "adapter")
    for row in rows_of("eval", 5):
        pair = (row["prompt"], row["chosen"])
        assert merged(*pair) == pytest.approx(unmerged(*pair), abs=1e-4)


@stage_test
def test_dpo_adapter_is_one_of_a_language_model(dpo):
    fields = json_of(dpo[0] / "adapter" / "adapter_config.json")
    assert (fields["task_type"], fields["modules_to_save"]) == ("CAUSAL_LM", None)
    answers = json_of(dpo[0] / "run.json")["answers"]
    assert [texts["when"] for texts in answers] == ["before", "after"]


@stage_test
def test_directories_hold_what_the_stage_writes_and_nothing_else(reward, dpo):
    common = PAGES | {"run.json", "metrics.jsonl", "adapter", "checkpoints"}
    assert {path.name for path in reward[0].iterdir()} == common | {"model"}
    assert {path.name for path in dpo[0].iterdir()} == common


@stage_test
def test_orpo_trains_without_a_reference_and_adds_its_two_means(home, command):
    options = ["--loss_type", "orpo", "--max_steps", 2, "--data_output_path", "orpo-cache"]
    ended = command("dpo", *LORA, *options, "--output_dir", "orpo")
    assert "  reference " not in ended.out
    assert not list((home / "orpo-cache").glob("reference-*"))
    for line in metrics(home / "orpo"):
        parts = line["nll_loss"] - 0.1 * line["log_odds_ratio"]
        assert line["loss"] == pytest.approx(parts, abs=1e-5)
        assert line["log_odds"] == line["log_odds_chosen"]
        assert -line["nll_loss"] == pytest.approx(10 * line["chosen_score"], rel=0.5)
    first, last = metrics(home / "orpo", "eval")
    assert last["loss"] < first["loss"]
    assert f"cross-entropy of chosen answers {last['nll_loss']:.4f}" in ended.out


@with_addon("kto")
@pytest.mark.thorough
@stage_test
def test_kto_trains_on_labels_and_on_the_answers_of_pairs(home, command):
    pairs = rows_of("train", 12)
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in pairs[:8]
    ]
    write_jsonl(home / "labelled.jsonl", rows + pairs[8:])
    options = ["--data_path", "labelled.jsonl", "--loss_type", "kto", "--beta", 0.5]
    options += ["--max_steps", 3, "--undesirable_weight", 2.5, "--gradient_accumulation_steps", 2]
    ended = command("dpo", *LORA, *options, "--zero_stage", 2, "--output_dir", "kto", ranks=2)
    assert "labels       12 desirable, 4 undesirable answers" in ended.out
    assert "warning      desirable answers weigh 1.2" not in ended.out
    first, *_, last = metrics(home / "kto", "eval")
    assert first["loss"] == pytest.approx((1 + 2.5) / 4, abs=1e-5)
    assert (first["accuracy"], first["samples"], first["desirable"]) == (0.5, 28, 0.5)
    assert last["loss"] < first["loss"]
    assert last["margin"] == pytest.approx(last["chosen_score"] - last["rejected_score"])
    assert all(line["kl"] >= 0 for line in metrics(home / "kto"))
    assert [line["samples"] for line in metrics(home / "kto", "train")] == [16] * 3


# ---------------------------------------------------------------------------- what they begin with


@stage_test
@pytest.mark.parametrize("name", ["reward", *["dpo"] * ALL])
def test_adapter_of_step_1_is_continued(home, command, sft, name):
    out = f"{name}-from-sft"
    slow = ["--lora_learning_rate", "1e-9", "--max_steps", 1, "--eval_iters", 1]
    ended = command(
        name, *SHORT, *slow, "--model_name_or_path", "sft", "--lora_dim", 4, "--output_dir", out
    )
    assert "with the adapter" in ended.out.splitlines()[0]
    before = load_file(sft / "adapter" / "adapter_model.safetensors")
    after = load_file(home / out / "adapter" / "adapter_model.safetensors")
    head = {key for key in after if "score" in key}
    assert bool(head) == (name == "reward")
    assert after.keys() - head == before.keys()
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=0.0, atol=1e-7)
    fields = json_of(home / out / "adapter" / "adapter_config.json")
    assert fields["base_model_name_or_path"] == str(BUNDLED_MODEL.resolve())


@stage_test
def test_no_epochs_evaluate_the_continued_reward_model_alone(home, command, reward):
    options = ["--model_name_or_path", "output/reward", "--num_train_epochs", 0]
    command("reward", *DATA, *options)
    out = home / "output" / "reward-2"
    (only,) = metrics(out)
    assert (only["kind"], only["step"]) == ("eval", 0)
    last = metrics(reward[0], "eval")[-1]
    for name in ("accuracy", "loss", "margin", "chosen_score"):
        assert only[name] == pytest.approx(last[name], abs=1e-5)
    assert not (out / "adapter").exists()


@stage_test
@pytest.mark.parametrize("name", ["reward", *["dpo"] * ALL])
def test_every_weight_trains_without_a_rank_and_the_model_is_written(home, command, name):
    out = f"{name}-full"
    command(
        name,
        *[*SHORT, "--max_steps", 2, "--learning_rate", "1e-3", "--sample_generations", 0],
        *["--output_dir", out],
    )
    assert not (home / out / "adapter").exists()
    record = json_of(home / out / "run.json")
    assert record["parameters"]["trainable"] == record["parameters"]["total"]
    if name == "dpo":
        assert json_of(home / out / "model" / "config.json")["architectures"] == ["OPTForCausalLM"]
        return
    model = AutoModelForSequenceClassification.from_pretrained(home / out / "model")
    assert model.config.num_labels == 1
    score = stock_scorer(home / out / "model")
    scores = [score(row["prompt"], row["chosen"]) for row in rows_of("eval", 13)]
    last = metrics(home / out, "eval")[-1]
    assert sum(scores) / 13 == pytest.approx(last["chosen_score"], abs=1e-4)

    # and is continued from that directory, head and all
    options = ["--model_name_or_path", out, "--num_train_epochs", 0, "--output_dir", f"{out}-2"]
    command("reward", *DATA, *options)
    (only,) = metrics(home / f"{out}-2")
    assert only["chosen_score"] == pytest.approx(last["chosen_score"], abs=1e-5)


@stage_test
@pytest.mark.parametrize("name", ["reward", "dpo"])
def test_dry_run_prints_the_options_and_leaves_no_trace(home, command, name):
    before = sorted(path for path in home.rglob("*"))
    ended = command(name, *LORA, "--dry_run", "--verbose", "--output_dir", "nowhere")
    wanted = {
        "reward": ["--reward_loss bradley_terry", "--share_prompt\n"],
        "dpo": ["--beta 0.1", "--loss_type sigmoid", "--learning_rate 1e-06"],
    }[name]
    for line in [*wanted, "--no-packing", "\n  chosen ", "\n  rejected ", "dry run"]:
        assert line in ended.out
    assert sorted(path for path in home.rglob("*")) == before


# ---------------------------------------------------------------------------- one result, many ways


@pytest.fixture(scope="module")
def whole_steps(home, command):
    """``whole_steps(stage, *options)``: metrics of a run each of whose steps is all pairs."""

    @cache
    def of(stage, *options):
        out = "-".join([stage, *(each.strip("-") for each in options)])
        command(stage, *WHOLE, "--sample_generations", 0, *options, "--output_dir", out)
        return metrics(home / out)

    return of


PER_TOKEN = ("--reward_loss", "per_token")
CENTRED = ("--center_rewards_coefficient", "0.01")


@pytest.mark.thorough
@stage_test
@pytest.mark.parametrize(
    ("stage", "options"),
    [("reward", PER_TOKEN), ("reward", CENTRED), ("dpo", ())],
    ids=["per token", "bradley_terry", "dpo"],
)
@pytest.mark.parametrize("change", ["--no-share_prompt", "--packing"])
def test_layout_of_pairs_changes_no_metric(whole_steps, stage, options, change):
    plain, changed = whole_steps(stage, *options), whole_steps(stage, *options, change)
    assert [line["samples"] for line in plain] == [13, 40, 13, 40, 13]
    assert_same_metrics(changed, plain)


@pytest.mark.thorough
@stage_test
def test_reference_from_a_look_back_changes_no_metric(whole_steps):
    assert_same_metrics(whole_steps("dpo", "--no-precompute_ref_log_probs"), whole_steps("dpo"))


@stage_test
def test_loss_per_token_is_another_loss(whole_steps):
    plain, per_token = whole_steps("reward", *CENTRED), whole_steps("reward", *PER_TOKEN)
    assert plain[0]["accuracy"] == per_token[0]["accuracy"]
    assert plain[0]["loss"] != pytest.approx(per_token[0]["loss"], abs=1e-3)


def assert_same_metrics(found, expected):
    names = {*PAIR_FIELDS, *TRL_FIELDS, "loss", "grad_norm", "calibration_error"}
    # Where the policy is still its reference, which answer has more is a matter of rounding.
    ties = {"accuracy", "rewards/accuracies", "calibration_error"}
    for ours, theirs in zip(found, expected, strict=True):
        shared = names & theirs.keys() - (ties if abs(theirs["margin"]) < 1e-5 else set())
        assert {n: ours[n] for n in shared} == pytest.approx(
            {n: theirs[n] for n in shared}, abs=1e-5, rel=1e-5
        )


# ---------------------------------------------------------------------------- the reference


@pytest.fixture(scope="module")
def first_look(home, command):
    """``first_look(name, *options)``: DPO's evaluation before any step, from one cache."""

    def call(name, *options):
        command(
            "dpo",
            *[*DATA, "--num_train_epochs", 0, "--sample_generations", 0],
            *["--data_output_path", "cache", "--output_dir", name, *options],
        )
        (line,) = metrics(home / name)
        return line

    return call


@pytest.mark.thorough
@stage_test
def test_reference_is_that_of_the_model_at_hand_whatever_the_cache_holds(home, first_look, sft):
    def files():
        return {path.name for path in (home / "cache").glob("reference-*")}

    looks = [first_look("look-base")]
    known = [files()]
    looks.append(first_look("look-sft", "--model_name_or_path", "sft"))
    known.append(files())
    scaled = home / "scaled"
    shutil.copytree(sft / "adapter", scaled)
    config = json_of(scaled / "adapter_config.json")
    config["lora_alpha"] *= 4
    (scaled / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    accept_adapter(scaled)
    looks.append(first_look("look-scaled", "--model_name_or_path", "scaled"))
    known.append(files())
    looks.append(first_look("look-again", "--model_name_or_path", "sft"))
    known.append(files())
    for look in looks:
        # the policy is its own reference, so nothing tells them apart
        assert look["loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert look["chosen_score"] == pytest.approx(0, abs=1e-5)
    assert looks[1]["logps/chosen"] != looks[0]["logps/chosen"]
    assert looks[2]["logps/chosen"] != looks[1]["logps/chosen"]
    assert known[0] < known[1] < known[2]
    assert known[3] == known[2]


# ---------------------------------------------------------------------------- mistakes


@stage_test
@pytest.mark.parametrize(
    ("script", "line", "part"),
    [
        ("step2_reward", "--reward_los per_token", "did you mean --reward_loss?"),
        ("step2_dpo", "--data_path half.jsonl", "half.jsonl:2: "),
    ],
)
def test_wrong_command_ends_before_torch_is_loaded(tmp_path, script, line, part):
    good = {"prompt": "a", "chosen": " b", "rejected": " c"}
    write_jsonl(tmp_path / "half.jsonl", [good, {"prompt": "a", "chosen": " b"}])
    done = run([sys.executable, f"training/{script}/main.py", *line.split()], tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert part in done.err
    assert done.seconds < MAX_SECONDS


@stage_test
@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize("part", ["adapter", "model"])
def test_reward_model_is_no_policy(home, command, reward, stage, part):
    ended = command(
        stage, *LORA, "--model_name_or_path", f"output/reward/{part}", "--output_dir", "no", code=2
    )
    assert ended.err.count("\n") == 1
    assert "is a reward model, but this needs a language model" in ended.err
    assert not (home / "no").exists()


@stage_test
def test_margin_that_is_no_number_is_named_with_its_row(home, command):
    write_jsonl(
        home / "margins.jsonl",
        [{"prompt": "a", "chosen": " b", "rejected": " c", "margin": m} for m in (1, 0.5, "big")],
    )
    ended = command("reward", "--data_path", "margins.jsonl", "--output_dir", "no", code=2)
    assert ended.err.count("\n") == 1
    assert "margins.jsonl:3" in ended.err
    assert "`margin` must be a" in ended.err
    assert not (home / "no").exists()


@pytest.mark.thorough
@stage_test
def test_option_of_another_stage_is_accepted_and_said_to_do_nothing(command, home):
    options = ["--train_on_prompt", "--sample_generations", 3, "--num_padding_at_beginning", 0]
    ended = command("reward", *LORA, *options, "--dry_run")
    assert "--train_on_prompt has no effect in this stage" in ended.out
    assert "--sample_generations has no effect in this stage" in ended.out
