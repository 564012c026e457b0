"""Step 3 as users type it, each command in a process of its own."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.config.options import parse_config
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.source import find_model
from dschat_lora.rl.options.config import RlhfConfig
from helpers.addons import PAGES
from helpers.launcher import ROOT
from helpers.rlhf_course import save_family, write_prompts, write_texts
from helpers.spread import ALL
from helpers.step1 import metrics, run

MAX_SECONDS = 5.0
STEP3 = ROOT / "training" / "step3_rlhf" / "main.py"
MODELS = """
    --actor_model_name_or_path opt/actor --critic_model_name_or_path opt/reward
""".split()
DATA = """
    --data_path prompts.jsonl --eval_data_path held.jsonl --eval_prompts 3
    --max_prompt_seq_len 14 --max_answer_seq_len 8
""".split()
SMALL = "--per_device_generation_batch_size 4 --per_device_training_batch_size 4".split()
RATES = "--actor_lora_learning_rate 5e-3 --critic_lora_learning_rate 5e-3".split()
SHORT = [*MODELS, *DATA, *SMALL, *RATES]
FUNCTION = [*MODELS[:2], *DATA, *SMALL, *RATES, "--reward_function"]
# Fields of metrics.jsonl that other tools read.
OF_EVERY_STAGE = """
    kind step time epoch loss learning_rate lora_learning_rate grad_norm samples tokens
    supervised_tokens step_seconds tokens_per_second samples_per_second tflops_per_device
    hardware_tflops_per_device tflops_deepspeed_chat mfu peak_memory_bytes
""".split()
OF_RLHF = """
    reward kl policy_loss value_loss entropy clip_fraction approx_kl explained_variance
    response_length eos_rate generation_seconds scoring_seconds training_seconds
    generation_tokens_per_second
""".split()
FUNCTIONS = '''
"""Reward functions of a user."""

import os


def constant(prompts, responses):
    return [1.0] * len(prompts)


def nothing(prompts, responses):
    return [None] * len(prompts)


def some(prompts, responses):
    return [None if len(text) % 2 else float(len(text)) for text in responses]


def by_row(prompts, responses, ended, rows, token_ids):
    assert all(row["prompt"] == prompt for row, prompt in zip(rows, prompts))
    return [row["number"] + 0.1 * len(ids) for row, ids in zip(rows, token_ids)]


def too_few(prompts, responses):
    return [1.0]


def infinite(prompts, responses):
    return [float("inf") if os.environ["RANK"] == "1" else 1.0 for _ in responses]


def wrong(prompts, responses):
    return [int(text + "!") for text in responses]


calls = []


def at_times(prompts, responses):
    """Counts nothing in the second iteration."""
    calls.append(1)
    # the two looks at held-out prompts before training come first
    return [None if len(calls) == 4 else float(len(text)) for text in responses]
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The directory the commands of this module run in."""
    home = tmp_path_factory.mktemp("home")
    save_family("opt", home / "opt")
    write_prompts(home / "prompts.jsonl", 8)
    write_prompts(home / "held.jsonl", 3, seed=1)
    write_texts(home / "texts.jsonl", 5)
    (home / "my_rewards.py").write_text(FUNCTIONS, encoding="utf-8")
    return home


@pytest.fixture(scope="module")
def command(home, launcher):
    """``command(*argv)``: how it ended."""

    def call(*argv, code=0, ranks=1):
        running = launcher.start(argv, home, script=STEP3, ranks=ranks)
        codes = running.wait()
        outs, errs = ([read(rank) for rank in range(ranks)] for read in (running.out, running.err))
        assert set(codes) == {code}, running.output()
        return SimpleNamespace(out=outs[0], err=errs[0], outs=outs, errs=errs)

    return call


