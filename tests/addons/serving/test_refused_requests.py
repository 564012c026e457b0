"""Requests that are refused: each gets one line in OpenAI's form, and the server goes on."""

import json
from itertools import product

import pytest

from helpers.served import check_answers, refused, send

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HALF = "\ud83d"
BASES = {
    CHAT: {"model": "a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    TEXT: {"model": "a", "prompt": "Hi", "max_tokens": 1},
    "/score": {},
    "/votes": {
        "prompt": [{"role": "user", "content": "Hi"}],
        "chosen": {"model": "a", "content": "b"},
        "rejected": [{"model": "base", "content": "c"}],
    },
}
HI = BASES[CHAT]["messages"]
WHOLE = json.dumps(BASES[CHAT])


def said(content, role="assistant"):
    return [*HI, {"role": role, "content": content}]


def calling(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]}


def deep(count):
    return json.loads('{"a":' * count + "{}" + "}" * count)


def users(content):
    return {"messages": [{"role": "user", "content": content}]}


# By path, what is wrong: the body, or its fields that are not plain; and words of the message.
WRONG = {
    CHAT: {
        "nothing": (b"", "not JSON"),
        "open": (b"{", "not JSON"),
        "list": (b"[]", "must be a JSON object"),
        "text": (b'"a"', "must be a JSON object"),
        "number": (b"1", "must be a JSON object"),
        "null": (b"null", "must be a JSON object"),
        "100,000 deep": (b"[" * 100_000, "not JSON"),
        "500 deep": (b'{"a":' * 500 + b"1" + b"}" * 500, "nested more than 64 deep"),
        "UTF-16": (WHOLE.encode("utf-16"), "not in UTF-8"),
        "UTF-32": (WHOLE.encode("utf-32"), "not JSON"),
        "byte order mark": (b"\xef\xbb\xbf" + WHOLE.encode(), "not JSON"),
        "Latin-1": (WHOLE.replace("Hi", "\xe9").encode("latin-1"), "not in UTF-8"),
        "overlong": (b'{"model": "\xc0\xaf"}', "not in UTF-8"),
        "encoded surrogate": (b'{"model": "\xed\xa0\xbd"}', "not in UTF-8"),
        "NUL": (WHOLE.encode() + b"\0", "not JSON"),
        "two objects": (WHOLE.encode() * 2, "not JSON"),
        "name twice": (b'{"model": "a", "model": "base"}', "'model' twice"),
        "90,000 names": (
            b"{" + b",".join(b'"%d":1' % n for n in range(90_000)) + b',"0":1}',
            "'0' twice",
        ),
        "inner name twice": (b'{"messages": [{"role": "user", "role": "system"}]}', "twice"),
        "NaN": (b'{"temperature": NaN}', "NaN is not a finite number"),
        "infinity": (b'{"temperature": -Infinity}', "not a finite number"),
        "1e400": (b'{"temperature": 1e400}', "1e400 is not a finite number"),
        "digits": (b'{"seed": ' + b"9" * 5000 + b"}", "not JSON"),
        "comment": (b'{"model": "a" /* */}', "not JSON"),
        "single quotes": (b"{'model': 'a'}", "not JSON"),
        "control character": (b'{"model": "\n"}', "not JSON"),
        "no model": ({"model": None}, "model is missing; it is one of base, a, b"),
        "no messages": ({"messages": None}, "messages must be a list of one message or more"),
        "half content": (users(HALF), HALF),
        "half role": ({"messages": said("a", HALF)}, HALF),
        "half name": ({HALF: 1}, HALF),
        "half model": ({"model": HALF}, HALF),
        "half stop": ({"stop": [HALF]}, HALF),
        "half part": (users([{"type": "text", "text": HALF}]), HALF),
        "half metadata": ({"metadata": {"a": HALF}}, HALF),
        "half argument": (calling(json.dumps({"a": HALF})), HALF),
        "no list": ({"messages": HI[0]}, "messages must be a list of messages"),
        "empty": ({"messages": []}, "messages must be a list of one message or more"),
        "null message": ({"messages": [None]}, "message 1"),
        "text message": ({"messages": ["a"]}, "message 1"),
        "list message": ({"messages": [[]]}, "message 1"),
        "no role": ({"messages": [{"content": "a"}]}, "'role' and 'content'"),
        "no content": ({"messages": [{"role": "user"}]}, "'role' and 'content'"),
        "role of a list": ({"messages": said("a", ["user"])}, "message 2"),
        "unknown role": ({"messages": said("a", "root")}, "role 'root'"),
        "content of a number": (users(1), "message 1"),
        "image": (users([{"type": "image_url", "image_url": {"url": "file:///"}}]), "message 1"),
        "part without text": (users([{"type": "text"}]), "message 1"),
        "calls of a number": ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "message 1"),
        "no name": (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "message 1",
        ),
        "arguments that are no JSON": (calling('{"a": '), "message 2: the arguments of"),
        "arguments for Python's stack": (calling("[" * 100_000), "message 2: the arguments of"),
        "deep arguments": (calling(deep(900)), "nested more than 64 deep"),
        "deep text of arguments": (calling(json.dumps(deep(900))), "nested more than 64 deep"),
        "less deep text": (calling(json.dumps(deep(70))), "nested more than 64 deep"),
        "empty assistant": ({"messages": said("")}, "message 2"),
        "temperature": ({"temperature": 9}, "temperature must be a number in [0, 2], found 9"),
        "cold": ({"temperature": 1e-300}, "must be 0 (greedy) or at least 1e-06, found 1e-300"),
        "boolean": ({"max_tokens": True}, "max_tokens must be a whole number in [1, 512]"),
        "top_p": ({"top_p": 0, "temperature": 1}, "top_p must be in (0, 1], found 0"),
        "stop": ({"stop": [""]}, "stop must be up to 16 texts, none empty"),
        "n": ({"n": 99}, "n must be a whole number in [1, 16], found 99"),
        "tools": ({"tools": [{"type": "function"}]}, "tools: entry 1 must be"),
        "penalty": ({"frequency_penalty": 1}, "frequency_penalty 1 is not supported here"),
        "unknown field": ({"typical_p": 0.1}, "typical_p is no known field"),
        "stream": ({"stream": "yes"}, "stream must be true or false, found 'yes'"),
    },
    TEXT: {"half prompt": ({"prompt": HALF}, HALF), "half of two": ({"prompt": ["a", HALF]}, HALF)},
    "/score": {
        "nothing": ({}, "messages must be a list of one message or more"),
        "empty": ({"messages": []}, "messages must be a list of one message or more"),
        "text": ({"messages": "Hi"}, "messages must be a list of messages"),
        "no answer": ({"messages": HI}, "no message of role 'assistant'"),
        "unknown field": ({"messages": said("a"), "model": "x"}, "model is no known field"),
        "role": ({"messages": said("a", "root")}, "no message of role 'assistant'"),
        "half": ({"messages": said(HALF)}, HALF),
    },
    "/votes": {
        "no prompt": ({"prompt": []}, "prompt must be a list of one message or more"),
        "prompt of text": ({"prompt": "Hi"}, "prompt must be a list of messages, found 'Hi'"),
        "no chosen": ({"chosen": None}, 'chosen must be {"model": TEXT, "content": TEXT}'),
        "chosen of text": ({"chosen": "b"}, "chosen must be an object"),
        "extra key": ({"chosen": {"model": "a", "content": "b", "x": 1}}, "chosen must be {"),
        "empty chosen": ({"chosen": {"model": "a", "content": " "}}, "an empty answer cannot be"),
        "no other": ({"rejected": []}, "no other answer to compare"),
        "equal other": ({"rejected": [{"model": "c", "content": "b"}]}, "no other answer to"),
        "rejected of a number": ({"rejected": 3}, "rejected must be a list of objects"),
        "null among": ({"rejected": [None]}, "rejected must be {"),
        "no model": ({"rejected": [{"content": "a"}]}, "rejected must be {"),
        "file": ({"votes": "/tmp/x"}, "votes is no known field"),
        "half": ({"chosen": {"model": "a", "content": HALF}}, HALF),
        "half model": ({"chosen": {"model": HALF, "content": "a"}}, HALF),
    },
}
HALF_WORDS = r"\ud83d, which is half a character"


