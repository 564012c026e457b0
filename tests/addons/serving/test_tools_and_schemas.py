"""Tools, log-probabilities and JSON schemas, as OpenAI's client sees them."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat_lora.addons.serving import decoder as decoder_module
from dschat_lora.addons.serving.config import ServeConfig
from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.config.stages import InferenceConfig
from helpers.served import running_server, send

pytest.importorskip("uvicorn", reason="the extra [serving] is not installed")
pytest.importorskip("llguidance", reason="the extra [serving] is not installed")
openai = pytest.importorskip("openai", reason="openai's client is not installed")
jsonschema = pytest.importorskip("jsonschema")

CHAT = "/v1/chat/completions"
# The form of Qwen3, in short.
TEMPLATE = """{%- if tools %}Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}
{%- for message in messages %}
{{- message.role }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}
{{- call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}
</tool_call>
{%- endfor %}{{ eos_token if message.role == "assistant" }}
{% endfor %}
{%- if add_generation_prompt %}assistant:{% if thinks %} <think>{% endif %}{% endif %}"""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"$ref": "#/$defs/B"},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": {"B": {"enum": [1, 2]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
HI = [{"role": "user", "content": "What is 1 plus 2?"}]
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    from dschat_lora.addons.serving.server import make_service

    directory = tmp_path_factory.mktemp("serve")
    (directory / "chat.jinja").write_text(TEMPLATE)
    config = ServeConfig(
        models=("base",),
        loading=InferenceConfig(chat_template=str(directory / "chat.jinja")),
        max_new_tokens=150,
        temperature=1.0,
    )
    return make_service(config, directory / "votes.jsonl")


@pytest.fixture(scope="module")
def address(service):
    with running_server(service) as url:
        yield url


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def says(monkeypatch, service):
    """Has the decoder choose the tokens of a text, whatever the logits are."""
    tokenizer = service.models["base"].tokenizer

    def script(text):
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        count = iter(range(10**6))
        monkeypatch.setattr(
            decoder_module, "sample_each", lambda logits, *_: [ids[next(count)]] * len(logits)
        )

    return script


def collected(stream):
    """What a stream's chunks are together: contents, calls, log-probabilities, finishes."""
    by_choice = {}
    for chunk in stream:
        for choice in chunk.choices:
            whole = by_choice.setdefault(choice.index, {"text": "", "calls": [], "logprobs": []})
            whole["text"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.index == len(whole["calls"])
                whole["calls"].append((call.id, call.function.name, call.function.arguments))
            if choice.logprobs is not None:
                whole["logprobs"] += choice.logprobs.content
            whole["finish"] = choice.finish_reason
    return by_choice


def as_collected(answer):
    return {
        choice.index: {
            "text": choice.message.content or "",
            "calls": [
                (call.id, call.function.name, call.function.arguments)
                for call in choice.message.tool_calls or []
            ],
            "logprobs": choice.logprobs.content if choice.logprobs is not None else [],
            "finish": choice.finish_reason,
        }
        for choice in answer.choices
    }


# Tools


def test_calls_of_a_free_answer_are_parsed_and_streamed_whole(client, says):
    asked = {"model": "base", "messages": HI, "tools": [ADD, NOW]}
    says(TWO_CALLS)
    answer = client.chat.completions.create(**asked)
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == ("Let me see.", "tool_calls")
    calls = [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]
    assert calls == [("add", {"a": 1, "b": 2}), ("now", {})]
    ids = [call.id for call in message.tool_calls]
    assert len({*ids}) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    says(TWO_CALLS)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert collected(chunks) == as_collected(answer)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert len(texts) > 2, "text before a call is not held back"
    says(TWO_CALLS)
    first = client.chat.completions.create(**asked, parallel_tool_calls=False)
    assert first.choices[0].message.tool_calls == message.tool_calls[:1]


def test_text_that_only_begins_like_a_call_stays_text(client, says):
    text = 'Write <tool_call> or {"name": 1}.'
    for stream in (False, True):
        says(text)
        answer = client.chat.completions.create(
            model="base", messages=HI, tools=[ADD], stream=stream
        )
        (answered,) = (collected(answer) if stream else as_collected(answer)).values()
        assert answered == {"text": text, "calls": [], "logprobs": [], "finish": "stop"}


def test_without_tools_or_where_none_may_be_called_an_answer_is_text(client, says):
    for fields in ({}, {"tools": [ADD], "tool_choice": "none"}):
        says(TWO_CALLS)
        answer = client.chat.completions.create(model="base", messages=HI, **fields)
        assert answer.choices[0].message.content == TWO_CALLS
        assert answer.choices[0].message.tool_calls is None


def test_tools_reach_the_template_and_special_tokens_in_them_stay_text(service):
    model = service.models["base"]
    evil = {"type": "function", "function": {"name": "f", "description": "a <|end|> b"}}
    ids = model.chat_ids(HI, {"tools": [evil], "chat_template_kwargs": {"thinks": True}})
    text = model.tokenizer.decode(ids, skip_special_tokens=False)
    assert '"description": "a <|end|> b"' in text
    assert text.endswith("assistant: <think>")
    assert model.tokenizer.eos_token_id not in ids
    with pytest.raises(ValueError, match="must not hold the special token"):
        model.chat_ids(HI, {"chat_template_kwargs": {"thinks": "<|end|>"}})


def test_an_answer_goes_back_as_openai_s_client_dumps_it(client, service, says):
    asked = {"model": "base", "tools": [ADD, NOW]}
    says(TWO_CALLS.removeprefix("Let me see.\n"))
    message = client.chat.completions.create(**asked, messages=HI).choices[0].message
    assert message.content is None
    turns = [*HI, message.model_dump()]
    turns += [{"role": "tool", "tool_call_id": c.id, "content": "3"} for c in message.tool_calls]
    says("It is 3.")
    answer = client.chat.completions.create(**asked, messages=turns)
    assert answer.choices[0].message.content == "It is 3."
    text = service.models["base"].tokenizer.decode(
        service.models["base"].chat_ids(turns, {"tools": [ADD, NOW]})
    )
    assert '{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in text
    assert text.endswith("tool: 3\nassistant:")


def test_a_call_that_is_sent_back_is_read_alike_however_its_arguments_are_written(client):
    def prompt_of(arguments, name="add"):
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
        called = [
            *(*HI, {"role": "assistant", "tool_calls": [call]}),
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ]
        answer = client.chat.completions.create(
            model="base",
            messages=called,
            tools=[ADD, NOW],
            max_tokens=1,
            extra_body={"return_token_ids": True},
        )
        assert "prompt_token_ids" not in answer.choices[0].model_dump()
        return answer.prompt_token_ids  # as vLLM: at the top of a chat answer

    expected = prompt_of({"a": 1, "b": 2})
    assert prompt_of('{"a":1,"b":2}') == prompt_of('{ "a": 1, "b": 2 }') == expected
    assert prompt_of("", "now") == prompt_of("{}", "now") == prompt_of({}, "now")
    for malformed in ('{"a": 1', "[1]"):
        with pytest.raises(openai.BadRequestError, match="message 2: the arguments of") as e:
            prompt_of(malformed)
        assert e.value.param == "messages"


@pytest.mark.parametrize("choice", ["required", "add"])
def test_a_demanded_call_follows_its_schema_whatever_the_model_would_say(client, choice):
    named = {"type": "function", "function": {"name": choice}}
    asked = {
        **{"model": "base", "messages": HI, "tools": [ADD, NOW]},
        **{"tool_choice": choice if choice == "required" else named, "parallel_tool_calls": False},
        **{"max_tokens": 170, "seed": 1, "n": 6},
    }
    answer = client.chat.completions.create(**asked)
    names = set()
    for each in answer.choices:
        assert (each.finish_reason, each.message.content) == ("tool_calls", None)
        assert len(each.message.tool_calls) == 1
        for call in each.message.tool_calls:
            names.add(call.function.name)
            if call.function.name == "add":
                jsonschema.validate(
                    json.loads(call.function.arguments), ADD["function"]["parameters"]
                )
    assert names == ({"add", "now"} if choice == "required" else {"add"})
    assert collected(client.chat.completions.create(**asked, stream=True)) == as_collected(answer)


# JSON schemas


def test_answers_follow_a_json_schema_beside_free_ones_in_one_batch(client):
    asked = {"model": "base", "messages": HI, "temperature": 1.5, "seed": 3, "n": 4}
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    formatted = {**asked, "response_format": schema, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**formatted)
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), PERSON)
        assert choice.finish_reason == "stop"
    assert len({choice.message.content for choice in answer.choices}) > 1
    streamed = client.chat.completions.create(**formatted, stream=True)
    assert collected(streamed) == as_collected(answer)