def json_of(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def events(directory):
    return [(line["event"], line["message"]) for line in metrics(directory, "event")]


@pytest.fixture(scope="module")
def finished(home, command):
    """A run of everything at once, as ``(directory, how it ended)``."""
    ended = command(
        *[*SHORT, "--enable_ema", "--unsupervised_dataset_name", "texts.jsonl"],
        *["--unsup_coef", 0.5, "--ppo_epochs", 2, "--merge_adapter", "--num_train_epochs", 2],
        *["--sample_generations", 1, "--judge_function", "my_rewards:by_row"],
    )
    return home / "output" / "rlhf", ended


# ---------------------------------------------------------------------------- what a run leaves

stage_test = pytest.mark.stage


@stage_test
def test_directory_holds_what_the_stage_writes_and_nothing_else(finished):
    directory, ended = finished
    assert {path.name for path in directory.iterdir()} == {
        *("run.json", "metrics.jsonl", "rollouts.jsonl.gz", "checkpoints"),
        *("actor", "critic", "actor_ema", *PAGES),
    }
    for role in ("actor", "critic", "actor_ema"):
        assert {path.name for path in (directory / role).iterdir()} == {"adapter", "model"}
        names = {path.name for path in (directory / role / "adapter").iterdir()}
        assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= names
        assert {"tokenizer.json", "tokenizer_config.json"} <= names
    record = json_of(directory / "run.json")
    assert (record["stage"], record["status"]) == ("rlhf", "finished")
    assert {"reward before", "reward after", "kl after", "judge after"} <= record["results"].keys()
    assert [texts["when"] for texts in record["answers"]] == ["before", "after"]
    assert record["pretraining text"]["audit"]["train_samples"] == 5
    assert record["learns"].keys() == {"actor", "critic"}
    for role, learns in record["learns"].items():
        assert f"\n  learns       {role}: {learns['words']}\n" in ended.out
    assert ended.err == ""
    assert ended.out.splitlines()[0].startswith("actor: ")
    assert "with the adapter" in ended.out.splitlines()[0]


@stage_test
def test_train_lines_have_the_promised_fields_and_finite_numbers(finished):
    directory, _ = finished
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    for line in text.splitlines():
        # Strict JSON: no NaN or Infinity.
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    lines = metrics(directory, "train")
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    for line in lines:
        assert not {*OF_EVERY_STAGE, *OF_RLHF, "text_loss"} - line.keys()
        for name in {*OF_EVERY_STAGE, *OF_RLHF} - {"kind", "mfu", "learning_rate"}:
            assert math.isfinite(line[name]), name
        assert line["mfu"] is None
        assert line["samples"] == 4
        assert 0 <= line["eos_rate"] <= 1
        assert 1 <= line["response_length"] <= 8
        phases = [line[f"{name}_seconds"] for name in ("generation", "scoring", "training")]
        assert sum(phases) == pytest.approx(line["step_seconds"])
        assert line["supervised_tokens"] == pytest.approx(4 * line["response_length"])
        assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(line["tokens"])
    assert [line["step"] for line in metrics(directory, "eval")] == [0, 4, 8]
    assert all(line["samples"] == 3 for line in metrics(directory, "eval"))


@stage_test
@pytest.mark.parametrize("role", ["actor", "actor_ema"])
def test_actor_says_in_stock_peft_what_it_says_here(finished, home, role):
    adapter = finished[0] / role / "adapter"
    fields = json_of(adapter / "adapter_config.json")
    assert fields["task_type"] == "CAUSAL_LM"
    assert Path(fields["base_model_name_or_path"]) == home / "opt" / "base"
    base = AutoModelForCausalLM.from_pretrained(home / "opt" / "base")
    theirs = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    ours = build_causal_lm(
        find_model(str(adapter)),
        tokenizer,
        ModelConfig(),
        LoraConfig(),
        dtype=torch.float32,
        seed=0,
        meta=False,
    ).model.eval()
    merged = AutoModelForCausalLM.from_pretrained(finished[0] / role / "model").eval()
    ids = torch.tensor([tokenizer("some letters and more")["input_ids"]])
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        torch.testing.assert_close(ours(input_ids=ids).logits, expected, rtol=0.0, atol=1e-5)
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=0.0, atol=1e-4)
    start = load_file(home / "opt" / "actor" / "adapter_model.safetensors")
    learnt = load_file(adapter / "adapter_model.safetensors")
    assert start.keys() == learnt.keys()
    assert max((learnt[key] - start[key]).abs().max() for key in start) > 1e-3


