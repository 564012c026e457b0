"""The server as its clients see it: OpenAI's own, many at once, rude ones, and a browser."""

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvicorn

from dschat_lora.addons.serving.config import ServeConfig
from dschat_lora.addons.serving.endpoint.sockets import listen, run_until_signal
from helpers.chromium import Page, find_chromium
from helpers.served import QUESTIONS, endless, peft_greedy, running_server, send, write_run

pytest.importorskip("uvicorn", reason="the extra [serving] is not installed")
openai = pytest.importorskip("openai", reason="openai's client is not installed")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    found = {name: write_run(directory / name, seed=seed) for seed, name in enumerate(["a", "b"])}
    write_run(directory / "reward", seed=5, reward=True)
    return found


@pytest.fixture(scope="module")
def service(runs):
    from dschat_lora.addons.serving.decoder import AnswerDecoder
    from dschat_lora.addons.serving.server import make_service

    first = runs["a"]
    config = ServeConfig(
        models=tuple(map(str, runs.values())),
        reward=str(first.parent / "reward"),
        max_new_tokens=24,
        temperature=0.0,
    )
    found = make_service(config, first / "votes.jsonl")
    models = {**found.models, "endless": endless(found.models["base"])}
    batches = {model.batch for model in models.values()}
    return replace(
        found, models=models, decoder=AnswerDecoder(batches, max_batch_size=32, max_queue=99)
    )


@pytest.fixture(scope="module")
def address(service):
    with running_server(service) as found:
        yield found


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as found:
        yield found


def asked(question):
    return [{"role": "user", "content": question}]


# OpenAI's client


