"""The thread that decodes for many, on runs of the bundled model."""

import threading
from queue import Queue

import pytest
import torch

from dschat_lora.addons.serving.config import ServeConfig
from dschat_lora.addons.serving.decoder import AnswerDecoder
from dschat_lora.addons.serving.endpoint.errors import BusyError, StoppedError, TooLongError
from dschat_lora.addons.serving.endpoint.requests import AnswerOptions
from dschat_lora.addons.serving.models import open_models
from helpers.served import QUESTIONS, endless, peft_greedy, write_run

GREEDY = AnswerOptions(24, temperature=0)
LONG = AnswerOptions(480, temperature=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    return {name: write_run(directory / name, seed=seed) for seed, name in enumerate(["a", "b"])}


@pytest.fixture(scope="module")
def models(runs):
    return open_models(ServeConfig(models=tuple(map(str, runs.values()))), with_base=True)


@pytest.fixture
def decoder(models):
    started = AnswerDecoder({m.batch for m in models.values()}, max_batch_size=3, max_queue=100)
    started.start()
    yield started
    started.close()
    started.join()


@pytest.fixture
def slow(models):
    """A decoder of one answer at a time, and a model whose answers do not end."""
    model = endless(models["base"])
    started = AnswerDecoder([model.batch], max_batch_size=1, max_queue=1)
    started.start()
    yield started, model
    started.close()
    started.join()


def pieces_of(queue):
    pieces = [queue.get(timeout=60)]
    while not pieces[-1].is_last:
        pieces.append(queue.get(timeout=60))
    return pieces


def test_runs_of_one_base_share_it_and_are_named_after_their_directories(models):
    assert list(models) == ["base", "a", "b"]
    assert len({model.batch for model in models.values()}) == 1
    assert [model.adapter for model in models.values()] == [0, 1, 2]


def test_a_batch_that_mixes_adapters_says_what_peft_and_transformers_generate(
    runs, models, decoder
):
    queues = {}
    for question in QUESTIONS:
        for name, model in models.items():
            messages = [{"role": "user", "content": question}]
            prompt = model.chat.render(messages, add_generation_prompt=True)
            queues[name, prompt] = Queue()
            ids = model.prompt_ids(prompt)
            decoder.submit(model, ids, GREEDY, queues[name, prompt].put)
    said = {key: pieces_of(queue) for key, queue in queues.items()}
    for (name, prompt), pieces in said.items():
        text = "".join(piece.text for piece in pieces)
        assert text == peft_greedy(runs.get(name), prompt, 24)
        assert [piece.is_last for piece in pieces[:-1]] == [False] * (len(pieces) - 1)
        assert pieces[-1].finish == ("length" if pieces[-1].tokens == 24 else "stop")
    texts = ["".join(piece.text for piece in pieces) for pieces in said.values()]
    assert len(set(texts)) > len(QUESTIONS), "adapters that say the same show nothing"


def test_the_same_seed_gives_the_same_answer_whoever_else_is_answered(models, decoder):
    model = models["a"]
    options = AnswerOptions(12, temperature=1.5, seed=7)
    answers = []
    for others in (0, 4):
        queues = [Queue() for _ in range(others + 1)]
        ids = model.prompt_ids("Hello")
        for number, queue in enumerate(queues[1:]):
            other = AnswerOptions(5, temperature=0.5, seed=number)
            decoder.submit(models["b"], ids, other, queue.put)
        decoder.submit(model, ids, options, queues[0].put)
        texts = ["".join(piece.text for piece in pieces_of(queue)) for queue in queues]
        answers.append(texts[0])
    assert answers[0] == answers[1]


def conversation(model, decoder, turns):
    """Tokens of each prompt that were not computed again, its length, and what was said."""
    text, answers = [], []
    for number in range(turns):
        messages = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)] * 3}]
        text += model.chat_ids(messages)
        queue = Queue()
        decoder.submit(model, text, GREEDY, queue.put)
        pieces = pieces_of(queue)
        ids = [token for piece in pieces for token in piece.ids]
        answers.append((pieces[-1].cached, len(text), ids))
        text = text + ids
    return answers


