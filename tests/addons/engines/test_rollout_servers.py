"""Servers that die, hang, answer nonsense or forget: prompts go to others, nothing is lost."""

import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from unittest import mock

import pytest

from addons.engines.fake_servers import END, LIMIT, Fake, FakeSGLang, answer_to
from dschat_lora.addons.engines import completion_pool, completions
from dschat_lora.addons.engines.completion_pool import CompletionPool, _Work
from dschat_lora.addons.engines.completions import CompletionServer, ServerError
from dschat_lora.rl.options.engines import EngineError

BODIES = [{"model": "adapter", "prompt": [n], "max_tokens": LIMIT, "seed": n} for n in range(20)]


@contextmanager
def servers(*fakes, timeout=5.0, patience=0.3):
    """The servers, with an adapter loaded, and what they said."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(fake.running()).address for fake in fakes]
        said = []
        pool = CompletionPool(
            [CompletionServer(address, timeout) for address in addresses],
            in_flight=3,
            say=said.append,
            ends=frozenset([END]),
            vocabulary_size=64,
        )
        stack.enter_context(mock.patch.object(completion_pool, "PATIENCE", patience))
        pool.load({"adapter": "/somewhere"})
        yield pool, said


def check(answers):
    """All prompts have their own answers, in their order."""
    assert [each.tokens for each in answers] == [[n + 10, END] for n in range(len(BODIES))]
    assert all(each.stopped and each.logprobs == [-0.5, -0.25] for each in answers)


def with_reply(**changes):
    """A fault: every answer has other fields, of the reply or its choice."""

    def fault(handler, body, number):
        reply = answer_to(body)
        for name, value in changes.items():
            place = reply if name == "model" else reply["choices"][0]
            place[name] = value
        handler.reply(reply)
        return True

    return fault


def slow(seconds):
    """A fault: answers are right, and late."""

    def fault(handler, body, number):
        time.sleep(seconds)
        return False

    return fault


def drop(handler, body, number):
    handler.close_connection = True
    handler.connection.close()
    return True


@pytest.fixture
def state():
    """What a server of the fault ``down`` fails for, until it is cleared."""
    return {"down": True}


@pytest.fixture
def down(state):
    return lambda *request: "down" in state and drop(*request)


def replying(content, status=200):
    def fault(handler, body, number):
        handler.reply(content, status)
        return True

    return fault


def garbage(handler, body, number):
    """Replies that Python cannot parse or convert at first, and good ones then."""
    if number == 1:
        return replying(b"[" * 200_000)(handler, body, number)
    huge = {"token_logprobs": [-(10**400), -1.0]}
    return number == 2 and with_reply(logprobs=huge)(handler, body, number)


def trickle(handler, body, number):
    """A reply that goes on for ever, byte by byte."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    with suppress(OSError):
        for _ in range(60):
            handler.wfile.write(b" ")
            time.sleep(0.05)
    return drop(handler, body, number)


def cut_short(handler, body, number):
    """A refusal whose connection ends before the reason."""
    handler.send_response(400)
    handler.send_header("Content-Length", "9")
    handler.end_headers()
    return drop(handler, body, number)


