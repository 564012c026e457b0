"""Models, requests and a decoder that fail: what is told, and that the others go on."""

import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from helpers.served import check_answers, on_endless, running_server, send

pytest.importorskip("uvicorn", reason="the extra [serving] is not installed")

from dschat_lora.addons.serving import server
from dschat_lora.addons.serving.decoder import AnswerDecoder
from dschat_lora.addons.serving.endpoint import sockets as places
from dschat_lora.addons.serving.endpoint.requests import AnswerOptions

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PLAIN = {"model": "a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.fixture
def broken(service):
    """``broken(where, value)``: the server of models of which a weight is set to a value."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def make(value):
            base = service.models["base"].batch.base
            weight = base.get_output_embeddings().weight
            kept = weight.detach().clone()
            stack.callback(weight.data.copy_, kept)
            weight.data[3] = value
            own = on_endless(service)
            return stack.enter_context(running_server(own)), own.decoder

        yield make


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_of_weights_that_are_not_finite_says_which(broken, value, temperature):
    address, decoder = broken(value)
    for top in ({}, {"top_k": 3}, {"top_p": 0.5}):
        body = {"model": "endless", "prompt": "Hi", "temperature": temperature, **top}
        status, answer = send(address, "POST", TEXT, body)
        assert status == 500
        message = answer["error"]["message"]
        assert message.startswith(
            "no token can be sampled: the model's logits are not finite, as its"
        )
        assert re.search(r"weight \S+ (and \d+ more )?holds NaN or infinity", message)
    assert decoder.is_alive


def test_an_answer_that_cannot_be_drawn_ends_alone(address, service, monkeypatch):
    rows = service.models["endless"].batch.rows
    step, spoilt = rows.step, threading.Event()

    def one_is_nan(tokens):
        logits = step(tokens)
        if len(tokens) == 2:
            logits[1] = torch.nan
            spoilt.set()
        return logits

    body = {"model": "endless", "prompt": ["Hi", "Ho"], "max_tokens": 20, "temperature": 0}
    single = {**body, "prompt": "Hi"}
    expected = send(address, "POST", TEXT, single)[1]
    monkeypatch.setattr(rows, "step", one_is_nan)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(send, address, "POST", TEXT, single) for _ in range(2)]
        replies = sorted((each.result() for each in both), key=lambda pair: pair[0])
    monkeypatch.undo()
    if spoilt.is_set():
        assert [status for status, _ in replies] == [200, 500]
        assert "no token can be sampled" in replies[1][1]["error"]["message"]
    assert replies[0][1]["choices"] == expected["choices"]
    check_answers(address)


def test_an_answer_that_cannot_be_drawn_leaves_the_batch(service, address, monkeypatch):
    model, pieces = service.models["endless"], []
    rows, step = model.batch.rows, model.batch.rows.step
    monkeypatch.setattr(rows, "step", lambda tokens: step(tokens).fill_(torch.nan))
    options = AnswerOptions(400, temperature=0)
    service.decoder.submit(model, [5], options, pieces.append)
    while not pieces or pieces[-1].error is None or service.decoder.load != (0, 0):
        time.sleep(0.005)
    assert [piece.is_last for piece in pieces] == [*[False] * (len(pieces) - 1), True]


@pytest.mark.parametrize("error", [IndexError("secret prompt"), KeyError(), ZeroDivisionError()])
def test_any_exception_of_a_step_fails_its_batch_alone(address, service, monkeypatch, error):
    def fail(tokens):
        raise error

    monkeypatch.setattr(service.models["endless"].batch.rows, "step", fail)
    body = {"model": "endless", "prompt": "Hi"}
    status, answer = send(address, "POST", TEXT, body)
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert f"the model failed: {type(error).__name__}" in answer["error"]["message"]
    check_answers(address)


def test_an_unforeseen_error_is_answered_without_what_was_asked(
    address, service, monkeypatch, capfd
):
    monkeypatch.setattr(
        "dschat_lora.addons.serving.endpoint.requests.chat_request",
        lambda *_: {}["a secret prompt"],
    )
    status, answer = send(address, "POST", CHAT, PLAIN)
    monkeypatch.undo()
    assert status == 500
    assert answer["error"]["message"] == "the server failed: KeyError; its log says where"
    logged = capfd.readouterr().err
    assert logged.startswith(f"error: POST '{CHAT}' failed: KeyError at ")
    assert "secret" not in logged
    assert "Traceback" not in logged


def test_a_decoder_that_ends_by_itself_ends_the_server(service, monkeypatch):
    own = on_endless(service)

    def fail(self, batch, running):
        raise SystemExit("out of the blue")

    with running_server(own) as address:
        assert send(address, "GET", "/healthz")[0] == 200
        monkeypatch.setattr(AnswerDecoder, "_advance", fail)
        body = {"model": "endless", "prompt": "Hi"}
        status, answer = send(address, "POST", TEXT, body)
        assert (status, answer["error"]["code"]) == (503, "stopped")
        assert answer["error"]["message"] == "decoding ended: SystemExit: out of the blue"
        own.decoder.join()
        status, answer = send(address, "GET", "/healthz")
        assert (status, answer["status"]) == (503, "failed")


def test_the_command_ends_with_one_line_where_decoding_does(service, monkeypatch, tmp_path):

    own = on_endless(service)
    monkeypatch.setattr(server, "make_service", lambda config, votes: own)
    monkeypatch.setattr(
        AnswerDecoder, "_advance", lambda *_: (_ for _ in ()).throw(SystemExit("gone"))
    )
    body = {"model": "endless", "prompt": "Hi"}
    late = threading.Timer(30, signal.raise_signal, [signal.SIGINT])  # where it goes on
    late.start()
    with places.listen("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(send, places.address_of(listening), "POST", TEXT, body)
        with pytest.raises(OSError, match="decoding ended: SystemExit: gone"):
            server.run_server(own.config, tmp_path / "votes.jsonl", listening)
        assert asked.result()[0] == 503
    assert late.is_alive()
    late.cancel()
