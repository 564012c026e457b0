"""Agents: programs with the openai client play episodes; a script stands for the model."""

import asyncio
import contextlib
import json
import re
import shlex
import sys
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import openai
import psutil
import pytest
from transformers import AutoTokenizer

from data.chat_tokenizers import build_chat_tokenizer
from dschat_lora.addons.agents import agents as module
from dschat_lora.addons.agents.agent_programs import (
    AgentCommand,
    AgentFunction,
    NoRewardError,
    reward_and_metrics,
)
from dschat_lora.addons.agents.agents import AgentFailedError, AgentLimits, Agents
from dschat_lora.addons.agents.conversations import Conversations, PromptTokens
from dschat_lora.addons.environments.turn_tokens import TurnTokens
from dschat_lora.config.bundled import BUNDLED_MODEL
from dschat_lora.data.chat import make_chat
from dschat_lora.data.encoder import make_encoder
from dschat_lora.generation.stops import end_of_text
from dschat_lora.models.loading import end_ids
from dschat_lora.rl.draw.player import Draw
from dschat_lora.rl.response.response import DecodedTurn, Origin, Response

pytestmark = pytest.mark.usefixtures("one_rank")


def user(text):
    return {"role": "user", "content": text}


async def ask(client, *messages, **options):
    """The actor's answer: its message, and why it ended."""
    create = client.chat.completions.create
    return (await create(model="actor", messages=[*messages], **options)).choices[0]


QUESTION = [user("What is 1?")]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


def prompt_tokens(tokenizer, limit=400):
    turn_tokens = TurnTokens(make_chat(tokenizer), tokenizer)
    return PromptTokens(make_encoder(tokenizer), turn_tokens, limit)


class Script:
    """Stands for the decoder: the answer to each prompt's text, and what it was asked."""

    def __init__(self, tokenizer, answer):
        self.tokenizer, self.answer, self.rounds = tokenizer, answer, []

    def __call__(self, prompts, *, seeds, limits=(), prefixes=None, keep_logprobs):
        assert keep_logprobs
        if prompts:  # else a round after the last call
            asked = SimpleNamespace(prompts=prompts, seeds=seeds, prefixes=prefixes)
            self.rounds.append(asked)
        rows = []
        for prompt, own, limit in zip(prompts, seeds, limits, strict=True):
            for seed in own:
                answer = self.answer(self.tokenizer.decode(prompt), seed)
                if isinstance(answer, str):
                    answer = self.tokenizer.encode(answer, add_special_tokens=False)
                    answer = [*answer, end_ids(self.tokenizer)[0]]
                rows.append(answer[:limit])
        return lambda: [
            DecodedTurn(row, [-0.5] * len(row), [-0.25] * len(row), undrawn=False) for row in rows
        ]


@pytest.fixture
def play(tokenizer):
    """Plays a program over rows; closes its server."""
    opened = []

    def run(program, rows, answer, *, copies=1, limits=None, tokenizer=tokenizer, limit=400):
        if not isinstance(program, AgentCommand):
            program = AgentFunction("mine:play", program)
        agents = Agents(
            program,
            prompt_tokens(tokenizer, limit),
            limits or AgentLimits(5.0, 0, 100, 64),
            max_new_tokens=100,
            end_of_text=lambda stop, tokens: end_of_text(tokens, stop, tokenizer.decode),
        )
        opened.append(agents)
        script = Script(tokenizer, answer)
        blanks = [
            Response((7, 8), (), False, n, json.dumps(row).encode(), origin=Origin(n * copies + k))
            for n, row in enumerate(rows)
            for k in range(copies)
        ]
        ends = set(end_ids(tokenizer))
        draw = Draw(
            script,
            ("k",),
            copies,
            100,
            keep_logprobs=False,
            is_end=ends.__contains__,
            find_end=lambda tokens: None,
        )
        played = agents.play(blanks, draw, key=("k",))
        assert not agents.episodes
        return SimpleNamespace(responses=played, script=script, agents=agents)

    yield run
    for agents in opened:
        agents.close()


def text_of(tokenizer, response):
    return tokenizer.decode(list(response.prompt) + list(response.tokens))


# ---------------------------------------------------------------------------- tokens


