"""dschat-lora generate, eval, merge and inspect, against stock transformers and PEFT."""

import json
import math
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from dschat_lora import __main__ as command
from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.checkpoint.export import save_adapter
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.generation import sampling
from dschat_lora.models.build import build_causal_lm, build_reward_model
from dschat_lora.models.loading import load_tokenizer
from dschat_lora.models.source import find_model
from dschat_lora.runtime.describe import describe
from dschat_lora.supervised import generate
from helpers.step1 import write_adapter_config, write_jsonl

CARD = {"data": {}, "metrics": {}, "versions": {}}
PROMPTS = [
    "\n\nHuman: What is 2 plus 3?\n\nAssistant:",
    "\n\nHuman: I am Leo. Sort these numbers: 1 3 8.\n\nAssistant:",
    "Human",
]
PAIRS = [
    {"prompt": PROMPTS[0], "chosen": " Hello, 2 plus 3 is 5.", "rejected": " 6"},
    {
        "prompt": PROMPTS[1],
        "chosen": " no",
        "rejected": " Hello Leo, the sorted numbers are 1 3 8.",
    },
    {"prompt": PROMPTS[2], "chosen": " one", "rejected": " two three"},
]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Runs ``sft`` and ``reward`` with adapters that change what the bundled model says."""
    directory = tmp_path_factory.mktemp("runs")
    source, config = find_model(None), ModelConfig()
    tokenizer = load_tokenizer(source.tokenizer, config)
    for name, build, task in (
        ("sft", build_causal_lm, "CAUSAL_LM"),
        ("reward", build_reward_model, "SEQ_CLS"),
    ):
        adapted = build(
            source,
            tokenizer,
            config,
            LoraConfig(lora_dim=4, target_modules=("q_proj", "v_proj")),
            dtype=torch.float32,
            seed=0,
            meta=False,
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for each, parameter in adapted.model.named_parameters():
                if each.endswith("lora_B"):
                    parameter.normal_(std=0.05, generator=generator)
        save_adapter(
            directory / name / "adapter",
            adapted.model,
            adapted.lora,
            base=source.base,
            tokenizer=tokenizer,
            card=CARD,
            task_type=task,
        )
    write_jsonl(directory / "pairs.jsonl", PAIRS)
    write_jsonl(directory / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    return directory


@pytest.fixture(scope="module")
def stock(home):
    """(model, tokenizer) of the run ``sft`` by PEFT alone."""
    base = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    model = peft.PeftModel.from_pretrained(base, home / "sft" / "adapter").eval()
    return model, AutoTokenizer.from_pretrained(home / "sft" / "adapter")


@pytest.fixture
def verb(home, monkeypatch, capsys):
    """``verb(*argv)``: the output of ``dschat-lora`` in the home of the runs."""

    def run(*argv, code=0):
        monkeypatch.chdir(home)
        monkeypatch.setattr("sys.argv", ["dschat-lora", *map(str, argv)])
        capsys.readouterr()
        ended = 0
        try:
            command.main()
        except SystemExit as end:
            ended = end.code
        out, err = capsys.readouterr()
        assert ended == code, err
        return out

    return run


@pytest.fixture
def refused_verb(home, monkeypatch, capsys):
    """``refused_verb(*argv)``: the one line of ``dschat-lora`` that ends with exit code 2."""

    def run(*argv):
        monkeypatch.chdir(home)
        monkeypatch.setattr("sys.argv", ["dschat-lora", *map(str, argv)])
        with pytest.raises(SystemExit, match="2"):
            command.main()
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


def test_an_answer_that_cannot_be_drawn_is_left_out(verb, monkeypatch):
    choose, draws = sampling.sample_tokens, []

    def spoilt(logits, uniform, options):
        chosen = choose(logits, uniform, options)
        draws.append(len(chosen))
        if len(draws) == 2:
            chosen[0] = sampling.NO_TOKEN
        return chosen

    whole = verb("generate", "sft", *PROMPTS, "--max_new_tokens", "4", "--json").splitlines()
    for more in ((), ("--json",)):
        draws.clear()
        with monkeypatch.context() as patched:
            patched.setattr(sampling, "sample_tokens", spoilt)
            found = verb("generate", "sft", *PROMPTS, "--max_new_tokens", "4", *more).splitlines()
        if more:
            rows = [json.loads(line) for line in found]
            (missing,) = [n for n, row in enumerate(rows) if row["response"] is None]
            assert rows[missing] == {"prompt": PROMPTS[missing], "response": None}
            assert [x for n, x in enumerate(found) if n != missing] == [
                x for n, x in enumerate(whole) if n != missing
            ]
        else:
            assert found.count("(no token can be drawn)") == 1


def test_a_weight_that_is_not_finite_is_named_by_generate(refused_verb, monkeypatch):
    load = generate.load_policy

    def spoilt(config):
        policy = load(config)
        policy.model.get_output_embeddings().weight.data[3] = torch.inf
        return policy

    monkeypatch.setattr(generate, "load_policy", spoilt)
    line = refused_verb("generate", "sft", *PROMPTS)
    assert line.startswith(
        "error: no token can be drawn: the model's logits are not finite, as its"
    )
    assert ".weight holds" in line


def greedy(model, tokenizer, prompt):
    ids = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    return output[0, ids["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_answers_are_those_of_transformers_token_for_token(verb, stock, batch):
    lines = verb(
        *("generate", "sft", *PROMPTS, "--max_new_tokens", NEW_TOKENS, "--json"),
        *("--per_device_eval_batch_size", batch),
    ).splitlines()
    found = [json.loads(line) for line in lines]
    assert [each["prompt"] for each in found] == PROMPTS
    for each, prompt in zip(found, PROMPTS, strict=True):
        expected = greedy(*stock, prompt)
        assert each["tokens"] == expected
        assert each["ended"] == (expected[-1] == stock[1].eos_token_id)
        assert each["response"] == stock[1].decode(expected, skip_special_tokens=True)


def test_prompts_of_a_file_are_answered_like_those_of_the_line(verb, home):
    typed = verb("generate", "sft", *PROMPTS, "--max_new_tokens", NEW_TOKENS, "--json")
    verb(
        *("generate", "sft/adapter", "--data_path", "prompts.jsonl"),
        *("--max_new_tokens", NEW_TOKENS, "--output_path", "answers.jsonl"),
    )
    assert (home / "answers.jsonl").read_text() == typed


def test_chat_message_is_rendered_as_in_training(verb):
    (line,) = verb(
        *("generate", "sft", "What is 2 plus 3?", "--chat", "--max_new_tokens", 2, "--json")
    ).splitlines()
    assert json.loads(line)["prompt"] == PROMPTS[0]


def test_draws_are_a_function_of_the_seed_and_differ_within_a_prompt(verb):
    words = ["generate", "sft", PROMPTS[2], "--do_sample", "--num_return_sequences", 4, "--json"]
    words += ["--max_new_tokens", NEW_TOKENS]
    first, again, other = (verb(*words, "--seed", seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({json.loads(line)["response"] for line in first.splitlines()}) > 1


def test_prompt_longer_than_the_room_has_no_answer(verb):
    out = verb("generate", "sft", "a b " * 300, "Hi", "--json", "--max_new_tokens", 2)
    long, short = map(json.loads, out.splitlines())
    assert long["response"] is None
    assert short["response"] is not None


@torch.no_grad()
def slow_logprob(model, tokenizer, prompt, answer):
    """Sum of log-probabilities of the answer and its end, and their number, one token a time."""
    ids = tokenizer(prompt + answer)["input_ids"] + [tokenizer.eos_token_id]
    start = len(tokenizer(prompt)["input_ids"])
    logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    total = 0.0
    for place in range(start, len(ids)):
        row = logits[place - 1]
        total += float(row[ids[place]] - row.logsumexp(-1))
    return total, len(ids) - start


def test_eval_of_a_language_model_is_that_of_a_slow_loop(verb, stock):
    found = json.loads(verb("eval", "sft", "pairs.jsonl", "--json"))
    chosen = [slow_logprob(*stock, row["prompt"], row["chosen"]) for row in PAIRS]
    rejected = [slow_logprob(*stock, row["prompt"], row["rejected"]) for row in PAIRS]
    total, tokens = (sum(each) for each in zip(*chosen, strict=True))
    wins = [c[0] > r[0] for c, r in zip(chosen, rejected, strict=True)]
    assert 0 < sum(wins) < 3  # the measure tells something
    assert found["tokens"] == tokens
    assert found["perplexity"] == pytest.approx(math.exp(-total / tokens), rel=1e-4)
    assert found["accuracy"] == pytest.approx(sum(wins) / 3)
    assert found["chosen_logprob"] == pytest.approx(total / 3, rel=1e-4)
    margins = [c[0] - r[0] for c, r in zip(chosen, rejected, strict=True)]
    assert found["margin"] == pytest.approx(sum(margins) / 3, rel=1e-3)


@pytest.fixture(scope="module")
def judge(home):
    """Scores of texts by the run ``reward`` in PEFT, one at a time."""
    base = AutoModelForSequenceClassification.from_pretrained(BUNDLED_MODEL, num_labels=1)
    model = peft.PeftModel.from_pretrained(base, home / "reward" / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(home / "reward" / "adapter")

    @torch.no_grad()
    def score(text):
        ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])

    return score


JUDGE = """
def length(prompts, responses, answer):
    return [len(text) + len(number) for text, number in zip(responses, answer)]