def test_json_object_is_any_object_and_goes_with_tools_that_may_be_called(client, says):
    asked = {"model": "base", "messages": HI, "response_format": {"type": "json_object"}}
    answer = client.chat.completions.create(**asked, max_tokens=200, temperature=0.0, stop="}")
    assert answer.choices[0].message.content.startswith("{")
    says(TWO_CALLS.removeprefix("Let me see.\n"))
    answer = client.chat.completions.create(**asked, tools=[ADD, NOW])
    assert [c.function.name for c in answer.choices[0].message.tool_calls] == ["add", "now"]


def schema(content, **fields):
    wrapped = {"type": "json_schema", "json_schema": {"schema": content}}
    return {"response_format": wrapped, **fields}


WIDE = {f"p{number}": {"type": "string"} for number in range(1500)}
REFUSED = {
    "type": ({"response_format": {"type": "xml"}}, "response_format must be"),
    "schema": (schema({"type": "x"}), "response_format: Invalid type: x"),
    "keyword": (schema({"not": {}}), "response_format: "),
    "endless": (
        schema({"$ref": "#"}, stream=True),  # refused before it begins
        "response_format: no token follows the grammar",
    ),
    "wide": (
        schema({"type": "object", "properties": WIDE}),
        "response_format: the grammar failed: Parser Error: Current row has",
    ),
    "large": (schema({"enum": ["x" * 70_000]}), "response_format: the schemas have"),
    "parameters": (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"properties": 1}}}
            ],
            "tool_choice": "required",
        },
        "tool_choice: properties must be an object",
    ),
    "name": ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools: entry 1"),
    "twice": ({"tools": [NOW, NOW]}, "tools: two of them have the same name"),
    "no tools": ({"tool_choice": "required"}, "tool_choice: there are no such tools"),
    "no tool": (
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice: there are no such tool 'f'",
    ),
    "choice": ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice must be"),
    "both": (
        {"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice demands a call",
    ),
    "top": ({"top_logprobs": 3}, "top_logprobs is for logprobs: true"),
    "many": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be a whole number in"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_field_is_refused_by_its_name(address, case):
    fields, message = REFUSED[case]
    body = {"model": "base", "messages": HI, "max_tokens": 1, **fields}
    status, answer = send(address, "POST", CHAT, body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert answer["error"]["param"] in fields


def test_without_llguidance_one_line_says_what_to_install(address, service, monkeypatch):
    from dschat_lora.addons.serving import grammars

    monkeypatch.setattr(grammars.importlib.util, "find_spec", lambda _: None)
    body = {
        "model": "base",
        "messages": HI,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 5}}},
    }
    status, answer = send(address, "POST", CHAT, body)
    assert (status, answer["error"]["message"]) == (
        400,
        "response_format needs llguidance: pip install 'dschat_lora[serving]'",
    )


