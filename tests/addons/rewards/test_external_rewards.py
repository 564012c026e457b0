"""Rewards that ask something outside: a judge, Python that runs, a JSON schema in a file."""

import json
import socket
import time
from dataclasses import replace

import psutil
import pytest

from dschat_lora.addons.rewards import external
from dschat_lora.addons.rewards.builtin import builtin_function
from dschat_lora.addons.rewards.external import run_tests
from dschat_lora.rl.options.config import RewardsConfig
from dschat_lora.rl.response.response import Episode, Response
from dschat_lora.rl.score.scores import load_scorer
from dschat_lora.rl.score.user_functions import RewardError, TrainerState
from helpers.roles import Words

pytestmark = pytest.mark.usefixtures("one_rank")


def responses_of(*tokens, **row):
    columns = json.dumps({"prompt": "q", **row}).encode()
    return [Response((9,), each, True, n, columns) for n, each in enumerate(tokens)]


def scored(name, responses):
    scorer = load_scorer(RewardsConfig(reward_function=(name,)), Words(), has_model=False)
    scores = scorer(responses, TrainerState())
    return scores.total.tolist(), (scores.metrics, scores.columns)


# ---------------------------------------------------------------------------- a judge


@pytest.fixture
def endpoint(server, monkeypatch):
    """``endpoint(reply)``: the address of one whose model replies so, and what it is asked."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    def of(reply, code=200):
        def answer(body):
            if body is None:
                return {"data": [{"id": "grader"}]}
            said = reply(body["messages"][0]["content"])
            return {"choices": [{"message": {"content": said}}]}

        return server(answer, "/v1", code)

    return of


def test_a_judge_scores_by_the_last_number_and_is_asked_once_for_one_question(endpoint):
    def reply(question):
        if "\n5 6\n" in question:
            return "Of 10 points I give 7.5/10."
        return "no number" if "3" in question else "-4" if "4" in question else "42"

    url, asked = endpoint(reply)
    responses = responses_of((5, 6), (5, 6), (3,), (8,), (4,))
    (high, again, *none), (metrics, _) = scored(f"builtin:judge={url}", responses)
    assert (high, again) == (0.75, 0.75)
    assert all(each != each for each in none)  # NaN: they do not count
    assert metrics == {"judge_unreadable": 0.6}
    path, key, body = next(each for each in asked if "5 6" in str(each[2]))
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer secret", "grader")
    assert body["temperature"] == 0.0
    question = body["messages"][0]["content"]
    assert "user: q" in question
    assert "{" not in question
    assert len(asked) == 4


@pytest.mark.parametrize("said", ["2/10", "2 out of 10", "Score: 2 of 10.", "2"])
def test_a_score_of_ten_is_not_ten(endpoint, said):
    url, _ = endpoint(lambda question: said)
    assert scored(f"builtin:judge={url}", responses_of((5,)))[0] == pytest.approx([0.2])


def test_a_rubric_of_ones_own_has_columns_and_a_model_may_be_named(endpoint, tmp_path):
    (tmp_path / "rubric.txt").write_text("Is {response} {answer}? {other}")
    url, asked = endpoint(lambda question: "10")
    name = f"builtin:judge={url}?model=mine#{tmp_path / 'rubric.txt'}"
    assert scored(name, responses_of((5,), answer="five"))[0] == [1.0]
    assert asked[0][2]["model"] == "mine"
    assert asked[0][2]["messages"][0]["content"] == "Is 5 five? {other}"
    # A call of an earlier turn is part of the conversation, though its content has none.
    (tmp_path / "rubric.txt").write_text("{prompt}: {response}")
    function = {"name": "now", "arguments": {}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    earlier = json.dumps([call, {"role": "tool", "content": "Noon."}]).encode()
    scored(name, [replace(each, episode=Episode(earlier=earlier)) for each in responses_of((5,))])
    said = 'user: q\n\nassistant: {"name": "now", "arguments": {}}\n\ntool: Noon.: 5'
    assert asked[-1][2]["messages"][0]["content"] == said


def test_a_judge_that_answers_with_an_error_is_named(endpoint):
    url, _ = endpoint(lambda question: "busy", code=503)
    with pytest.raises(RewardError) as caught:
        scored(f"builtin:judge={url}", responses_of((5,)))
    assert f"the judge {url} answers 503" in str(caught.value.__cause__)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(RewardError) as caught:
            scored(f"builtin:judge={url}", responses_of((5,)))
    assert f"the judge {url} cannot be reached" in str(caught.value.__cause__)


# ---------------------------------------------------------------------------- Python that runs

SORT = "def sort(x):\n    return sorted(x)"
TESTS = "assert sort([2, 1]) == [1, 2]"


class Code:
    """A tokenizer of letters."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids))