@pytest.mark.smoke
def test_a_conversation_goes_on_from_the_tokens_that_were_drawn(play, tokenizer):
    parts = [*"The"]  # letter by letter, as no tokenizer would write it
    drawn = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in parts]
    assert tokenizer.encode("The", add_special_tokens=False) != drawn
    drawn += [end_ids(tokenizer)[0]]

    async def agent(row, client):
        said = await ask(client, *QUESTION)
        content = said.message.content
        assert content == "The"
        # White space around an answer is no rewriting.
        messages = [*QUESTION, {**said.message.model_dump(), "content": " The\n"}]
        more = [*messages, user("And?")]
        await client.chat.completions.create(model="any-name", messages=more)
        return {"reward": 0.5, "turns_taken": 2, "kind": "text"}

    played = play(agent, [{}], lambda prompt, seed: drawn)
    (response,) = played.responses
    assert response.episode.earlier_sequences == ()
    first, second = (each.prompts[0] for each in played.script.rounds)
    assert tuple(first) == response.prompt
    assert second[: len(first) + 4] == [*first, *drawn]
    assert [*response.prompt, *response.tokens] == [*second, *drawn]
    read = len(second) - len(first) - 4
    assert response.actor_mask == (*[True] * 4, *[False] * read, *[True] * 4)
    assert tokenizer.decode(response.tokens[4 : 4 + read]).split() == [
        "Human:",
        "And?",
        "Assistant:",
    ]
    assert response.logprobs == (-0.5,) * 8
    assert response.sampler_logprobs == (-0.25,) * 8
    assert (response.episode.reward, response.episode.logged) == (0.5, {"turns_taken": 2.0})
    assert (response.episode.num_calls, response.ended, response.episode.failure) == (2, True, "")
    assert played.script.rounds[1].prefixes == [(0, len(first) + 3)]
    assert json.loads(response.episode.earlier)[-2:] == [
        {"role": "assistant", "content": " The\n"},
        user("And?"),
    ]


def test_what_rewrites_its_history_or_asks_beside_it_has_sequences_of_its_own(play, tokenizer):
    async def agent(row, client):
        first = (await ask(client, *QUESTION)).message.content
        rewritten = {"role": "assistant", "content": f"Not {first}"}
        await ask(client, *QUESTION, rewritten, user("Why?"))
        await ask(client, user("sub"), n=2)
        going_on = [*QUESTION, {"role": "assistant", "content": first}]
        await ask(client, *going_on, user("Go on."))
        await ask(client, *going_on, user("Go back."))  # a branch of the first
        return 1

    played = play(agent, [{}], lambda prompt, seed: "one")
    (response,) = played.responses
    assert [sum(each.actor_mask) for each in response.sequences] == [2, 2, 2, 4, 2]
    assert response.num_actor_tokens == 12
    texts = [tokenizer.decode(each.prompt) for each in response.sequences]
    assert ["Not one" in text for text in texts] == [True, False, False, False, False]
    assert ["sub" in text for text in texts] == [False, True, True, False, False]
    # The branch reads the answer that the other sequence learns from, and learns its own alone.
    assert "one" in texts[4]
    assert "Go back." in texts[4]
    assert "one" not in texts[3]
    seeds = [seed for each in played.script.rounds for own in each.seeds for seed in own]
    assert len(set(seeds)) == 6


def test_seeds_are_of_the_row_and_of_what_is_asked_in_whatever_order_calls_come(play):
    async def agent(row, client):
        async def ask_later(text, wait):
            await asyncio.sleep(wait)
            await ask(client, user(text))

        order = row["order"]
        await asyncio.gather(*(ask_later(text, 0.001 * n) for n, text in enumerate(order)))
        return 0

    def asked(order):
        played = play(agent, [{"order": order}], lambda prompt, seed: "one").script.rounds
        return {
            tuple(prompt): seeds[0]
            for each in played
            for prompt, seeds in zip(each.prompts, each.seeds, strict=True)
        }

    first, second = asked("abc"), asked("cba")
    assert first == second
    assert len(set(first.values())) == 3


