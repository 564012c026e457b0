"""Adapters that come and go while a server answers, and tokens in and out, as vLLM has them."""

import math
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dschat_lora.addons.serving.config import ServeConfig
from dschat_lora.assets import BUNDLED_MODEL
from helpers.served import QUESTIONS, peft_greedy, running_server, send, write_run

pytest.importorskip("uvicorn", reason="the extra [serving] is not installed")

PROMPT = f"\n\nHuman: {QUESTIONS[2]}\n\nAssistant:"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    home = tmp_path_factory.mktemp("runs")
    return [write_run(home / name, seed=seed) for seed, name in enumerate(("a", "b"), start=1)]


@pytest.fixture(scope="module")
def address(runs):
    from dschat_lora.addons.serving.server import make_service

    config = ServeConfig(
        models=("base",), allow_runtime_lora_updating=True, logprobs_mode="processed_logprobs"
    )
    with running_server(make_service(config, runs[0] / "votes.jsonl")) as url:
        yield url


def load(address, name, path):
    body = {"lora_name": name, "lora_path": str(path)}
    return send(address, "POST", "/v1/load_lora_adapter", body)


def unload(address, name):
    return send(address, "POST", "/v1/unload_lora_adapter", {"lora_name": name})


def complete(address, **fields):
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **fields}
    return send(address, "POST", "/v1/completions", body)


def models(address):
    return [each["id"] for each in send(address, "GET", "/v1/models")[1]["data"]]


@pytest.mark.smoke
def test_adapters_come_and_go_and_each_answers_as_in_peft(address, runs):
    for name, run in zip("xy", runs, strict=True):
        assert load(address, name, run / "adapter")[0] == 200
    assert models(address) == ["base", "x", "y"]
    for name, run in {"base": None, "x": runs[0], "y": runs[1]}.items():
        status, answer = complete(address, model=name)
        assert (status, answer["model"]) == (200, name)
        assert answer["choices"][0]["text"] == peft_greedy(run, PROMPT, 24)
    status, again = load(address, "x", runs[1] / "adapter")
    assert (status, "already been loaded" in again["error"]["message"]) == (400, True)
    assert unload(address, "x")[0] == 200
    assert models(address) == ["base", "y"]
    assert complete(address, model="x")[0] == 404
    # The name is free for another one.
    assert load(address, "x", runs[1] / "adapter")[0] == 200
    answers = [complete(address, model=name)[1]["choices"][0]["text"] for name in "xy"]
    assert answers[0] == answers[1]
    assert [unload(address, name)[0] for name in "xy"] == [200, 200]
    assert send(address, "GET", "/v1/models/base")[1]["max_model_len"] == 512


def test_what_cannot_be_loaded_or_unloaded_is_refused(address, runs, monkeypatch):
    from dschat_lora.addons.serving import server

    def is_adapter_directory(path, known=server.is_adapter_directory):
        if "hidden" in Path(path).parts:  # root may read all
            raise PermissionError(13, "Permission denied", str(path))
        return known(path)

    monkeypatch.setattr(server, "is_adapter_directory", is_adapter_directory)
    hidden = runs[0].parent / "hidden"
    refused = {
        **{
            kind: (load(address, "z", path), 400, "is not an adapter that can be read here")
            for kind, path in {
                **{"nowhere": runs[0] / "nowhere", "a long name": "x" * 5000},
                **{"a long path": "/a" * 3000, "no name": "a\x00b", "somebody's": runs[0].parent},
                **{"a file": runs[0] / "run.json", "hidden": hidden},
            }.items()
        },
        "a whole model": (load(address, "z", BUNDLED_MODEL), 400, "is a full model"),
        "no path": (load(address, "z", ""), 400, "lora_name and lora_path are wanted"),
        "the base": (load(address, "base", runs[0] / "adapter"), 400, "already been loaded"),
        "gone": (unload(address, "z"), 404, "no adapter 'z' came at run time"),
        "of the command line": (unload(address, "base"), 404, "no adapter 'base'"),
    }
    for name, ((status, body), expected, words) in refused.items():
        assert status == expected, name
        assert words in body["error"]["message"], name
    assert models(address) == ["base"]


