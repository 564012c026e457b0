"""Step 1 as users type it, each command in a process and a directory of its own."""

import json
import math
import socket
from contextlib import contextmanager
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from helpers.addons import PAGES
from helpers.spread import ALL
from helpers.step1 import ROOT, deepspeed, metrics, python, run, write_jsonl

pytestmark = pytest.mark.stage

# Fields of metrics.jsonl that other tools read, by kind of line.
TRAIN_FIELDS = """
    epoch loss learning_rate lora_learning_rate grad_norm samples tokens supervised_tokens
    step_seconds tokens_per_second samples_per_second tflops_per_device
    hardware_tflops_per_device tflops_deepspeed_chat mfu peak_memory_bytes
""".split()
EVAL_FIELDS = ["perplexity", "loss", "tokens"]
COMMON_FIELDS = ["kind", "step", "time"]
# What this stage adds to them.
MORE_FIELDS = {"train": ["loss_scale", "skipped"], "eval": ["samples"]}
RUN_FIELDS = """
    stage status command started versions git_commit platform world_size config data parameters
""".split()
# It ends answers in a token that the bundled tokenizer has, and rewrites all but the last.
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]"
    "{{ '...' if m.role == 'assistant' and not loop.last else tone ~ m.content }}"
    "{{ '<|unk|>' if m.role == 'assistant' }}\n{% endfor %}"
    "{{ '[assistant]' if add_generation_prompt }}"
)
# an epoch of less than all rows is enough to see by default
DATA = [] if ALL else ["--data_path", BUNDLED_DATA["eval"]]
# Keeps a run short: a few evaluation batches, no sample answers.
SHORT = ["--eval_iters", "1", "--sample_generations", "0"]


def json_of(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


@contextmanager
def busy_port(port=29500):
    """The launcher's default port, taken by somebody else (or already so)."""
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
            other.listen()
        except OSError:
            pass
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The directory the commands of this module run in, one after another."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def title(home):
    """The command of the title, by ``make test-all`` exactly as written."""
    options = ["--lora_dim", "128", "--gradient_accumulation_steps", "8"]
    done = run(deepspeed(*options, *DATA), home)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def own_data(home, launcher):
    """A run on rows of several types, full of options, without the launcher of DeepSpeed."""
    rows = [
        {"prompt": f"\n\nHuman: Add {i} and {i}.\n\nAssistant:", "completion": f" {i + i}."}
        for i in range(20)
    ]
    write_jsonl(home / "pairs.jsonl", rows)
    write_jsonl(home / "text.jsonl", [{"text": f"Number {i} is a number."} for i in range(20)])
    chat = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello!"}]
    write_jsonl(home / "chat.jsonl", [{"messages": chat * 2}] * 3 + [{"text": "and a text"}])
    (home / "chat.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    preference = {"prompt": "Sum: 1 + 1 =", "chosen": " 2", "rejected": " 3"}
    write_jsonl(home / "preference.jsonl", [preference, {"text": ""}])
    argv = [
        *["--data_path", "pairs.jsonl", "text.jsonl", "chat.jsonl", "preference.jsonl"],
        *["--eval_ratio", "0.2", "--max_seq_len", "64", "--bad_rows", "skip"],
        *["--chat_template", "chat.jinja", "--chat_template_kwargs", '{"tone": "!"}'],
        *["--lora_dim", "4", "--lora_learning_rate", "5e-3", "--max_steps", "3"],
        *["--per_device_train_batch_size", "2", "--num_train_epochs", "2"],
        *["--output_dir", "own/run", "--merge_adapter", *SHORT],
    ]
    running = launcher.start(argv, home)
    assert running.wait() == [0], running.output()
    return running


# ---------------------------------------------------------------------------- the title command


def test_title_command_says_first_what_it_trains_on_what(title):
    lines = [line for line in title.out.splitlines() if not line.startswith("[20")]
    data = DATA[1] if DATA else "the bundled data"
    assert lines[0] == f"model: the bundled tiny model; data: {data}"
    assert "Traceback" not in title.err


def test_title_command_does_not_warn_of_its_own_options(title):
    warnings = [line for line in title.out.splitlines() if line.startswith("  warning ")]
    # but of data that is cut short here
    assert [line for line in warnings if "rows make" not in line or ALL] == []


def test_title_command_learns(title, home):
    first, *_, last = metrics(home / "output" / "sft", "eval")
    assert last["perplexity"] < first["perplexity"]
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))


def test_every_line_has_the_promised_fields_and_valid_numbers(title, home):
    promised = {"train": TRAIN_FIELDS, "eval": EVAL_FIELDS}
    for line in metrics(home / "output" / "sft"):
        kind = line["kind"]
        assert sorted(line) == sorted(COMMON_FIELDS + promised[kind] + MORE_FIELDS[kind])
        for name, value in line.items():
            if name not in ("kind", "mfu", "skipped"):
                assert isinstance(value, int | float), name
                assert math.isfinite(value), name