NAN = {"token_logprobs": [float("nan"), -1.0]}
FAULTS = {
    "closes the connection": (drop, ""),
    "hangs": (slow(1.0), "no answer came within 0.2 seconds"),
    "trickles": (trickle, "no answer came within 0.2 seconds"),
    "nested too deeply": (replying(b"[" * 200_000), "maximum recursion depth"),
    "no JSON": (replying(b"<html>"), "no choices with token_ids"),
    "no choices": (replying({"choices": []}), "no choices with token_ids"),
    "cut short": (cut_short, "9 more expected"),
    "an error": (replying({"error": "full"}, 500), "it answers 500"),
    "no token ids": (with_reply(token_ids=None), "it must return at most 4"),
    "another adapter": (with_reply(model="old"), "the adapter 'old', but 'adapter' was requested"),
    "tokens beyond": (with_reply(token_ids=[99, END]), "vocabulary of 64"),
    "too many": (with_reply(token_ids=[5] * 5), "it must return at most 4"),
    "no numbers": (with_reply(logprobs=NAN), "each with a log-probability"),
    "no end": (with_reply(token_ids=[5, 6]), "ended a response with 'stop' after 2 tokens, at 6"),
    "cut": (with_reply(finish_reason="length"), "with 'length' after 2 tokens, at 2"),
    "denies": (replying({"error": "who?"}, 401), "rejects the key of ROLLOUT_API_KEY, 401"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_server_that_fails_is_lost_and_another_answers_its_prompts(name):
    fault, words = FAULTS[name]
    timeout = 0.2 if name in ("hangs", "trickles") else 5.0
    patience = 60.0 if name == "denies" else 0.0  # which is lost at once
    good, bad = Fake(slow(0.05)), Fake(fault)
    with servers(good, bad, timeout=timeout, patience=patience) as (pool, said):
        check(pool.begin(BODIES)())
        assert bad.asked > 0
        lines = [line for line in said if line.startswith(f"{bad.address} is lost: ")]
        assert len(lines) == len(said) == 1
        assert words in lines[0]
        asked = bad.asked
        check(pool.begin(BODIES)())  # and is not asked again
        assert bad.asked == asked


PASSING = {
    "single failures": lambda handler, body, number: (
        number % 3 == 0 and (drop if number % 2 else replying(b"{"))(handler, body, number)
    ),
    "replies that Python cannot read": garbage,
    "two failures": lambda handler, body, number: number <= 2 and drop(handler, body, number),
    "no room": lambda handler, body, number: (
        number < 9 and replying({"error": "queue"}, 429)(handler, body, number)
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", PASSING)
def test_what_passes_loses_no_server(name):
    patience = 0.0 if name in ("two failures", "no room") else 0.3
    with servers(Fake(PASSING[name]), patience=patience) as (pool, said):
        check(pool.begin(BODIES)())
        assert said == []


def test_a_mistake_while_a_reply_is_read_ends_no_thread_and_loses_no_prompt():
    read, calls = completion_pool.read_answer, iter([MemoryError(), KeyError("x")])

    def fail_twice(*args):
        for error in calls:
            raise error
        return read(*args)

    with servers(Fake()) as (pool, said):
        with mock.patch.object(completion_pool, "read_answer", fail_twice):
            check(pool.begin(BODIES)())
        assert said == []


def test_the_key_is_that_for_rollouts_alone(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of another service")
    with servers(fake := Fake()) as (pool, _):
        check(pool.begin(BODIES)())
        assert fake.keys == {None}
        monkeypatch.setenv("ROLLOUT_API_KEY", "secret")
        check(pool.begin(BODIES)())
        assert fake.keys == {None, "Bearer secret"}


def test_where_no_server_is_left_the_error_names_each_and_why():
    fakes = Fake(drop), Fake(replying({"error": "full"}, 500))
    with servers(*fakes, patience=0.0) as (pool, said):
        with pytest.raises(EngineError, match="no server is left") as error:
            pool.begin(BODIES)()
        assert all(fake.address in str(error.value) for fake in fakes)
        assert "500" in str(error.value)
        assert len(said) == 2


def test_a_request_that_is_refused_ends_all_at_once():
    refusal = replying({"error": {"message": "the prompt is too long"}}, 400)
    words = "rejects the request, 400: .*too long"
    with servers(Fake(), Fake(refusal)) as (pool, _), pytest.raises(EngineError, match=words):
        pool.begin(BODIES)()


def test_the_reason_of_a_refusal_is_that_of_the_first(monkeypatch):
    """Not of those that the end of the first cuts short; here they come, without a reason."""
    first = threading.Event()

    def refuse(handler, body, number):
        if number > 1:
            first.wait()
        return replying({"error": "too long"} if number == 1 else b"", 400)(handler, body, number)

    monkeypatch.setattr(_Work, "end", lambda work: first.set())
    with servers(Fake(refuse)) as (pool, _), pytest.raises(EngineError, match="400: .*too long"):
        pool.begin(BODIES)()


def test_responses_are_drawn_while_another_adapter_is_loaded_and_used():
    with servers(fake := Fake(slow(0.1))) as (pool, said):
        wait = pool.begin(BODIES)
        pool.load({"adapter": "/somewhere", "next": "/elsewhere"})
        check(pool.begin([{**body, "model": "next"} for body in BODIES])())
        check(wait())
        assert sorted(fake.loaded) == ["adapter", "next"]
        pool.load({"next": "/elsewhere"})
        assert fake.loaded == ["next"]
        assert said == []


def test_what_a_lost_server_left_is_drawn_when_it_is_back(state, down):
    with servers(fake := Fake(down), patience=0.0) as (pool, said):
        wait = pool.begin(BODIES)
        while not pool.lost:
            time.sleep(0.01)
        state.clear()
        fake.loaded.clear()
        pool.load({"adapter": "/somewhere", "next": "/elsewhere"})
        assert sorted(fake.loaded) == ["adapter", "next"]
        check(wait())
        assert [line.split(" is ")[1][:4] for line in said] == ["lost", "back"]


def test_closing_ends_what_is_being_drawn_without_a_word():
    with servers(fake := Fake(slow(1.5)), patience=0.0) as (pool, said):
        pool.begin(BODIES)
        while fake.asked < 3:
            time.sleep(0.01)
        start = time.monotonic()
        pool.close()
        for thread in threading.enumerate():
            if thread.name.endswith("(_ask_all)"):
                thread.join()
        assert time.monotonic() - start < 1.2
        assert said == []


def test_sglang_is_known_by_its_models_and_asked_in_its_own_words():
    fake = FakeSGLang()
    options = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop_token_ids": [END]}
    options |= {"repetition_penalty": 1.0, "ignore_eos": True, "logprobs": 0}
    with servers(fake) as (pool, said):
        check(pool.begin([{**body, **options} for body in BODIES])())
        assert sorted(body["input_ids"][0] for body in fake.bodies) == list(range(20))
        body = next(body for body in fake.bodies if body["input_ids"] == [7])
        assert body.pop("sampling_params") == {
            "max_new_tokens": LIMIT,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [END],
            "sampling_seed": 7,
        }
        expected = {"input_ids": [7], "lora_path": "adapter", "return_logprob": True}
        assert body == expected
        fake.loaded.clear()  # started again
        check(pool.begin(BODIES)())
        other = replace(  # of a rank that loads no adapters
            pool, servers=[CompletionServer(fake.address, 5.0)], adapters={}, _works=[]
        )
        other.adopt(pool.adapters, {})
        check(other.begin(BODIES)())
        pool.load({"next": "/elsewhere"})
        assert fake.loaded == ["next"]
        assert said == []


def test_vllm_and_sglang_share_prompts_and_nonsense_of_one_loses_it():
    with servers(good := Fake(), bad := FakeSGLang(replying({"meta_info": {}})), patience=0.0) as (
        pool,
        said,
    ):
        check(pool.begin(BODIES)())
        assert pool.lost.keys() == {bad.address}
        assert "its reply lacks SGLang's output_token_logprobs" in said[0]
        assert good.asked >= len(BODIES) - bad.asked


def test_a_server_that_was_started_again_gets_the_adapter_again():
    def forgetful(handler, body, number):
        if number == 5:
            fake.loaded.clear()
        unknown = body["model"] not in fake.loaded
        return unknown and replying({"message": "no such model"}, 404)(handler, body, number)

    fake = Fake(forgetful)
    with servers(fake) as (pool, said):
        check(pool.begin(BODIES)())
        assert fake.loaded == ["adapter"]
        assert said == []


def test_adapters_follow_each_other_and_a_lost_server_is_back_with_the_next(state, down):
    good, bad = Fake(slow(0.05)), Fake(down)
    with servers(good, bad, patience=0.0) as (pool, said):
        check(pool.begin(BODIES)())
        assert pool.lost.keys() == {bad.address}
        state.clear()
        pool.load({"next": "/elsewhere"})
        assert pool.lost == {}
        assert said[-1] == f"{bad.address} is back"
        assert good.loaded == bad.loaded == ["next"]
        before = bad.asked
        check(pool.begin([{**body, "model": "next"} for body in BODIES])())
        assert bad.asked > before
        pool.close()
        assert good.loaded == bad.loaded == []


def test_a_server_that_takes_no_adapters_is_lost_and_alone_refused_with_what_to_do():
    with servers(Fake(), bad := Fake(adapters=False)) as (pool, said):
        assert pool.lost.keys() == {bad.address}
        assert len(said) == 1
        assert "--enable-lora" in said[0]
        check(pool.begin(BODIES)())
        assert bad.asked == 0
    words = "--allow_runtime_lora_updating .*--enable-lora"
    with pytest.raises(EngineError, match=words), servers(Fake(adapters=False)):
        pass


def test_each_server_is_checked_for_processed_log_probabilities_and_when_it_is_back():
    state = {"raw": True}

    def one_token(handler, body, number):
        if body["max_tokens"] > 1:
            return False
        assert body["top_k"] == 1
        logprobs = {
            "token_logprobs": [-0.5 if state["raw"] and handler.server is bad.server else 0]
        }
        return with_reply(token_ids=[END], logprobs=logprobs)(handler, body, number)

    good, bad = Fake(one_token), Fake(one_token)
    with servers(good, bad) as (pool, said):
        pool.check_logprobs(BODIES[0])
        assert pool.lost.keys() == {bad.address}
        assert "processed_logprobs" in said[0]
        state["raw"] = False
        pool.load({"adapter": "/somewhere"})
        pool.check_logprobs(BODIES[0])
        pool.check_logprobs(BODIES[0])
        assert pool.lost == {}
        assert (good.asked, bad.asked) == (1, 2)
        state["raw"] = True  # as one that was started again without the option
        pool.adopt({"adapter": "/somewhere"}, {bad.address: "gone"})
        pool.load({"adapter": "/somewhere"})
        pool.check_logprobs(BODIES[0])
        assert pool.lost.keys() == {bad.address}


def test_loading_and_unloading_end_soon_where_a_server_hangs(monkeypatch):
    monkeypatch.setattr(completions, "CONNECT_SECONDS", 0.3)
    for name in ("LOAD_SECONDS", "UNLOAD_SECONDS", "CONNECT_SECONDS"):
        monkeypatch.setattr(completion_pool, name, 0.3)
    with servers(Fake(), silent := Fake(), Fake(), timeout=60.0) as (pool, said):
        silent.server.shutdown()  # it listens, and answers no new connection
        start = time.monotonic()
        pool.load({"next": "/elsewhere"})
        assert pool.lost.keys() == {silent.address}
        assert "no answer came within 0.3 seconds" in said[0]
        pool.load({"third": "/elsewhere"})
        pool.servers[1].lost = None
        pool.close()
        assert time.monotonic() - start < 3.0


def test_all_servers_are_woken_and_put_to_sleep_and_one_that_cannot_be_is_lost():
    asked = []

    def awake(handler, body, number):
        asked.append(handler.path)
        return replying({}, 500 if number == 2 and handler.server is bad.server else 200)(
            handler, body, number
        )

    good, bad = Fake(awake), Fake(awake)
    with servers(good, bad) as (pool, said):
        pool.set_awake(False)
        assert (asked, pool.lost) == (["/sleep?level=1"] * 2, {})
        pool.set_awake(True)
        assert asked[2:] == ["/wake_up"] * 2
        assert pool.lost.keys() == {bad.address}
        assert "it answers 500" in said[0]


def test_a_server_tells_how_many_tokens_it_has_room_for():
    with Fake().running() as fake:
        assert CompletionServer(fake.address, 5.0).base_limit() == 64
    with pytest.raises(ServerError, match="refused"):
        CompletionServer(fake.address, 5.0).base_limit()
