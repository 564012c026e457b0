"""dschat-lora generate and merge, against stock transformers and PEFT."""

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.generation import sampling
from dschat_lora.supervised import generate
from helpers.trained import NEW_TOKENS, PROMPTS, greedy, home, stock_policy, verb

__all__ = ["home", "verb"]


@pytest.fixture(scope="module")
def stock(home):
    return stock_policy(home)


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
            printed = verb("generate", "sft", *PROMPTS, "--max_new_tokens", "4", *more).splitlines()
        if more:
            rows = [json.loads(line) for line in printed]
            (missing,) = [n for n, row in enumerate(rows) if row["response"] is None]
            assert rows[missing] == {"prompt": PROMPTS[missing], "response": None}
            assert [x for n, x in enumerate(printed) if n != missing] == [
                x for n, x in enumerate(whole) if n != missing
            ]
        else:
            assert printed.count("(no token can be drawn)") == 1


def test_a_weight_that_is_not_finite_is_named_by_generate(verb, monkeypatch):
    load = generate.load_policy

    def spoilt(*configs):
        policy = load(*configs)
        policy.model.get_output_embeddings().weight.data[3] = torch.inf
        return policy

    monkeypatch.setattr(generate, "load_policy", spoilt)
    line = verb.refused("generate", "sft", *PROMPTS)
    assert line.startswith(
        "error: no token can be sampled: the model's logits are not finite, as its"
    )
    assert ".weight holds" in line


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_answers_are_those_of_transformers_token_for_token(verb, stock, batch):
    lines = verb(
        *("generate", "sft", *PROMPTS, "--max_new_tokens", NEW_TOKENS, "--json"),
        *("--per_device_eval_batch_size", batch),
    ).splitlines()
    printed = [json.loads(line) for line in lines]
    assert [each["prompt"] for each in printed] == PROMPTS
    for each, prompt in zip(printed, PROMPTS, strict=True):
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
    words = [
        "generate",
        "sft",
        PROMPTS[2],
        "--temperature",
        1,
        "--num_return_sequences",
        4,
        "--json",
    ]
    words += ["--max_new_tokens", NEW_TOKENS]
    first, again, other = (verb(*words, "--seed", seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({json.loads(line)["response"] for line in first.splitlines()}) > 1


def test_prompt_longer_than_the_room_has_no_answer(verb):
    out = verb("generate", "sft", "a b " * 300, "Hi", "--json", "--max_new_tokens", 2)
    long, short = map(json.loads, out.splitlines())
    assert long["response"] is None
    assert short["response"] is not None


# ---------------------------------------------------------------------------- merge


def test_merged_directory_is_the_rounded_sum_and_states_its_deviation(verb, home, stock):
    printed = json.loads(verb("merge", "sft", "--dtype", "bf16", "--json"))
    assert Path(printed["directory"]) == home / "sft" / "model"
    assert printed["dtype"] == "bf16"
    merged = AutoModelForCausalLM.from_pretrained(home / "sft" / "model", dtype="auto")
    assert merged.dtype == torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    whole = peft.PeftModel.from_pretrained(base, home / "sft" / "adapter").merge_and_unload()
    for name, tensor in whole.state_dict().items():
        own = merged.state_dict()[name]
        # The sum in fp32, rounded once: at most one unit in the last place beside PEFT's order.
        torch.testing.assert_close(own, tensor.bfloat16(), rtol=2**-8, atol=0)
    assert 0 < printed["kl_nats_per_token"] < 0.01
    assert 0 < printed["max_abs_logit"] < 1
    answer = greedy(merged, stock[1], PROMPTS[0])
    assert isinstance(answer, list)


def test_merge_is_in_the_type_of_the_base_and_in_fp32_differs_by_rounding_alone(verb, home):
    printed = json.loads(verb("merge", "reward/adapter", "--output_dir", "whole", "--json"))
    assert printed["dtype"] == "fp32"
    assert printed["kl_nats_per_token"] < 1e-9
    assert (home / "whole" / "config.json").is_file()
    assert "SequenceClassification" in (home / "whole" / "config.json").read_text()


def test_merge_that_moves_the_model_too_far_is_refused_and_leaves_nothing(verb, home):
    verb(
        "merge", "sft", "--output_dir", "far", *"--dtype bf16 --merge_max_kl 1e-12".split(), code=2
    )
    assert not (home / "far").exists()


def test_merge_overwrites_models_alone(verb, home):
    (home / "taken").mkdir()
    (home / "taken" / "notes.txt").write_text("mine")
    verb("merge", "sft", "--output_dir", "taken", "--overwrite_output_dir", code=2)
    assert (home / "taken" / "notes.txt").read_text() == "mine"