def some(response, answer):
    return None if answer == "4" else float(answer)

def text(responses):
    return ["good"] * len(responses)
"""


@pytest.fixture
def sums(home):
    """Prompts alone, each with a column that a judge reads."""
    (home / "judges.py").write_text(JUDGE)
    rows = [{"prompt": prompt, "answer": n} for prompt, n in zip(PROMPTS, "475", strict=False)]
    write_jsonl(home / "sums.jsonl", rows)
    return rows


def test_judge_scores_the_models_own_answers_with_mean_and_standard_error(verb, stock, sums):
    options = ["--judge_function", "judges:length", "--max_new_tokens", NEW_TOKENS, "--json"]
    found = json.loads(verb("eval", "sft", "sums.jsonl", *options))
    model, tokenizer = stock
    answers = [greedy(model, tokenizer, row["prompt"]) for row in sums]
    scores = [len(tokenizer.decode(ids, skip_special_tokens=True)) + 1 for ids in answers]
    mean = sum(scores) / len(scores)
    spread = sum((each - mean) ** 2 for each in scores) / (len(scores) - 1)
    assert found["judge"] == pytest.approx(mean)
    assert found["judge_standard_error"] == pytest.approx((spread / len(scores)) ** 0.5)
    assert found["answers"] == len(scores)
    assert "perplexity" not in found


def test_answer_that_the_judge_leaves_out_does_not_count(verb, sums):
    options = ["--judge_function", "judges:some", "--max_new_tokens", 2, "--json"]
    found = json.loads(verb("eval", "sft", "sums.jsonl", *options))
    scores = [float(row["answer"]) for row in sums if row["answer"] != "4"]
    assert found["answers"] == len(scores)
    assert found["judge"] == pytest.approx(sum(scores) / len(scores))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("sft sums.jsonl --judge_function judges", "module:function such as"),
        ("sft sums.jsonl --judge_function nowhere:f", "there is no module nowhere"),
        ("sft sums.jsonl --judge_function judges:none", "judges has no function none"),
        ("sft pairs.jsonl --judge_function judges:length", "judges:length asks for answer"),
        ("sft sums.jsonl --judge_function judges:text", "returned 'good' for the prompt"),
        ("sft sums.jsonl --judge_function builtin:none", "none"),
        ("reward pairs.jsonl --judge_function judges:length", "is a reward model"),
    ],
)
def test_judge_that_cannot_be_used_is_named(refused_verb, sums, argv, words):
    assert words in refused_verb("eval", *argv.split(), "--max_new_tokens", 2)


def test_eval_of_a_reward_model_is_that_of_peft(verb, judge):
    found = json.loads(verb("eval", "reward", "pairs.jsonl", "--json"))
    chosen = [judge(row["prompt"] + row["chosen"]) for row in PAIRS]
    rejected = [judge(row["prompt"] + row["rejected"]) for row in PAIRS]
    assert found["chosen_score"] == pytest.approx(sum(chosen) / 3, abs=1e-4)
    assert found["rejected_score"] == pytest.approx(sum(rejected) / 3, abs=1e-4)
    wins = [c > r for c, r in zip(chosen, rejected, strict=True)]
    assert found["accuracy"] == pytest.approx(sum(wins) / 3)


def test_eval_scores_the_models_own_answers(verb, stock, judge):
    found = json.loads(
        verb(
            *("eval", "sft", "pairs.jsonl", "--reward_model", "reward", "--json"),
            *("--max_new_tokens", NEW_TOKENS),
        )
    )
    answers = [stock[1].decode(greedy(*stock, p), skip_special_tokens=True) for p in PROMPTS]
    expected = [judge(prompt + text) for prompt, text in zip(PROMPTS, answers, strict=True)]
    assert found["reward"] == pytest.approx(sum(expected) / 3, abs=1e-4)


# ---------------------------------------------------------------------------- merge


def test_merged_directory_is_the_rounded_sum_and_states_its_deviation(verb, home, stock):
    found = json.loads(verb("merge", "sft", "--json"))
    assert Path(found["directory"]) == home / "sft" / "model"
    assert found["dtype"] == "bf16"
    merged = AutoModelForCausalLM.from_pretrained(home / "sft" / "model", dtype="auto")
    assert merged.dtype == torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    whole = peft.PeftModel.from_pretrained(base, home / "sft" / "adapter").merge_and_unload()
    for name, tensor in whole.state_dict().items():
        own = merged.state_dict()[name]
        # The sum in fp32, rounded once: at most one unit in the last place beside PEFT's order.
        torch.testing.assert_close(own, tensor.bfloat16(), rtol=2**-8, atol=0)
    assert 0 < found["kl_nats_per_token"] < 0.01
    assert 0 < found["max_abs_logit"] < 1
    answer = greedy(merged, stock[1], PROMPTS[0])
    assert isinstance(answer, list)


def test_merge_in_fp32_differs_by_rounding_alone(verb, home):
    found = json.loads(
        verb("merge", "reward/adapter", "--output_dir", "whole", "--dtype", "fp32", "--json")
    )
    assert found["kl_nats_per_token"] < 1e-9
    assert (home / "whole" / "config.json").is_file()
    assert "SequenceClassification" in (home / "whole" / "config.json").read_text()


def test_merge_that_moves_the_model_too_far_is_refused_and_leaves_nothing(verb, home):
    verb("merge", "sft", "--output_dir", "far", "--merge_max_kl", "1e-12", code=2)
    assert not (home / "far").exists()


def test_merge_overwrites_models_alone(verb, home):
    (home / "taken").mkdir()
    (home / "taken" / "notes.txt").write_text("mine")
    verb("merge", "sft", "--output_dir", "taken", "--overwrite_output_dir", code=2)
    assert (home / "taken" / "notes.txt").read_text() == "mine"


# ---------------------------------------------------------------------------- inspect, push, export


def test_inspect_says_what_an_adapter_is(verb, home):
    found = json.loads(verb("inspect", "sft/adapter", "--json"))
    assert (found["kind"], found["rank"], found["task"]) == ("adapter", 4, "language model")
    assert found["layers"] == ["q_proj", "v_proj"]
    tensors = [*(home / "sft" / "adapter").glob("*.safetensors")]
    assert len(tensors) == 1
    layers = json.loads((BUNDLED_MODEL / "config.json").read_text())["num_hidden_layers"]
    width = json.loads((BUNDLED_MODEL / "config.json").read_text())["hidden_size"]
    assert found["tensors"] == 4 * layers
    assert found["parameters"] == layers * 4 * width * 4
    assert found["damage"] is None


def test_inspect_says_what_of_a_run_learns(tmp_path):
    learns = {"actor": {"words": "q_proj of 4 layers; frozen: norms"}, "critic": None}
    (tmp_path / "run.json").write_text(json.dumps({"stage": "rlhf", "learns": learns}))
    assert describe(tmp_path)["learns"] == {"actor": "q_proj of 4 layers; frozen: norms"}


def test_inspect_names_the_weights_of_experts_that_learn(tmp_path):
    write_adapter_config(tmp_path, target_parameters=["down_proj", "gate_up_proj"])
    assert describe(tmp_path)["experts"] == ["down_proj", "gate_up_proj"]


def test_inspect_of_a_damaged_adapter_has_code_1(verb, home, tmp_path):
    copy = tmp_path / "adapter"
    copy.mkdir()
    for path in (home / "sft" / "adapter").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = copy / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 5'))
    found = json.loads(verb("inspect", copy, "--json", code=1))
    assert "adapter_config.json" in found["damage"]


def test_push_says_what_it_would_upload(verb, home, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = json.loads(verb("push", "reward", "me/judge", "--json"))
    adapter = home / "reward" / "adapter"
    assert found["repo"] == "me/judge"
    assert found["files"] == {path.name: path.stat().st_size for path in adapter.iterdir()}
    assert found["uploaded"] is False


def test_export_runs_the_converter_and_says_what_to_type_without_one(verb, home, tmp_path):
    found = json.loads(verb("export", "sft/adapter", "--json", code=1))
    assert found["written"] is None
    assert found["commands"][-1].startswith("python llama.cpp/convert_lora_to_gguf.py sft/adapter ")
    script = tmp_path / "convert_lora_to_gguf.py"
    script.write_text("import sys; open(sys.argv[3], 'w').write(' '.join(sys.argv[1:]))")
    found = json.loads(
        verb("export", "sft/adapter", "--llama_cpp", tmp_path, "--outtype", "q8_0", "--json")
    )
    base = BUNDLED_MODEL.resolve()
    written = home / "sft" / "adapter.gguf"
    assert found["written"] == str(written)
    staged = written.with_name(".adapter.gguf.tmp")
    assert written.read_text() == (f"sft/adapter --outfile {staged} --outtype q8_0 --base {base}")


def test_export_that_fails_leaves_the_file_that_was_there(verb, home, tmp_path):
    script = tmp_path / "convert_lora_to_gguf.py"
    script.write_text("import sys; open(sys.argv[3], 'w').write('half'); sys.exit(3)")
    written = tmp_path / "there.gguf"
    written.write_text("whole")
    verb(*("export", "sft/adapter", "--llama_cpp", tmp_path, "--output_path", written), code=2)
    assert written.read_text() == "whole"
    assert {path.name for path in tmp_path.iterdir()} >= {"there.gguf", script.name}
    assert not list(tmp_path.glob(".*.tmp"))