def test_what_was_computed_is_taken_from_the_row_that_computed_it(play):
    async def agent(row, client):
        messages = [user(row["ask"])]
        said = await ask(client, *messages)
        messages += [said.message.model_dump(), user("more")]
        await ask(client, *messages)
        return 0

    # Equal prompts, which are read once, do not stand together.
    rows = [{"ask": ask} for ask in ("one", "two", "one", "two")]
    played = play(agent, rows, lambda prompt, seed: f"says {seed % 1000}")
    first, second = played.script.rounds
    assert [len(own) for own in first.seeds] == [2, 2]
    before = [(p, seed) for p, own in zip(first.prompts, first.seeds, strict=True) for seed in own]
    for prompt, (row, count) in zip(second.prompts, second.prefixes, strict=True):
        asked, seed = before[row]
        text = f"says {seed % 1000}"
        answer = played.script.tokenizer.encode(text, add_special_tokens=False)
        assert prompt[:count] == [*asked, *answer]


@pytest.mark.parametrize("family", ["qwen3", "llama3_1", "qwen2_5"])
def test_tool_calls_that_a_client_sends_back_go_on_from_what_was_drawn(play, family):
    try:
        tokenizer = build_chat_tokenizer(family)
    except FileNotFoundError:
        pytest.skip("the installed TRL has no such template")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    if family == "llama3_1":
        call = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    tools = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Add.",
                "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
            },
        }
    ]

    async def agent(row, client):
        messages = list(QUESTION)
        said = await ask(client, *messages, tools=tools)
        asked = said.message
        assert said.finish_reason == "tool_calls"
        (wanted,) = asked.tool_calls
        assert wanted.function.name == "add"
        assert json.loads(wanted.function.arguments) == {"a": 1, "b": 2}
        result = {"role": "tool", "tool_call_id": wanted.id, "content": "3"}
        messages += [asked.model_dump(), result]
        last = await ask(client, *messages, tools=tools)
        return float(last.message.content == "It is 3.")

    answers = iter([call, "It is 3."])
    played = play(agent, [{}], lambda prompt, seed: next(answers), tokenizer=tokenizer, limit=2000)
    (response,) = played.responses
    assert (response.episode.failure, response.episode.reward) == ("", 1.0)
    assert response.episode.earlier_sequences == ()
    assert "Add." in tokenizer.decode(response.prompt)
    assert call in tokenizer.decode(response.tokens)


# ---------------------------------------------------------------------------- what goes wrong


def test_episodes_that_crash_hang_or_ask_too_much_are_left_out_and_counted(play, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.5)

    async def agent(row, client):
        kind = row["kind"]
        if kind == "crash":
            raise KeyError("not there")
        if kind == "hang":
            await asyncio.sleep(1000)
        if kind == "silent":
            return 1.0
        for _ in range(9 if kind == "greedy" else 2):
            await ask(client, *QUESTION)
        return "good" if kind == "text" else None if kind == "none" else 0.5

    kinds = ["good", "crash", "hang", "greedy", "text", "none", "silent"]
    start = time.monotonic()
    rows = [{"kind": kind} for kind in kinds]
    played = play(agent, rows, lambda prompt, seed: "one", limits=AgentLimits(1.0, 0, 4, 64))
    assert time.monotonic() - start < 5
    failures = {kind: r.episode.failure for kind, r in zip(kinds, played.responses, strict=True)}
    assert failures["good"] == failures["none"] == ""
    assert failures["crash"] == "KeyError: 'not there'"
    assert failures["hang"] == "timed out after 1 seconds (--agent_timeout)"
    assert "the episode has used up its 4 answers (--agent_max_calls)" in failures["greedy"]
    assert "an agent gave 'good'; return a finite number" in failures["text"]
    assert failures["silent"] == "it asked nothing"
    for response in played.responses:
        assert response.is_left_out == bool(response.episode.failure)
        assert (response.tokens == ()) == bool(response.episode.failure)
    assert [r.episode.reward for r in played.responses] == [0.5, *[None] * 6]