def row(asked, status, words, code=..., *, method="POST", headers=(), name=None):
    path, body = asked
    words = HALF_WORDS if words == HALF else words
    return pytest.param(method, path, body, dict(headers), status, words, code, id=name)


HOSTS = (
    *("", "evil.example", "127.0.0.1.evil.example", "evil.com@localhost", "127.0.0.1#x"),
    *("localhost/x", "localhost?x", "x/?", "localhost:80:80", "localhost:", "localhost:port"),
    *("localhost:999999", "[::1", "::1", "[::1]x", "[127.0.0.1]", "0.0.0.0", "127.1", "2130706433"),
    *("localhost.", "local\thost", "localhost\\x", "LOCALHOST@x", "[::ffff:127.0.0.1]"),
    "127.0.0.2",
)
ORIGINS = (
    *("null", "http://[", "http://evil.example", "http://localhost:1", "https://localhost", "://"),
    *("http://localhost.evil.example", "http://localhost/", "http://x@localhost", "localhost", ""),
    *("file://", "ftp://localhost", "http://localhost http://evil.example", "http://127.0.0.1"),
)
KINDS = (
    "text/plain",
    "",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    "json",
    "a/b",
)
ROUTES = (
    *("/v1/models/../../etc/passwd", "/v1/models/%00", "/v1/models/" + "a" * 5000, "/.git/config"),
    *("/page/index.html", "/page.js/", "/..%2f..%2fetc/passwd", "/v1", "/v1/chat/completions/x"),
    *("/docs", "/openapi.json", "/metrics", "/page.css%00.html", "/~root", "/v1/models/<script>"),
)
METHODS = [
    *product(["PUT", "DELETE", "PATCH"], [CHAT, "/votes", "/"]),
    ("GET", CHAT),
    ("POST", "/"),
]
# Where there is a hint, its words.
HINTS = {
    "/v1/responses": 'set_default_openai_api("chat_completions") or OpenAIChatCompletionsModel',
    "/v1/messages": "Anthropic's interface is not served: use a client of OpenAI's chat",
    "/api/chat": "Ollama's interface is not served: use a client of OpenAI's",
    **dict.fromkeys(("/v1/embeddings", "/v1/audio/speech", "/chat/completions"), ""),
}
MODELS = "/v1/models", None
LONG = {**BASES[CHAT], **users("a " * 900)}
ROWS = [
    *(
        row((path, {**BASES[path], **body} if isinstance(body, dict) else body), 400, words, name=n)
        for path, cases in WRONG.items()
        for n, (body, words) in cases.items()
    ),
    row((CHAT, b" " * (2**20 + 1)), 413, "larger than 1,048,576 bytes"),
    row((CHAT, {**BASES[CHAT], "model": "x"}), 404, "there is no model 'x'; there are base, a, b"),
    row((CHAT, LONG), 400, "has room for 512 tokens", "context_length_exceeded", name="too long"),
    row((CHAT, {**LONG, "messages": HI * 10_000}), 400, "has room for", name="10,000 turns"),
    *(
        row((CHAT, WHOLE.encode()), 415, "application/json", headers={"Content-Type": kind})
        for kind in KINDS
    ),
    *(
        row(MODELS, 403, "is no host", "wrong_host", method="GET", headers={"Host": host})
        for host in HOSTS
    ),
    *(
        row(MODELS, 403, "not let in", "wrong_origin", method="GET", headers=headers)
        for origin in ORIGINS
        for headers in [{"Host": "localhost", "Origin": origin}]
    ),
    *(row((path, None), 404, "there", method="GET", name=path[:20]) for path in ROUTES),
    *(row((path, b"{}"), 405, "the method is", method=method) for method, path in METHODS),
    row((CHAT, None), 405, f"GET {CHAT}: the method is POST", method="GET"),
]