def test_the_adapter_that_was_asked_longest_ago_goes_when_there_are_too_many(runs):
    from dschat_lora.addons.serving.server import make_service

    config = ServeConfig(models=("base",), allow_runtime_lora_updating=True, max_loras=2)
    with running_server(make_service(config, runs[0] / "votes.jsonl")) as address:
        for name in "xy":
            assert load(address, name, runs[0] / "adapter")[0] == 200
        assert complete(address, model="x", max_tokens=1)[0] == 200
        assert load(address, "z", runs[1] / "adapter")[0] == 200
        assert models(address) == ["base", "x", "z"]
        assert complete(address, model="y")[0] == 404
        assert unload(address, "y")[0] == 404
        assert load(address, "y", runs[1] / "adapter")[0] == 200
        assert models(address) == ["base", "z", "y"]


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ({"base_bits": 4}, "trained on a 4-bit base, .* start the server with --base"),
        ({"base_fingerprint": 32 * "0"}, "trained on other weight files than"),
    ],
)
def test_an_adapter_of_another_base_is_refused(address, tmp_path, base, words):
    write_run(tmp_path, seed=1, **base)
    status, body = load(address, "z", tmp_path / "adapter")
    assert status == 400
    assert re.search(words, body["error"]["message"]), body
    assert models(address) == ["base"]


def test_a_server_takes_no_adapters_unless_it_is_told_to(runs):
    from dschat_lora.addons.serving.server import make_service

    config = ServeConfig(models=("base",))
    with running_server(make_service(config, runs[0] / "votes.jsonl")) as address:
        assert load(address, "x", runs[0] / "adapter")[0] == 404
        assert unload(address, "base")[0] == 404
        # Log-probabilities are the model's own, whatever tokens are drawn from.
        _, body = complete(address, max_tokens=1, temperature=1, top_k=1, logprobs=0)
        assert body["choices"][0]["logprobs"]["token_logprobs"][0] < -0.01


def test_tokens_are_given_and_end_where_the_request_says(address):
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    ids = tokenizer(PROMPT)["input_ids"]
    _, plain = complete(address, prompt=ids, return_token_ids=True, logprobs=0)
    (choice,) = plain["choices"]
    tokens = choice["token_ids"]
    assert choice["prompt_token_ids"] == ids
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == choice["text"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(tokens)
    _, cut = complete(address, prompt=ids, return_token_ids=True, stop_token_ids=[tokens[2]])
    first = tokens.index(tokens[2])
    assert cut["choices"][0]["token_ids"] == tokens[: first + 1]
    assert cut["choices"][0]["finish_reason"] == "stop"
    _, on = complete(address, prompt=ids, return_token_ids=True, ignore_eos=True)
    assert on["choices"][0]["token_ids"][: len(tokens)] == tokens
    assert len(on["choices"][0]["token_ids"]) == 24
    assert "token_ids" not in complete(address)[1]["choices"][0]


def test_processed_log_probabilities_are_those_of_what_was_drawn_from(address):
    call = {"max_tokens": 1, "logprobs": 3, "seed": 5}
    _, one = complete(address, temperature=1, top_k=1, **call)
    assert one["choices"][0]["logprobs"]["token_logprobs"] == [0.0]
    tables = [
        complete(address, temperature=t, **call)[1]["choices"][0]["logprobs"]["top_logprobs"][0]
        for t in (1, 2)
    ]
    likeliest = [sorted(each.values(), reverse=True)[:2] for each in tables]
    gaps = [first - second for first, second in likeliest]
    assert gaps[1] == pytest.approx(gaps[0] / 2, rel=1e-4)
    assert not math.isclose(gaps[0], 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop_token_ids": [1024]}, "stop_token_ids must be up to 16 tokens in [0, 1023]"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be up to 16 tokens"),
        ({"return_token_ids": True, "stream": True}, "return_token_ids is for stream: false"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"repetition_penalty": 1.5}, "repetition_penalty 1.5 is not supported here"),
        ({"min_p": 0.1}, "min_p 0.1 is not supported here"),
    ],
)
def test_wrong_fields_are_named(address, fields, words):
    status, body = complete(address, **fields)
    assert (status, words in body["error"]["message"]) == (400, True), body