@stage_test
def test_critic_is_a_sequence_classifier_in_stock_peft(finished, home):
    adapter = finished[0] / "critic" / "adapter"
    fields = json_of(adapter / "adapter_config.json")
    assert (fields["task_type"], fields["modules_to_save"]) == ("SEQ_CLS", ["score"])
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    merged = AutoModelForSequenceClassification.from_pretrained(finished[0] / "critic" / "model")
    scores = []
    for path in (adapter, home / "opt" / "reward"):
        base = AutoModelForSequenceClassification.from_pretrained(
            home / "opt" / "base", num_labels=1
        )
        model = peft.PeftModel.from_pretrained(base, str(path)).eval()
        model.config.pad_token_id = tokenizer.pad_token_id
        ids = torch.tensor([tokenizer("some letters")["input_ids"]])
        with torch.no_grad():
            scores.append(model(input_ids=ids).logits)
    with torch.no_grad():
        again = merged.eval()(input_ids=ids).logits
    torch.testing.assert_close(again, scores[0], rtol=0.0, atol=1e-4)
    assert abs(float(scores[0] - scores[1])) > 1e-3


@stage_test
def test_actor_of_a_run_is_trained_further(finished, home, command):
    argv = ["--actor_model_name_or_path", "output/rlhf/actor", *SHORT[2:], "--max_steps", 1]
    ended = command(*argv, "--output_dir", "further", "--sample_generations", 0)
    assert "output/rlhf/actor/adapter" in ended.out.splitlines()[0]
    first, last = metrics(home / "further", "eval")[0], metrics(finished[0], "eval")[-1]
    # The same policy, which is its own reference anew.
    assert first["greedy_reward"] == pytest.approx(last["greedy_reward"], abs=1e-5)
    assert first["kl"] == pytest.approx(0, abs=1e-6)


# ---------------------------------------------------------------------------- ways to run it


@stage_test
def test_without_arguments_all_is_bundled_and_said_to_be(home, command):
    ended = command("--max_steps", 1, "--eval_prompts", 2, "--output_dir", "bundled", *SMALL)
    assert ended.out.splitlines()[0] == (
        "actor: the bundled tiny model; reward: the function dschat_lora.world:reward; data: the "
        "bundled prompts"
    )
    assert ended.err == ""
    (line,) = metrics(home / "bundled", "train")
    assert line["step"] == 1
    assert 0 <= line["reward"] <= 1


@stage_test
def test_dry_run_prints_the_options_and_leaves_no_trace(home, command):
    before = files_of(home)
    ended = command(*SHORT, "--dry_run", "--verbose", "--output_dir", "nowhere")
    options = ["--algorithm ppo", "--kl_coef 0.1", "--actor_lora_dim 4"]
    for line in [*options, "  iterations ", "only 3 prompts held out", "dry run"]:
        assert line in ended.out
    assert files_of(home) == before


def files_of(directory):
    """All paths but Python's own."""
    return sorted(path for path in directory.rglob("*") if "__pycache__" not in path.parts)


@stage_test
def test_no_epochs_evaluate_alone(home, command):
    command(*SHORT, "--num_train_epochs", 0, "--output_dir", "looked")
    (only,) = metrics(home / "looked")
    assert (only["kind"], only["step"]) == ("eval", 0)
    assert only["kl"] == pytest.approx(0, abs=1e-6)
    written = {path.name for path in (home / "looked").iterdir()}
    assert written == PAGES | {"run.json", "metrics.jsonl"}
    assert json_of(home / "looked" / "run.json")["status"] == "finished"


