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

from dschat_lora.addons.serving.endpoint.sockets import listen, run_until_signal
from helpers.chromium import Page, find_chromium
from helpers.served import QUESTIONS, endless, peft_greedy, running_server, send

pytest.importorskip("uvicorn", reason="the extra [serving] is not installed")
openai = pytest.importorskip("openai", reason="openai's client is not installed")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as opened:
        yield opened


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
        rows = [json.loads(line) for line in service.votes.path.read_text().splitlines()]
    finally:
        page.close()
        service.votes.path.unlink(missing_ok=True)
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