def test_steps_count_from_one_and_evaluation_is_at_zero_and_the_end(title, home):
    steps = [line["step"] for line in metrics(home / "output" / "sft", "train")]
    assert steps == list(range(1, len(steps) + 1))
    evaluated = [line["step"] for line in metrics(home / "output" / "sft", "eval")]
    assert evaluated == [0, steps[-1]]


def test_one_epoch_sees_every_sample_and_token_once(title, home):
    lines = metrics(home / "output" / "sft", "train")
    audit = json_of(home / "output" / "sft" / "run.json")["data"]["audit"]
    assert sum(line["samples"] for line in lines) == audit["train_samples"]
    assert sum(line["tokens"] for line in lines) == audit["tokens"]
    assert lines[-1]["epoch"] == pytest.approx(1.0)


def test_record_says_what_was_run_and_how_it_ended(title, home):
    record = json_of(home / "output" / "sft" / "run.json")
    assert not [name for name in RUN_FIELDS if name not in record]
    assert record["status"] == "finished"
    assert record["world_size"] == 1
    assert record["config"]["lora_dim"] == 128
    assert record["config"]["lora_learning_rate"] == 5e-4
    assert record["config"]["gradient_accumulation_steps"] == 8
    assert record["config"]["seed"] == 1234
    assert record["command"][1] == "training/step1_sft/main.py"
    assert len(record["data"]["fingerprint"]) >= 16
    # rank * (in + out) of the four square and two 1:4 layers of each block
    config = json_of(BUNDLED_MODEL / "config.json")
    width, inner = config["hidden_size"], config["ffn_dim"]
    block = 128 * (4 * 2 * width + 2 * (width + inner))
    assert record["parameters"]["trainable"] == config["num_hidden_layers"] * block
    assert record["learns"]["model"]["linear_share"] == 1
    assert record["learns"]["model"]["learns"]["q_proj"]["layers"] == config["num_hidden_layers"]


def test_adapter_directory_is_complete_and_loads_in_peft(title, home):
    adapter = home / "output" / "sft" / "adapter"
    names = {path.name for path in adapter.iterdir()}
    needed = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert needed | {"tokenizer.json", "tokenizer_config.json"} <= names
    fields = json_of(adapter / "adapter_config.json")
    assert (fields["peft_type"], fields["r"], fields["task_type"]) == ("LORA", 128, "CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    loaded = peft.PeftModel.from_pretrained(base, str(adapter))
    factors = {name: p for name, p in loaded.named_parameters() if "lora_B" in name}
    assert len(factors) == len(json_of(home / "output" / "sft" / "run.json")["adapted_layers"])
    assert all(p.abs().max() > 0 for p in factors.values())


def test_the_built_in_chat_format_is_saved_as_a_template(title, home):
    tokenizer = AutoTokenizer.from_pretrained(home / "output" / "sft" / "adapter")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "\n\nHuman: q\n\nAssistant: a<|end|>"
    )


def test_output_directory_holds_nothing_else(title, home):
    names = {path.name for path in (home / "output" / "sft").iterdir()}
    assert names == PAGES | {"run.json", "metrics.jsonl", "adapter", "checkpoints"}


# ---------------------------------------------------------------------------- own data, no launcher


def test_rows_of_several_types_are_trained_on_and_bad_ones_counted(own_data, home):
    audit = json_of(home / "own" / "run" / "run.json")["data"]["audit"]
    assert audit["rows_by_type"] == {
        "prompt-completion": 20,
        "text": 21,
        "conversation": 3,
        "preference": 1,
    }
    assert audit["bad_rows"] == 1
    assert audit["eval_rows"] == 9
    assert (
        own_data.out()
        .splitlines()[0]
        .startswith("model: the bundled tiny model; data: pairs.jsonl")
    )


def test_answers_of_a_template_that_rewrites_them_are_counted_as_samples(own_data, home):
    audit = json_of(home / "own" / "run" / "run.json")["data"]["audit"]
    rows = audit["chat_rows"]["answers"]
    assert rows > 0
    assert audit["answer_samples"] == 2 * rows
    assert f"answers      {rows} rows with {2 * rows} samples" in own_data.out()


@pytest.mark.parametrize("part", ["adapter", "model"])
def test_the_chat_template_that_trained_is_saved_with_its_end_tokens(own_data, home, part):
    tokenizer = AutoTokenizer.from_pretrained(home / "own" / "run" / part)
    ends = GenerationConfig.from_pretrained(home / "own" / "run" / part).eos_token_id
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|end|>", "<|unk|>"]


def test_max_steps_ends_the_run(own_data, home):
    assert [line["step"] for line in metrics(home / "own" / "run", "train")] == [1, 2, 3]


def test_merged_model_is_the_base_with_the_adapter_of_peft(own_data, home):
    ids = AutoTokenizer.from_pretrained(home / "own" / "run" / "model")(
        "Hello.", return_tensors="pt"
    )
    merged = AutoModelForCausalLM.from_pretrained(home / "own" / "run" / "model")
    base = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    with torch.no_grad():
        untrained = base(**ids).logits
        unmerged = peft.PeftModel.from_pretrained(base, str(home / "own" / "run" / "adapter"))
        torch.testing.assert_close(
            merged(**ids).logits, unmerged(**ids).logits, rtol=1e-4, atol=1e-4
        )
        assert (merged(**ids).logits - untrained).abs().max() > 1e-3