@pytest.mark.thorough
@stage_test
def test_rank_0_alone_prints(home, command):
    argv = [*SHORT, "--max_steps", 2, "--actor_zero_stage", 2, "--critic_zero_stage", 2]
    ended = command(*argv, "--output_dir", "spawned", ranks=2)
    out = "".join(ended.outs)
    for said in ("actor: ", "output: spawned", "iteration 1/", "actor: adapter written to "):
        assert len(re.findall(rf"^{re.escape(said)}", out, re.MULTILINE)) == (
            2 if said == "actor: " else 1
        ), said
    record = json_of(home / "spawned" / "run.json")
    assert (record["world_size"], record["status"]) == (2, "finished")
    assert [line["step"] for line in metrics(home / "spawned", "train")] == [1, 2]
    assert (home / "spawned" / "critic" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.thorough
@stage_test
def test_update_ends_early_at_its_target_and_the_run_ends_well(home, command):
    command(
        *[*SHORT, "--ppo_epochs", 4, "--target_kl", "1e-6", "--num_train_epochs", 2],
        *["--output_dir", "early", "--save_interval", 1],
    )
    lines = metrics(home / "early", "train")
    # four iterations of up to four steps, each ended by its second
    assert [line["updates"] for line in lines] == [2, 2, 2, 2]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    # at its own place of the plan, however many steps were left out before
    rates = [line["lora_learning_rate"] for line in lines]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.5 * rates[0]
    assert json_of(home / "early" / "run.json")["status"] == "finished"
    assert (home / "early" / "checkpoints" / "step-00000008").is_dir()


@pytest.mark.thorough
@stage_test
def test_pretraining_text_is_learnt(home, command):
    runs = {"with": ["--unsup_coef", 5], "without": ["--unsup_coef", 1e-6]}
    losses = {}
    for name, options in runs.items():
        text = ["--unsupervised_dataset_name", "texts.jsonl", *options]
        command(*SHORT, *text, "--max_steps", 8, "--num_train_epochs", 9, "--output_dir", name)
        losses[name] = [line["text_loss"] for line in metrics(home / name, "train")]
    assert losses["with"][0] == pytest.approx(losses["without"][0], abs=1e-5)
    assert losses["with"][-1] < losses["without"][-1] - 0.02


# ---------------------------------------------------------------------------- reward functions


@stage_test
def test_function_sees_rows_and_tokens_and_none_counts_for_nothing(home, command):
    command(*FUNCTION, "my_rewards:by_row", "--output_dir", "rows", "--max_steps", 2)
    assert all(line["dropped"] == 0 for line in metrics(home / "rows", "train"))
    assert any(line["reward"] > 1 for line in metrics(home / "rows", "train"))
    command(*FUNCTION, "my_rewards:some", "--output_dir", "some", "--num_train_epochs", 2, ranks=2)
    lines = metrics(home / "some", "train")
    assert any(line["dropped"] for line in lines)
    for line in lines:
        assert line["samples"] == 8
        assert line["reward"] % 1 != 0.5 or line["dropped"] < 7
        # of even lengths, which alone count
        assert line["reward"] * (8 - line["dropped"]) % 2 == pytest.approx(0, abs=1e-5)


@stage_test
@pytest.mark.parametrize("ranks", [1, 2] if ALL else [1])
def test_iteration_of_which_nothing_counts_is_an_event_and_the_run_goes_on(home, command, ranks):
    out = f"none-{ranks}"
    sizes = ["--per_device_generation_batch_size", 4 // ranks]
    sizes += ["--per_device_training_batch_size", 4 // ranks, "--num_train_epochs", 2]
    argv = [*FUNCTION, "my_rewards:at_times", *sizes, "--output_dir", out]
    ended = command(*argv, "--save_interval", 1, ranks=ranks)
    lines = metrics(home / out, "train")
    assert [line["iteration"] for line in lines] == [1, 3, 4]
    assert [line["step"] for line in lines] == [1, 2, 3]
    ((name, message),) = [each for each in events(home / out) if each[0] == "empty_batch"]
    assert name == "empty_batch"
    assert "none of the 4 responses of iteration 2 counts" in message
    assert message in ended.out
    names = sorted(path.name for path in (home / out / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in (1, 2, 3)]
    assert (home / out / "actor" / "adapter").is_dir()


@stage_test
def test_run_in_which_nothing_ever_counts_is_a_failure_that_says_so(home, command):
    argv = [*FUNCTION, "my_rewards:nothing", "--output_dir", "never", "--save_interval", 1]
    ended = command(*argv, code=2)
    assert ended.err.startswith("error: none of the 8 responses of 2 iterations counted: nothing")
    assert "no adapter was written" in ended.err
    assert metrics(home / "never", "train") == []
    assert [name for name, _ in events(home / "never")] == ["empty_batch"] * 2
    assert json_of(home / "never" / "run.json")["status"].startswith("failed: ValueError: none of")
    assert not (home / "never" / "actor").exists()


@pytest.mark.thorough
@stage_test
def test_constant_reward_is_warned_of_once(home, command):
    argv = [*FUNCTION, "my_rewards:constant", "--num_train_epochs", 4, "--output_dir", "constant"]
    ended = command(*argv)
    warnings = [message for name, message in events(home / "constant") if name == "warning"]
    same = [message for message in warnings if "got the same reward" in message]
    assert len(same) == 1
    assert f"  warning      {same[0]}" in ended.out


@stage_test
@pytest.mark.parametrize(
    ("function", "ranks", "part"),
    [("too_few", 1, "returned 1 scores for 3 responses"), *[("infinite", 2, "returned inf")] * ALL],
)
def test_function_that_returns_no_scores_ends_the_run_in_one_line(command, function, ranks, part):
    argv = [*FUNCTION, f"my_rewards:{function}", "--output_dir", f"bad-{function}"]
    ended = command(*argv, code=2, ranks=ranks)
    errors = "".join(ended.errs)
    assert errors.startswith(f"error: --reward_function my_rewards:{function} ")
    assert part in errors
    assert errors.count("\n") == 1


@stage_test
def test_fault_of_a_function_is_shown_where_it_is(command):
    ended = command(*FUNCTION, "my_rewards:wrong", "--output_dir", "wrong", code=1)
    assert 'return [int(text + "!") for text in responses]' in ended.err
    assert "--reward_function my_rewards:wrong failed" in ended.err


# ---------------------------------------------------------------------------- mistakes


ACTOR = "--actor_model_name_or_path opt/actor"
GOOD = f"{ACTOR} --critic_model_name_or_path opt/reward --data_path prompts.jsonl"


@stage_test
@pytest.mark.parametrize(
    ("line", "part"),
    [(ACTOR, "--critic_model_name_or_path must name"), (f"{GOOD} --kl_coeff 1", "did you mean")],
)
def test_wrong_command_ends_before_torch_is_loaded(home, line, part):
    done = run([sys.executable, "training/step3_rlhf/main.py", *line.split()], home)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert part in done.err
    assert done.seconds < MAX_SECONDS


@stage_test
def test_function_that_the_module_lacks_is_refused_in_one_line(home, command):
    argv = [*FUNCTION, "my_rewards:absent", "--output_dir", "no"]
    ended = command(*argv, code=2)
    assert ended.err == (
        "error: --reward_function my_rewards:absent: my_rewards has no function absent\n"
    )
    assert not (home / "no").exists()


@stage_test
def test_reward_model_that_reads_other_tokens_is_refused_in_one_line(home, command):
    save_family("opt", home / "other")
    tokens = home / "other" / "reward" / "tokenizer.json"
    rules = json.loads(tokens.read_text(encoding="utf-8"))
    assert rules["normalizer"] is None
    rules["normalizer"] = {"type": "Lowercase"}  # of the same vocabulary
    tokens.write_text(json.dumps(rules), encoding="utf-8")
    argv = [*MODELS[:3], "other/reward", *DATA, *SMALL, "--output_dir", "no"]
    ended = command(*argv, code=2)
    assert ended.err.startswith("error: --critic_model_name_or_path other/reward has another ")
    assert ended.err.count("\n") == 1
    assert not (home / "no").exists()


# ---------------------------------------------------------------------------- DeepSpeed-Chat

# Every option of its step 3, none of which may be unknown here.
CLASSIC = """
    --data_path prompts.jsonl --data_split 2,4,4 --data_output_path cache
    --unsupervised_dataset_name texts.jsonl --unsup_coef 27.8
    --actor_model_name_or_path opt/actor --critic_model_name_or_path opt/reward
    --num_padding_at_beginning 1 --per_device_generation_batch_size 4
    --per_device_training_batch_size 4 --generation_batches 1 --ppo_epochs 1
    --max_prompt_seq_len 14 --max_answer_seq_len 8 --actor_learning_rate 9.65e-6
    --critic_learning_rate 5e-6 --actor_weight_decay 0.1 --critic_weight_decay 0.1
    --num_train_epochs 1 --lr_scheduler_type cosine --num_warmup_steps 2
    --gradient_accumulation_steps 1 --output_dir classic --seed 1234
    --preprocessing_num_workers 1 --enable_hybrid_engine --unpin_actor_parameters
    --release_inference_cache --inference_tp_size 8 --tp_gather_partition_size 8
    --offload_reference_model --offload_reward_model --dtype fp32
    --actor_zero_stage 0 --critic_zero_stage 0 --actor_gradient_checkpointing
    --critic_gradient_checkpointing --actor_dropout 0.0 --critic_dropout 0.0
    --actor_lora_dim 4 --critic_lora_dim 4 --only_optimize_lora
    --actor_lora_learning_rate 5e-4 --critic_lora_learning_rate 5e-4 --enable_ema
    --enable_mixed_precision_lora --compute_fp32_loss
    --align_overflow --print_answers --print_answers_interval 1
    --enable_test_mode --test_stop_step 1 --deepspeed --local_rank 0
""".split()
# Of layers by name and of another tokenizer, with models that have neither yet.
OTHERS = """
    --data_path prompts.jsonl --actor_model_name_or_path opt/base
    --critic_model_name_or_path opt/whole --actor_lora_dim 4 --critic_lora_dim 4
    --actor_lora_module_name decoder.layers. --critic_lora_module_name decoder.layers.
    --offload --add_eot_token --unsupervised_dataset_name wikitext
    --unsupervised_dataset_config_name wikitext-2-raw-v1
""".split()


def test_every_option_of_deepspeed_chat_is_known():
    config = parse_config(RlhfConfig, OTHERS)
    assert config.actor.lora_module_name == config.critic.lora_module_name == "decoder.layers."
    assert config.pretraining.unsupervised_dataset_config_name == "wikitext-2-raw-v1"


@stage_test
def test_command_line_of_deepspeed_chat_runs(home, command):
    ended = command(*CLASSIC)
    assert [line["step"] for line in metrics(home / "classic", "train")] == [1]
    (note,) = (line for line in ended.out.splitlines() if "accepted without effect" in line)
    for name in ("enable_hybrid_engine", "align_overflow", "offload_reward_model"):
        assert f"--{name}" in note
    assert "--inference_tp_size 8 has no effect: rollouts run on the processes" in ended.out
    assert (home / "classic" / "actor_ema" / "adapter").is_dir()