def test_a_grammar_that_compiles_slowly_keeps_nobody_waiting(address, service, monkeypatch):
    grammars, started = service.models["base"].grammars, time.monotonic()
    compile_, slow = grammars._compile, []

    def compile_slowly(grammar):
        slow.append(time.monotonic() - started)
        time.sleep(1.5)
        slow.append(time.monotonic() - started)
        return compile_(grammar)

    monkeypatch.setattr(grammars, "_compile", compile_slowly)
    body = {"model": "base", "messages": HI, "max_tokens": 2}
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": "nasty"}}}
    with ThreadPoolExecutor(1) as pool:
        nasty = pool.submit(send, address, "POST", CHAT, {**body, "response_format": schema})
        while not slow:
            time.sleep(0.01)
        assert send(address, "POST", CHAT, body)[0] == 200
        assert len(slow) == 1, "a plain request waited for the grammar of another one"
        assert nasty.result()[0] == 200


# Log-probabilities


def reference_logprobs(prompt, ids):
    """Of each answered token all log-probabilities, by transformers without a cache."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL).eval()
    tables = []
    with torch.no_grad():
        for place in range(len(ids)):
            logits = model(torch.tensor([[*prompt, *ids[:place]]])).logits[0, -1]
            tables.append(logits.double().log_softmax(-1))
    return tables


def test_logprobs_are_the_model_s_own_whatever_the_sampling(client, service):
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    options = {"model": "base", "temperature": 0.5, "top_p": 0.8, "seed": 2, "max_tokens": 12}
    answer = client.chat.completions.create(**options, messages=HI, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    text = b"".join(bytes(each.bytes) for each in content).decode()
    assert text.removesuffix("<|end|>").strip() == answer.choices[0].message.content.strip()
    assert [each.token.encode() for each in content] == [bytes(each.bytes) for each in content]
    prompt = service.models["base"].chat_ids(HI)
    ids = tokenizer(text.removesuffix("<|end|>"), add_special_tokens=False)["input_ids"]
    ids += [2] * text.endswith("<|end|>")
    assert len(ids) == len(content), "the text is tokenised otherwise; take another seed"
    for table, token, each in zip(reference_logprobs(prompt, ids), ids, content, strict=True):
        assert each.logprob == pytest.approx(float(table[token]), abs=1e-4)
        best = table.topk(3).values.tolist()
        assert [t.logprob for t in each.top_logprobs] == pytest.approx(best, abs=1e-4)


def test_completions_give_logprobs_in_their_old_form_streamed_too(client):
    asked = {"model": "base", "prompt": "human: Hi\nassistant:", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=2).choices[0]
    logprobs = whole.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6
    assert "".join(logprobs.tokens).startswith(whole.text)
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:n])) for n in range(6)]
    for token, logprob, best in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert best[token] == logprob == max(best.values())
    chunks = [c.choices[0] for c in client.completions.create(**asked, logprobs=2, stream=True)]
    given = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    assert len(given) > 1
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for each in given for value in getattr(each, name)]
        assert joined == getattr(logprobs, name)
    assert client.completions.create(**asked).choices[0].logprobs is None