# ---------------------------------------------------------------------------- on what is there


def test_earlier_run_is_not_overwritten(own_data, home):
    before = (home / "own" / "run" / "metrics.jsonl").read_bytes()
    done = run(python("--output_dir", "own/run"), home)
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert "own/run" in done.err
    assert "--overwrite_output_dir" in done.err
    assert (home / "own" / "run" / "metrics.jsonl").read_bytes() == before


def test_dry_run_prints_the_options_and_leaves_no_trace(own_data, home, launcher):
    before = sorted(home.rglob("*"))
    options = ["--lora_dim", 8, "--output_dir", "own/run", "--overwrite_output_dir", "--dry_run"]
    running = launcher.start(options, home)
    assert running.wait() == [0], running.output()
    for line in ("--lora_dim 8", "--max_seq_len 128", "--zero_stage 0", "dry run"):
        assert line in running.out()
    for name in ("parameters", "learns", "memory", "packing", "steps", "time", "sample"):
        assert f"\n  {name} " in running.out()
    assert "--adam_beta1" not in running.out()
    lines = running.out().splitlines()
    assert len(lines) <= 27
    assert max(map(len, lines[1:])) <= 80
    assert "step 1/" not in running.out()
    assert sorted(home.rglob("*")) == before


def test_no_epochs_evaluate_the_continued_adapter_in_the_next_free_directory(title, home, launcher):
    options = ["--model_name_or_path", "output/sft", "--num_train_epochs", 0, "--lora_dim", 128]
    options += ["--lora_module_name", "decoder.layers."]  # which names what all-linear does
    running = launcher.start([*options, *DATA], home)
    assert running.wait() == [0], running.output()
    out = home / "output" / "sft-2"
    assert f"output: {out.relative_to(home)}" in running.out()
    assert "with the adapter" in running.out().splitlines()[0]
    (only,) = metrics(out)
    assert (only["kind"], only["step"]) == ("eval", 0)
    last = metrics(home / "output" / "sft", "eval")[-1]
    assert only["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert not (out / "adapter").exists()
    assert json_of(out / "run.json")["status"] == "finished"


@pytest.mark.thorough
def test_no_epochs_and_merge_adapter_write_the_model_that_is_the_adapter_on_its_base(
    title, home, launcher
):
    options = ["--model_name_or_path", "output/sft", "--num_train_epochs", 0, "--merge_adapter"]
    running = launcher.start([*options, "--output_dir", "merged", *SHORT], home)
    assert running.wait() == [0], running.output()
    assert "model written to merged/model; checked: its logits differ from" in running.out()
    base = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    adapted = peft.PeftModel.from_pretrained(base, home / "output" / "sft" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(home / "merged" / "model")
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_two_processes_at_zero_3_continue_the_adapter_with_a_busy_port(title, home):
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices where there is one")
    (home / "sharded" / "adapter").mkdir(parents=True)
    (home / "sharded" / "run.json").write_text("{}")
    (home / "sharded" / "notes.txt").write_text("mine")
    with busy_port():
        done = run(
            deepspeed(
                *["--model_name_or_path", "output/sft/adapter", "--max_steps", "1"],
                *["--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2"],
                *["--deepspeed_config", ROOT / "configs" / "ds" / "zero3.json"],
                *["--output_dir", "sharded", "--overwrite_output_dir", *SHORT],
                launcher=["--num_gpus", "2"],
            ),
            home,
        )
    assert done.code == 0, done.err
    assert done.out.count("model: the bundled tiny model with the adapter") == 1
    record = json_of(home / "sharded" / "run.json")
    assert (record["world_size"], record["config"]["zero_stage"]) == (2, 3)
    assert [line["step"] for line in metrics(home / "sharded", "train")] == [1]
    assert (home / "sharded" / "notes.txt").read_text() == "mine"
    before = peft.load_peft_weights(str(home / "output" / "sft" / "adapter"))
    after = peft.load_peft_weights(str(home / "sharded" / "adapter"))
    assert {name: t.shape for name, t in after.items()} == {n: t.shape for n, t in before.items()}
    moved = max(float((after[name] - before[name]).abs().max()) for name in after)
    # one step of Adam moves no weight by more than the rate, 5e-4
    assert 1e-6 < moved < 1e-3


@pytest.mark.thorough
def test_dropout_is_drawn_from_the_seed(tmp_path, launcher):
    def losses(seed, name):
        options = [
            *["--lora_dim", 4, "--dropout", 0.3, "--seed", seed, "--max_steps", 2],
            *["--per_device_train_batch_size", 2, *SHORT, "--output_dir", name],
        ]
        running = launcher.start(options, tmp_path)
        assert running.wait() == [0], running.output()
        return [line["loss"] for line in metrics(tmp_path / name, "train")]

    first = losses(5, "a")
    assert losses(5, "b") == first
    assert losses(6, "c") != first