def test_code_is_the_last_block_and_passes_the_tests_of_its_row():
    config = RewardsConfig(reward_function=("builtin:python_tests",))
    scorer = load_scorer(config, Code(), has_model=False)
    scorer.check_columns(["tests"])
    texts = [
        SORT,
        f"Like this:\n```python\nraise SystemExit\n```\nNo:\n```python\n{SORT}\n```\nSo.",
        f"```bash\npip install x\n```\nHere:\n```py\n{SORT}\n```\nIt prints:\n```\n[1, 2]\n```",
        f"```\n{SORT}\n```",
        f"from __future__ import annotations\nfrom dataclasses import dataclass\n"
        f"@dataclass\nclass A:\n    b: int\n{SORT}",
        "def sort(x):\n    return x",
    ]
    row = {"tests": [TESTS, "import io, sys\nsys.stdout = io.StringIO()\nassert sort([]) == []"]}
    responses = responses_of(*(tuple(map(ord, t)) for t in texts), **row)
    assert scorer(responses, TrainerState()).total.tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    for tests in (None, [], ""):
        scores = scorer(responses_of((49,), tests=tests), TrainerState())
        assert scores.total.isnan().all()


@pytest.mark.parametrize(
    "solution",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "while True: pass",
        "x = bytearray(2 ** 34)",
        "open('x', 'wb').write(bytes(2 ** 22))",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while 1: pass'])",
        "while True: print('x' * 65536)",
        "\0",
        "print('done')\nraise ValueError",
    ],
)
def test_programs_that_do_not_pass_the_tests_score_nothing(solution, monkeypatch):
    monkeypatch.setattr(external, "SANDBOX_SECONDS", 1)
    start = time.monotonic()
    assert not run_tests(f"{solution}\n{SORT}", "assert sort([2, 1]) == 3")
    assert time.monotonic() - start < 8


def test_a_program_leaves_no_process_behind_where_the_system_can_see_to_it(tmp_path, monkeypatch):
    if not external._isolated():
        pytest.skip("unshare is not allowed here")
    monkeypatch.setattr(external, "SANDBOX_SECONDS", 2)
    mark = f"sleeper-{time.time_ns()}"
    child = f"import os, time; os.setsid(); time.sleep(60)  # {mark}"
    solution = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])"
    assert run_tests(solution, "pass")
    time.sleep(0.3)
    assert not [
        each for each in psutil.process_iter(["cmdline"]) if mark in str(each.info["cmdline"])
    ]


def test_programs_have_no_network_where_the_system_can_give_them_none():
    if not external._isolated():
        pytest.skip("unshare --net is not allowed here")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        connect = f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
        assert not run_tests("import socket", connect)
        blocked = f"try:\n    {connect}\nexcept OSError:\n    pass\nelse:\n    assert False"
        assert run_tests("import socket", blocked)


# ---------------------------------------------------------------------------- a schema


def test_json_is_checked_by_a_schema_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    config = RewardsConfig(reward_function=("builtin:json_schema=schema.json",))
    scorer = load_scorer(config, Code(), has_model=False)
    texts = ['{"a": 1}', '{"a": "1"}', "{", "[]", "[" * 100_000]
    responses = responses_of(*(tuple(map(ord, t)) for t in texts))
    assert scorer(responses, TrainerState()).total.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    (tmp_path / "bad.json").write_text('{"type": 3}')
    for name, words in (("bad.json", "is not a JSON schema"), ("none.json", "cannot be read")):
        with pytest.raises(ValueError, match=words):
            builtin_function(f"builtin:json_schema={name}")


# ---------------------------------------------------------------------------- instructions


def test_instructions_of_ifeval_are_checked_by_its_checkers():
    for name in ("lm_eval", "langdetect", "immutabledict", "nltk"):
        pytest.importorskip(name, reason="needs dschat_lora[evaluation]")
    row = {
        "instruction_id_list": [
            "punctuation:no_comma",
            "length_constraints:number_words",
            "startend:end_checker",
        ],
        "kwargs": [
            {"num_words": None},
            {"num_words": 4, "relation": "at least"},
            {"end_phrase": "That is all."},
        ],
    }
    share, all_of_them = builtin_function("builtin:ifeval"), builtin_function("builtin:ifeval=all")
    # by hand: no comma, four words or more, the end
    for response, followed in (
        ("One two three four. That is all.", 3),
        ("One, two three four. That is all.", 2),
        ("Here, in full:\nOne two three four. That is all.", 2),  # its first line counts too
        ("One, two", 0),
        ("Two", 1),
        ("", 0),
    ):
        assert share(response, row) == pytest.approx(followed / 3), response
        assert all_of_them(response, row) == float(followed == 3)
    without = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"]}
    assert [share(each, without) for each in ('"a b"', '"a, b"', "a, b")] == [1.0, 0.5, 0.0]
    assert share("anything", {"instruction_id_list": []}) is None
    with pytest.raises(ValueError, match="IFEval has no instruction 'length:words'"):
        share("a", {"instruction_id_list": ["length:words"]})
    with pytest.raises(ValueError, match="1 instructions in instruction_id_list, and 2 kwargs"):
        share("a", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]})
    with pytest.raises(ValueError, match="give no argument or all"):
        builtin_function("builtin:ifeval=some")