def test_models_are_listed_by_the_names_of_their_runs(client):
    assert [model.id for model in client.models.list()] == ["base", "a", "b", "endless"]
    assert client.models.retrieve("a").id == "a"


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["base", "a", "b"])
def test_chat_says_what_peft_and_transformers_generate(client, service, runs, name):
    messages = asked(QUESTIONS[2])
    prompt = service.models[name].chat.render(messages, add_generation_prompt=True)
    expected = peft_greedy(runs.get(name), prompt, 24).lstrip()
    answer = client.chat.completions.create(model=name, messages=messages)
    assert answer.choices[0].message.content == expected
    assert answer.usage.prompt_tokens == len(service.models[name].prompt_ids(prompt))
    chunks = list(
        client.chat.completions.create(
            model=name, messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == expected
    assert len(chunks) > 4
    streamed = chunks[-1].usage
    assert streamed.total_tokens == answer.usage.total_tokens
    assert streamed.prompt_tokens == answer.usage.prompt_tokens
    # All of the prompt but the last token, which gives the logits.
    assert streamed.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason


def test_completions_take_texts_and_tokens_and_stop_where_they_are_told(client, service):
    prompt = "\n\nHuman: What is 2 plus 3?\n\nAssistant:"
    ids = service.models["base"].prompt_ids(prompt)
    whole = client.completions.create(model="base", prompt=prompt, max_tokens=12)
    both = client.completions.create(model="base", prompt=[ids, ids], max_tokens=12)
    assert [choice.text for choice in both.choices] == [whole.choices[0].text] * 2
    assert both.usage.prompt_tokens == 2 * len(ids)
    stop = whole.choices[0].text[5:8]
    cut = client.completions.create(model="base", prompt=prompt, max_tokens=12, stop=stop)
    assert cut.choices[0].text == whole.choices[0].text.split(stop)[0]
    assert cut.choices[0].finish_reason == "stop"


def test_several_answers_to_one_prompt_differ_and_a_seed_repeats_them(client):
    messages = asked("Hi, say something that you have never said before.")
    options = {"model": "a", "messages": messages, "temperature": 2, "n": 4, "seed": 3}
    answers = [client.chat.completions.create(**options) for _ in range(2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]
    counts = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert counts == [0, answers[1].usage.prompt_tokens - 1]
    assert len(set(texts[0])) > 1


PATHS = "/v1/models, /v1/models/{name}, /v1/chat/completions, /v1/completions"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        (
            "/v1/responses",
            'set_default_openai_api("chat_completions") or OpenAIChatCompletionsModel',
        ),
        ("/v1/messages", "Anthropic's interface is not served: use a client of OpenAI's chat"),
        ("/api/chat", "Ollama's interface is not served: use a client of OpenAI's"),
        ("/v1/embeddings", ""),
        ("/v1/audio/speech", ""),
        ("/chat/completions", ""),
    ],
)
def test_a_path_that_is_not_there_is_refused_with_those_that_are(address, path, hint):
    status, body = send(address, "POST", path, {"model": "a"})
    assert status == 404
    message = body["error"]["message"]
    assert message.startswith(f"POST {path}: there is no such path; there are {PATHS}")
    _, _, rest = message.partition(f"{PATHS}; ")
    assert hint in rest
    assert bool(hint) == bool(rest)


def test_a_method_that_a_path_has_not_is_refused_with_the_one_that_it_has(address):
    status, body = send(address, "GET", "/v1/chat/completions")
    assert status == 405
    assert body["error"]["message"] == "GET /v1/chat/completions: the method is POST"


WRONG = {
    "no model": ({"messages": asked("a")}, 400, "model is missing; it is one of base, a, b"),
    "unknown model": ({"model": "x"}, 404, "there is no model 'x'; there are base, a, b"),
    "no messages": ({"model": "a"}, 400, "messages must be a list of one message or more"),
    "no content": ({"model": "a", "messages": [{"role": "user"}]}, 400, "'role' and 'content'"),
    "role": ({"model": "a", "messages": [{"role": "boss", "content": "a"}]}, 400, "role 'boss'"),
    "too long": ({"model": "a", "messages": asked("a " * 900)}, 400, "has room for 512 tokens"),
    "temperature": ({"temperature": 9}, 400, "temperature must be a number in [0, 2], found 9"),
    "cold": ({"temperature": 1e-300}, 400, "must be 0 (greedy) or at least 1e-06, found 1e-300"),
    "boolean": ({"max_tokens": True}, 400, "max_tokens must be a whole number in [1, 512]"),
    "top_p": ({"top_p": 0, "temperature": 1}, 400, "top_p must be in (0, 1], found 0"),
    "stop": ({"stop": [""]}, 400, "stop must be up to 16 texts, none empty"),
    "n": ({"n": 99}, 400, "n must be a whole number in [1, 16], found 99"),
    "tools": ({"tools": [{"type": "function"}]}, 400, "tools: entry 1 must be"),
    "penalty": ({"frequency_penalty": 1}, 400, "frequency_penalty 1 is not supported here"),
    "unknown field": ({"typical_p": 0.1}, 400, "typical_p is no known field"),
    "stream": ({"stream": "yes"}, 400, "stream must be true or false, found 'yes'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_gets_one_line_that_names_it(address, case):
    body, expected, message = WRONG[case]
    if "model" not in body and case != "no model":
        body = {"model": "a", "messages": asked("a"), **body}
    status, answer = send(address, "POST", "/v1/chat/completions", body)
    assert status == expected
    assert answer.keys() == {"error"}
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert message in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_openai_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.chat.completions.create(model="x", messages=asked("a"))
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="a", messages=asked("a " * 900))
    assert raised.value.code == "context_length_exceeded"


# Many clients, and those that leave


def test_fifty_clients_at_once_are_all_answered(address):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:

            async def one(number):
                texts = []
                for question in QUESTIONS[:2]:
                    answer = await client.chat.completions.create(
                        model=["base", "a", "b"][number % 3], messages=asked(question), max_tokens=4
                    )
                    texts.append(answer.choices[0].message.content)
                return tuple(texts)

            return await asyncio.gather(*map(one, range(50)))

    texts = asyncio.run(run())
    assert len(texts) == 50
    assert all(len({texts[n] for n in range(first, 50, 3)}) == 1 for first in range(3))


def start_stream(address, **fields):
    """A connection whose answer has begun."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    body = {"model": "endless", "prompt": "Hello", "max_tokens": 450, "stream": True, **fields}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    return connection, response


def wait_until_idle(service):
    deadline = time.monotonic() + 60
    while service.decoder.load != (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_answer(address, service, monkeypatch, stream):
    left = []
    leave = service.decoder.leave
    monkeypatch.setattr(
        type(service.decoder),
        "leave",
        lambda _, answer: (left.append(answer._count), leave(answer)),
    )
    if stream:
        connection, response = start_stream(address)
        response.close()
    else:
        connection = http.client.HTTPConnection(urlsplit(address).netloc)
        body = json.dumps({"model": "endless", "prompt": "Hello", "max_tokens": 450})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        while service.decoder.load == (0, 0):
            time.sleep(0.01)
    connection.close()
    wait_until_idle(service)
    assert left
    assert left[0] < 450


def test_requests_beyond_the_queue_are_told_to_come_again(service):
    from dschat_lora.addons.serving.decoder import AnswerDecoder

    model = endless(service.models["base"])
    decoder = AnswerDecoder([model.batch], max_batch_size=1, max_queue=0)
    with running_server(replace(service, models={"endless": model}, decoder=decoder)) as address:
        connection, _ = start_stream(address)
        body = {"model": "endless", "prompt": "Hello"}
        status, answer = send(address, "POST", "/v1/completions", body)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        asked_again = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked_again)
        assert refused.value.headers["Retry-After"] == "1"
        refused.value.close()
        connection.close()


# Scores, votes, the page


def test_scores_are_those_of_the_row_by_the_reward_model(address, service):
    from dschat_lora.config.groups import ModelConfig
    from dschat_lora.data.chat import make_chat
    from dschat_lora.data.readers import RawRow
    from dschat_lora.data.rows import parse_row
    from dschat_lora.supervised.inference import last_record
    from dschat_lora.supervised.scorer import LoadedRewardModel

    messages = [*asked("Is ice warm?"), {"role": "assistant", "content": "No, it is cold."}]
    scorer = LoadedRewardModel(ModelConfig(model_name_or_path=service.config.reward))
    row = parse_row(RawRow("rows.jsonl:1", {"messages": messages}))
    (expected,) = scorer.scores([last_record(row, make_chat(scorer.tokenizer), "pairs")])
    status, answer = send(address, "POST", "/score", {"messages": messages})
    assert status == 200
    assert answer["score"] == pytest.approx(expected, abs=1e-5)
    long = [*asked("a " * 600), messages[1]]
    assert send(address, "POST", "/score", {"messages": long})[1] == {"score": None}
    assert send(address, "POST", "/score", {"messages": []})[0] == 400


@pytest.mark.smoke
@pytest.mark.skipif(find_chromium() is None, reason="there is no chromium")
def test_the_page_streams_columns_takes_a_vote_and_comes_back(address, service, tmp_path):
    page = Page(tmp_path / "chromium")
    try:
        page.open(address)
        page.wait_for("document.querySelectorAll('#models input').length == 4")
        page.evaluate("document.querySelector('#models input[value=endless]').click()")
        page.evaluate("document.getElementById('prompt').focus()")
        page.type(QUESTIONS[0])
        page.press_enter()
        page.wait_for("document.querySelectorAll('.answer').length == 3")
        page.wait_for("document.querySelectorAll('.vote:enabled').length == 3")
        texts = page.evaluate(
            "[...document.querySelectorAll('.answer .text')].map((each) => each.textContent)"
        )
        states = page.evaluate(
            "[...document.querySelectorAll('.state')].map((each) => each.textContent)"
        )
        assert all(re.fullmatch(r"reward -?\d+\.\d\d . \d+ tokens.*", state) for state in states)
        for name, text in zip(["base", "a", "b"], texts, strict=True):
            body = {"model": name, "messages": asked(QUESTIONS[0])}
            answer = send(address, "POST", "/v1/chat/completions", body)[1]
            assert text == answer["choices"][0]["message"]["content"]
        page.evaluate("document.querySelectorAll('.vote')[1].click()")
        page.wait_for("document.querySelector('.answer.best h2')?.textContent == 'a'")
        page.reload()
        page.wait_for("document.querySelector('.answer.best h2')?.textContent == 'a'")
        assert page.evaluate("document.getElementById('context').textContent").startswith(
            "Goes on from the answer of a."
        )
        page.resize(390, 844, dark=True)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.errors == []
    finally:
        page.close()
    rows = [json.loads(line) for line in service.votes.path.read_text().splitlines()]
    assert {row["chosen"][0]["content"] for row in rows} == {texts[1]}
    assert {row["rejected"][0]["content"] for row in rows} == {texts[0], texts[2]} - {texts[1]}


# The command


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("early", [True, False])
def test_a_signal_ends_a_server_and_what_follows_it_runs(number, early):
    class Signalled(uvicorn.Server):
        def run(self, sockets=None):
            if early:
                signal.raise_signal(number)
            super().run(sockets)

        async def main_loop(self):
            threading.Timer(0.1, signal.raise_signal, [number]).start()
            await super().main_loop()

    async def app(scope, receive, send):
        pass

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        run_until_signal(Signalled(uvicorn.Config(app, lifespan="off")), listen("127.0.0.1", 0))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.stage
def test_ctrl_c_in_mid_stream_ends_each_answer_and_the_command(tmp_path):
    command = [sys.executable, "-m", "dschat_lora", "serve", "base", "--port", "0"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        while " at http" not in line:
            assert line, process.stderr.read()
            line = process.stdout.readline()
        address = re.search(r"http://[\d.:]+", line)[0]
        connections = [start_stream(address, model="base", n=16, temperature=2) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            rests = [pool.submit(response.read) for _, response in connections]
            process.send_signal(signal.SIGINT)
            texts = [rest.result(timeout=60).decode() for rest in rests]
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
    for text in texts:
        assert text.count("[DONE]") + text.count('"error"') == 1
    assert process.stdout.read().endswith("stopped\n")
    assert "Traceback" not in process.stderr.read()