def test_an_episode_that_hangs_is_waited_for_once(play, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    took = []

    async def agent(row, client):
        if row["hangs"]:
            await asyncio.sleep(1000)
        start = time.monotonic()
        for _ in range(5):
            await ask(client, *QUESTION)
        took.append(time.monotonic() - start)
        return 0.5

    rows = [{"hangs": False}, {"hangs": True}]
    play(agent, rows, lambda prompt, seed: "one", limits=AgentLimits(3.0, 0, 9, 64))
    assert 0.5 < took[0] < 2.0  # not five times


def test_a_failed_episode_is_begun_again_with_other_random_numbers(play):
    calls = []

    async def agent(row, client):
        await ask(client, *QUESTION)
        calls.append(row["n"])
        if len(calls) < 3:
            raise RuntimeError("once more")
        return 1.0

    played = play(agent, [{"n": 5}], lambda p, seed: "one", limits=AgentLimits(5.0, 3, 9, 64))
    (response,) = played.responses
    episode = response.episode
    assert (episode.failure, episode.num_retries, episode.num_calls) == ("", 2, 1)
    assert len({each.seeds[0][0] for each in played.script.rounds}) == 3


def test_whatever_a_program_raises_ends_its_episode_at_once(play):
    async def cancelled():
        raise asyncio.CancelledError

    def exhausted():
        return next(iter([]))

    async def refused(client, model):
        with contextlib.suppress(openai.BadRequestError):
            long = [{"role": "user", "content": "no " * 500}]
            await ask(client, *long)
        return -1.0

    start = time.monotonic()
    reasons = []
    for program in (cancelled, exhausted, refused):
        played = play(program, [{}], lambda prompt, seed: "one", limits=AgentLimits(9.0, 1, 9, 64))
        assert played.responses[0].episode.num_retries == 1
        reasons.append(played.responses[0].episode.failure)
    assert time.monotonic() - start < 6
    assert reasons[0].startswith("CancelledError")
    assert reasons[1].startswith("RuntimeError: StopIteration")
    assert reasons[2].startswith("actor has room for 400 tokens, the prompt has")


def test_an_answer_that_nobody_waited_for_is_not_learnt_from(play):
    async def agent(row, client):
        kept = await ask(client, *QUESTION)
        left = asyncio.create_task(ask(client, user("sub")))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(left, 0.3 if row["waits"] else 0.0001)
        return float(bool(kept))

    def answer(prompt, seed):
        if "sub" in prompt:
            time.sleep(1)  # the program has gone on
        return "one"

    played = play(agent, [{"waits": True}, {"waits": False}], answer)
    for response in played.responses:
        assert response.episode.reward == 1.0
        assert response.episode.earlier_sequences == ()
        assert "sub" not in played.script.tokenizer.decode(response.prompt)


def test_special_tokens_that_a_program_passes_on_stay_text(play, tokenizer):
    end = "<|end|>"
    (number,) = [n for n, t in tokenizer.added_tokens_decoder.items() if t.content == end]

    async def agent(row, client):
        said = await ask(client, *QUESTION)
        messages = [*QUESTION, said.message.model_dump()]
        messages.append(user(f"a tool says {end}"))
        await ask(client, *messages)
        return 1.0

    (response,) = play(agent, [{}], lambda prompt, seed: "one").responses
    # The first answer's end is the only one of the prompt: what was passed on is text.
    assert list(response.prompt).count(number) == 1
    assert end.strip("<|>") in tokenizer.decode(response.prompt)


def answered_once(to, answer):
    """An episode's conversations, one of which has tokens 3 and 4 for an answer; its prompt."""
    own = Conversations((1,))
    ids = own.prompt_ids(QUESTION, {}, to)
    conversation = own.continued_by(ids)
    conversation.add((), DecodedTurn([3, 4], [0.0] * 2, [0.0] * 2, undrawn=False))
    own.answered(conversation, QUESTION, {}, answer)
    return own, conversation, ids


def calling(content, arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def test_a_special_token_that_arguments_spell_by_escapes_is_found(tokenizer):
    to = prompt_tokens(tokenizer)
    assert to.holds_special_tokens([calling(None, r'{"a": "\u003c|end|>"}')])
    assert not to.holds_special_tokens([calling(None, r'{"a": "\u003c end|>"}')])


@pytest.mark.parametrize(
    ("content", "arguments", "is_same"),
    [
        ("<think>\nHm.\n</think>\n\nSo:", '{"a": 1.0, "b": ["x  y", {}]}', True),
        ("<think>\n\nHm.\n\n</think>\n\n\n\nSo:", '{"b":["x  y",{}],"a":1}', True),
        ("<think>Hm.</think>So:", {"a": 1, "b": ["x  y", {}]}, True),
        ("<think>Hm.</think>So :", '{"a": 1.0, "b": ["x  y", {}]}', False),
        ("<think>Hm.</think>So:", '{"a": true, "b": ["x  y", {}]}', False),
        ("<think>Hm.</think>So:", '{"a": 1.0, "b": ["x y", {}]}', False),
        ("So:", '{"a": 1.0, "b": ["x  y", {}]}', False),
    ],
)
def test_an_answer_goes_on_from_what_was_drawn_however_a_program_writes_it(
    content, arguments, is_same
):
    turns = "{% for m in messages %}{{ m.content }}"
    turns += "{{ m.tool_calls | tojson if m.tool_calls }}|{% endfor %}"
    to = prompt_tokens(build_chat_tokenizer("qwen3", template=turns))
    drawn = calling("<think>\nHm.\n</think>\n\nSo:", '{"a": 1.0, "b": ["x  y", {}]}')
    own, _, ids = answered_once(to, drawn)
    history = [*QUESTION, calling(content, arguments), *QUESTION]
    assert (own.prompt_ids(history, {}, to)[: len(ids) + 2] == [*ids, 3, 4]) == is_same


def test_where_all_episodes_fail_the_error_is_the_first_ones(play):
    def agent(row):
        raise ZeroDivisionError("mine")

    played = play(agent, [{}, {}], None)
    with pytest.raises(AgentFailedError) as caught:
        played.agents.checked(played.responses)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    played.agents.checked([*played.responses, Response((1,), (2,), True, 0)])


def test_functions_that_block_run_at_once_with_a_client_of_their_own(play):
    def agent(client, model, wait, base_url):
        assert isinstance(client, openai.OpenAI)
        assert str(client.base_url).rstrip("/") == base_url
        time.sleep(wait)
        with client.chat.completions.create(model=model, messages=QUESTION, stream=True) as played:
            text = "".join(each.choices[0].delta.content or "" for each in played)
        return float(text == "one two")

    start = time.monotonic()
    played = play(agent, [{"wait": 0.5}] * 8, lambda prompt, seed: "one two")
    assert time.monotonic() - start < 3
    assert [r.episode.reward for r in played.responses] == [1.0] * 8
    assert len(played.script.rounds) == 1


@pytest.mark.parametrize("asked", [{}, {"continue_final_message": True}])
def test_an_answer_that_was_cut_off_is_continued_from_its_tokens(play, tokenizer, asked):
    drawn = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcd"]
    drawn.append(end_ids(tokenizer)[0])

    async def agent(row, client):
        said = await ask(client, *QUESTION, max_tokens=2)
        again = {"role": "assistant", "content": said.message.content}
        await ask(client, *QUESTION, again, extra_body=asked)
        said = await ask(client, user("?"), max_tokens=2)
        again = said.message.model_dump()
        await ask(client, user("?"), again, extra_body={"add_generation_prompt": True})
        said = await ask(client, user("!"))
        await ask(client, user("!"), said.message.model_dump())
        return 1.0

    played = play(agent, [{}], lambda prompt, seed: drawn)
    first, second, _, closed, _, last = (each.prompts[0] for each in played.script.rounds)
    assert second == [*first, *drawn[:2]]
    assert tokenizer.decode(closed).endswith("Assistant:")
    assert tokenizer.decode(last).endswith("Assistant: abcd")  # without the end that was drawn
    (response,) = played.responses
    assert (*drawn[:2], *drawn) in [each.tokens for each in response.sequences]


@pytest.mark.parametrize(
    ("asked", "ended"),
    [
        ([(None, 2), (3, 9)], True),  # a side request that is cut, at last or at first
        ([(3, 9), (None, 2)], True),
        ([(50, 2), (3, 9)], True),
        ([(9, 20), (3, 1)], False),  # one that ends is no end of an answer that was cut
        ([(3, 9)], False),  # nothing else was asked
        ([(3, 9), (3, 9)], False),
        ([(3, 1), (3, 9)], False),  # of equals the last
        ([(None, 2), (None, 999)], False),  # at the run's own limit
    ],
)
def test_a_side_request_that_is_cut_off_does_not_cut_off_the_episode(play, tokenizer, asked, ended):
    async def agent(row, client):
        for most, size in asked:
            question = [user(f"size {size}?")]
            limit = {} if most is None else {"max_tokens": most}
            await ask(client, *question, **limit)
        return 1.0

    def answer(prompt, seed):
        size = int(prompt.partition("size ")[2].partition("?")[0])
        return [*[tokenizer.encode("a")[0]] * (size - 1), end_ids(tokenizer)[0]]

    (response,) = play(agent, [{}], answer, limit=60).responses
    assert response.ended is ended


def test_stop_strings_and_limits_of_a_request_hold(play, tokenizer):
    async def agent(row, client):
        options = {"max_tokens": 2, "temperature": 0, "seed": 3, "top_p": 0.5}
        short = await ask(client, *QUESTION, **options)
        assert short.finish_reason == "length"
        many = await ask(client, user("long"), max_tokens=100_000)
        assert many.finish_reason == "stop"
        stopped = await ask(client, user("And?"), stop=[" cd"])
        assert stopped.finish_reason == "stop"
        assert stopped.message.content == "ab"
        long = [{"role": "user", "content": "no " * 500}]
        with pytest.raises(openai.BadRequestError, match="has room for 400 tokens"):
            await ask(client, *long)
        return 1.0

    played = play(agent, [{}], lambda prompt, seed: "ab cd ef gh")
    (response,) = played.responses
    assert response.episode.reward == 1.0
    first, _, last = response.sequences
    assert len(first.tokens) == 2
    assert tokenizer.decode(last.tokens).rstrip().endswith("cd")


def test_an_episode_that_is_over_asks_nothing_more(play):
    kept = []

    async def agent(row, client):
        await ask(client, *QUESTION)
        with pytest.raises(openai.NotFoundError, match="Responses API is not served.*chat_compl"):
            await client.responses.create(model="actor", input="What is 1?")
        kept.append(client)
        return 1.0

    play(agent, [{}], lambda prompt, seed: "one")
    # In another thread than the client's loop: by its address.
    url, key = str(kept[0].base_url), kept[0].api_key
    late = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    with pytest.raises(openai.NotFoundError, match="the episode is over"):
        late.chat.completions.create(model="actor", messages=QUESTION)


PROGRAM = textwrap.dedent(
    """
    import json, os, sys, urllib.request

    def post(url, body, **head):
        head["Content-Type"] = "application/json"
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head))

    row = json.loads(sys.stdin.read())
    kind, asked = row["kind"], {"model": "gpt-4o", "messages": row["prompt"]}
    key = "Bearer " + os.environ["OPENAI_API_KEY"]
    post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked, Authorization=key)
    print("not the reward")
    if kind == "post":
        post(os.environ["REWARD_URL"], {"reward": 0.25, "seen": 1})
    elif kind == "fail":
        sys.exit("it went wrong")
    elif kind == "print":
        print(json.dumps({"reward": 0.75}))
    elif kind == "hang":
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(777)", row["file"]])
        print("started", file=open(row["file"], "w"))
        import time
        time.sleep(777)
    """
)


def test_a_command_plays_an_episode_and_nothing_of_it_stays(play, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    (tmp_path / "agent.py").write_text(PROGRAM)
    kinds = ["print", "post", "fail", "hang", "nothing"]
    marker = str(tmp_path / "marker")
    rows = [{"kind": kind, "prompt": QUESTION, "file": marker} for kind in kinds]
    command = AgentCommand(f"{sys.executable} {tmp_path}/agent.py")
    played = play(command, rows, lambda prompt, seed: "one", limits=AgentLimits(8.0, 0, 9, 64))
    rewards = {k: r.episode.reward for k, r in zip(kinds, played.responses, strict=True)}
    assert rewards == {"print": 0.75, "post": 0.25, "fail": None, "hang": None, "nothing": None}
    failures = [r.episode.failure for r in played.responses]
    assert failures[0] == failures[1] == ""
    assert failures[2] == "RuntimeError: it ended with exit code 1: it went wrong"
    assert failures[4].startswith("NoRewardError: its last line is not JSON: 'not the reward'; ")
    assert failures[3].startswith("timed out")
    assert (tmp_path / "marker").exists()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (left := sleepers(marker)):
        time.sleep(0.05)
    assert not left


def run_command(shell, **options):
    command = AgentCommand(f"sh -c {shlex.quote(shell)}", **options)
    return asyncio.run(command.run({"prompt": "x" * 2**20}, "http://127.0.0.1:1/v1", "key"))


def test_the_last_line_of_a_command_is_its_reward_however_much_it_prints_before():
    # More than a pipe holds, on both streams, and a row that is not read.
    shell = "head -c 3000000 /dev/zero; head -c 300000 /dev/zero >&2; printf '\\377\\n0.5\\n\\n'"
    assert run_command(shell) == 0.5
    assert run_command("wc -c") == 2**20 + 15  # '{"prompt": "..."}' and a line feed
    assert run_command("echo null") is run_command("true", is_scored=True) is None


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("shell", "message"),
    [
        ("printf 'reward:\\t0.5'", r"its last line is not JSON: 'reward:\\t0.5'; print the reward"),
        ("printf '\\377'", "its last line is not JSON: '\ufffd'; "),
        ("printf 0.5; head -c 3000000 /dev/zero", r"not JSON: '(\\x00){49}\\x0; "),
        ("head -c 100000 /dev/zero | tr '\\0' '['", r"not JSON: '\[{199}; "),
        (
            "true",
            "it printed nothing; print the reward on the last line, as a number or an object with",
        ),
        ("echo said; exit 3", "it ended with exit code 3: said$"),
        ("echo said; echo why >&2; exit 3", "it ended with exit code 3: why$"),
        ("kill -9 $$", "it ended with exit code -9: $"),
    ],
)
def test_a_command_without_a_reward_is_refused_with_what_it_printed(shell, message):
    with pytest.raises((NoRewardError, RuntimeError), match=message):
        run_command(shell)


def test_a_failed_command_is_named_with_its_episode_and_no_line_of_ours(play, capfd):
    rows = [{}, {}]
    command = AgentCommand("""echo '{"score": 1}'""")
    played = play(command, rows, lambda prompt, seed: "one", limits=AgentLimits(5.0, 1, 9, 64))
    assert [r.episode.num_retries for r in played.responses] == [1, 1]
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        r"an episode of --agent_command failed \(prompt [01] of the batch, copy 0\): ValueError: "
        r"an agent gave \{'score': 1\}; return .* to exclude the episode",
        line,
    )


def sleepers(marker):
    """Processes that the hanging program of a test has left behind."""
    outcome = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if marker in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            outcome.append(process.pid)
    return outcome


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (1, (1.0, {})),
        (None, (None, {})),
        ({"reward": None, "tries": 3}, (None, {"tries": 3.0})),
        ({"reward": True, "text": "x", "share": float("inf")}, (1.0, {})),
        (np.float32(0.5), (0.5, {})),
        ({"reward": 1, "seen": np.int64(2)}, (1.0, {"seen": 2.0})),
    ],
)
def test_a_reward_is_a_number_or_stands_in_a_dict(found, expected):
    assert reward_and_metrics(found) == expected


@pytest.mark.parametrize("found", ["1", float("nan"), {"score": 1}, [1], 10**400, {"reward": "x"}])
def test_what_is_no_reward_is_refused_by_what_was_given(found):
    with pytest.raises(ValueError, match="an agent gave .*return a finite number"):
        reward_and_metrics(found)


def test_an_agent_must_take_what_there_is():
    def good(row, client, answer, more=1):
        pass

    AgentFunction("m:f", good).check_columns({"answer"})
    with pytest.raises(ValueError, match="--agent m:f asks for answer; it may take row, client"):
        AgentFunction("m:f", good).check_columns({"prompt"})


def test_a_history_that_the_template_would_not_append_to_is_tokenised_anew():
    template = "{% for m in messages %}{{ loop.index if messages|length > 1 }}{{ m.content }}"
    tokenizer = build_chat_tokenizer("qwen3", template=template + "|{% endfor %}")
    answer = {"role": "assistant", "content": tokenizer.decode([3, 4])}
    to = prompt_tokens(tokenizer)
    own, conversation, ids = answered_once(to, answer)
    longer = own.prompt_ids([*QUESTION, answer, *QUESTION], {}, to)
    assert longer[: len(ids)] != ids
    assert own.continued_by(longer) is not conversation