def test_a_turn_reads_what_is_new_and_says_what_it_says_without_the_cache(runs, models, decoder):
    words = tuple(map(str, runs.values()))
    without = open_models(ServeConfig(models=words, prefix_cache=False), with_base=True)
    other = AnswerDecoder({m.batch for m in without.values()}, max_batch_size=3, max_queue=100)
    other.start()
    try:
        for name in models:
            anew = conversation(without[name], other, 3)
            turns = conversation(models[name], decoder, 3)
            assert [said for *_, said in turns] == [said for *_, said in anew]
            assert [cached for cached, *_ in anew] == [0, 0, 0]
            # All of the turn before but its last token, which was said and not read.
            fed = [length + len(said) - 1 for _, length, said in turns]
            assert [cached for cached, *_ in turns] == [0, *fed[:-1]]
    finally:
        other.close()
        other.join()


def test_what_an_answer_that_was_left_has_read_is_kept(models, decoder):
    text = models["base"].prompt_ids("a long text of which nobody reads the answer " * 4)
    first, second = Queue(), Queue()
    answer = decoder.submit(models["base"], text, AnswerOptions(400, temperature=0), first.put)
    first.get(timeout=60)
    decoder.leave(answer)
    decoder.submit(models["base"], text, GREEDY, second.put)
    assert pieces_of(second)[-1].cached == len(text) - 1


def test_no_more_wait_than_may(slow):
    decoder, model = slow
    running, waiting = Queue(), Queue()
    first = decoder.submit(model, [5], LONG, running.put)
    running.get(timeout=60)
    second = decoder.submit(model, [5], LONG, waiting.put)
    with pytest.raises(BusyError, match="1 requests are waiting"):
        decoder.submit(model, [5], LONG, waiting.put)
    decoder.leave(second)
    decoder.leave(first)


def test_who_leaves_makes_room(slow):
    decoder, model = slow
    first, second = Queue(), Queue()
    answer = decoder.submit(model, [5], LONG, first.put)
    first.get(timeout=60)
    decoder.submit(model, [5], AnswerOptions(3, temperature=0), second.put)
    decoder.leave(answer)
    assert pieces_of(second)[-1].tokens == 3
    assert first.qsize() < 470


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (
            [5] * 512,
            AnswerOptions(5, temperature=0, cut=True),
            "the prompt has 512 and asks for an",
        ),
        ([5] * 500, AnswerOptions(13, temperature=0), "has 500 and asks for 13 of the answer"),
        ([], LONG, "the prompt is empty"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(models, decoder, prompt, options, message):
    with pytest.raises(TooLongError, match=message):
        decoder.submit(models["base"], prompt, options, print)


def test_an_answer_without_a_wish_for_its_length_fills_the_model_at_most(slow):
    decoder, model = slow
    queue = Queue()
    options = AnswerOptions(256, temperature=0, cut=True)
    decoder.submit(model, [5] * 506, options, queue.put)
    last = pieces_of(queue)[-1]
    assert (last.tokens, last.finish) == (6, "length")


def test_closing_ends_each_answer_once(models):
    model = endless(models["base"])
    decoder = AnswerDecoder([model.batch], max_batch_size=1, max_queue=5)
    queues = [Queue() for _ in range(3)]
    decoder.start()
    for queue in queues:
        decoder.submit(model, [5], LONG, queue.put)
    queues[0].get(timeout=60)
    decoder.close()
    decoder.join()
    ends = [pieces_of(queue)[-1].error for queue in queues]
    assert ends == ["the server was stopped", *["the server is stopping"] * 2]
    assert all(queue.empty() for queue in queues)
    with pytest.raises(StoppedError):
        decoder.submit(model, [5], LONG, print)


def test_running_answers_may_end_within_the_patience(models):
    model = endless(models["base"])
    decoder = AnswerDecoder([model.batch], max_batch_size=1, max_queue=5)
    queue = Queue()
    decoder.start()
    decoder.submit(model, [5], AnswerOptions(20, temperature=0), queue.put)
    queue.get(timeout=60)
    decoder.close(patience=60.0)
    decoder.join()
    assert pieces_of(queue)[-1].finish == "length"


def test_a_model_that_fails_ends_what_runs_and_not_the_server(slow, monkeypatch):
    decoder, model = slow
    queue, broken = Queue(), threading.Event()
    step = model.batch.rows.step

    def fail(tokens):
        broken.set()
        raise torch.OutOfMemoryError("CUDA out of memory\nand much else")

    monkeypatch.setattr(model.batch.rows, "step", fail)
    decoder.submit(model, [5], LONG, queue.put)
    assert pieces_of(queue)[-1].error == "the model failed: OutOfMemoryError: CUDA out of memory"
    monkeypatch.setattr(model.batch.rows, "step", step)
    decoder.submit(model, [5], AnswerOptions(3, temperature=0), queue.put)
    assert pieces_of(queue)[-1].tokens == 3