@pytest.fixture(scope="module", autouse=True)
def goes_on(address, service):
    yield
    check_answers(address)
    assert not service.votes.path.exists()


@pytest.mark.parametrize(("method", "path", "body", "headers", "status", "words", "code"), ROWS)
def test_a_wrong_request_gets_one_line_that_names_it(
    address, method, path, body, headers, status, words, code
):
    given, answer = send(address, method, path, body, headers)
    message = refused(given, answer)
    assert given == status, message
    assert words in message
    assert code in (..., answer["error"]["code"])


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "LocalHost:99", "Origin": "http://localhost:99"},
        {"Host": "[::1]:99"},
        {"Host": "127.0.0.1", "Origin": "HTTP://127.0.0.1"},
    ],
)
def test_this_machines_own_pages_are_let_in(address, headers):
    assert send(address, "GET", "/v1/models", headers=headers)[0] == 200


@pytest.mark.parametrize("path", HINTS)
def test_a_path_that_is_not_there_is_refused_with_those_that_are(address, path):
    there = "/v1/models, /v1/models/{name}, /v1/chat/completions, /v1/completions"
    message = refused(*send(address, "POST", path, {"model": "a"}))
    before, _, rest = f"{message}; ".partition(f"{there}; ")
    assert before == f"POST {path}: there is no such path; there are "
    assert HINTS[path] in rest
    assert bool(HINTS[path]) == bool(rest)


def test_too_many_prompts_are_refused_before_one_is_tokenised(address, service, monkeypatch):
    monkeypatch.setattr(type(service.models["a"]), "prompt_ids", None)
    body = {"model": "a", "prompt": ["a"] * 200_000}
    words = "200000 answers are asked for, at most 16 are given"
    assert words in refused(*send(address, "POST", TEXT, body))
