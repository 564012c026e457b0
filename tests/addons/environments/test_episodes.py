"""Episodes of several turns: which tokens are learnt, what follows a turn, and when it ends."""

import json
import math
from functools import reduce
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from addons.environments.episodes import Script
from data.chat_tokenizers import build_chat_tokenizer
from data.hand_tokenizers import build_byte_tokenizer
from dschat_lora.addons.environments.environment import Environment, EnvironmentFailedError
from dschat_lora.addons.environments.players import Episodes, load_environment
from dschat_lora.addons.environments.turn_tokens import TurnTokens
from dschat_lora.algos.ppo import policy_loss
from dschat_lora.data.chat import Chat
from dschat_lora.data.templates import BUILT_IN_TEMPLATE
from dschat_lora.rl.learn.experience import Experience, advantages_and_returns
from dschat_lora.rl.loop.train import _failures_saved
from dschat_lora.rl.options.algorithms import PpoConfig
from dschat_lora.rl.response.batch import collate, response_mask
from dschat_lora.rl.response.response import Episode, Origin, Response
from dschat_lora.rl.score.user_functions import calls_of
from helpers.roles import Words

CPU, T, F = torch.device("cpu"), True, False
VOCAB = 11


pytestmark = pytest.mark.usefixtures("one_rank")

# ---------------------------------------------------------------------------- what is learnt

# Turns of one token too, at the end and in the middle, and a response without an environment.
EPISODES = [
    Response((3, 4), (5, 6, 2, 9, 9, 7, 2), T, 0, actor_mask=(T, T, T, F, F, T, T)),
    Response((5,), (6, 2, 8, 2), T, 1, actor_mask=(T, T, F, T)),
    Response((4, 4, 4), (1, 3, 2), T, 2),
    Response((6,), (2, 8, 3, 8, 8, 4), F, 3, actor_mask=(T, F, T, F, F, T)),
]
SCORES = [1.5, -0.5, 0.25, 2.0]
PPO = PpoConfig(gamma=0.9, lam=0.8, kl_coef=0.3, whiten_advantages=False)


def networks(responses):
    """(T, VOCAB) logits of actor and reference, and (T,) values, of each whole sequence; fp64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(each), VOCAB) for each in responses]
    return [
        tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in three)
        for three in ((s, s, s[:1]) for s in shapes)
    ]


def tables(responses, outputs):
    """Log-probabilities of actor and reference, and values, as the engines make them."""
    batch = collate(responses, range(len(responses)), pad_id=0)
    mask = response_mask(responses, CPU)
    width = batch.input_ids.shape[1]
    outcome = []
    for kind in range(3):
        whole = torch.zeros(len(responses) * width, VOCAB, dtype=torch.float64)
        for row, output in enumerate(outputs):
            values = output[kind] if kind < 2 else output[kind][:, None].expand(-1, VOCAB)
            whole[row * width : row * width + len(values)] = values
        at = whole[batch.logit_positions]
        if kind < 2:
            at = at.log_softmax(-1)
        picked = at[torch.arange(len(at)), batch.target_ids]
        outcome.append(batch.table(picked, mask.shape[1]))
    return mask, outcome


def slow_episode(response, output, score, *, gamma, lam, kl_coef):
    """(log-probability, KL, advantage, return) of each of the actor's tokens, token by token.

    The environment's tokens are no time steps: they are what the state becomes.
    """
    actor, reference, values = (each.tolist() for each in output)
    ids, start = [*response.prompt, *response.tokens], len(response.prompt)
    mask = response.actor_mask or (T,) * len(response.tokens)

    def logprob(logits, place):
        row = logits[place - 1]
        return row[ids[place]] - math.log(sum(math.exp(x) for x in row))

    steps, next_value, next_advantage, last = [], 0.0, 0.0, True
    for place in reversed(range(start, len(ids))):
        if not mask[place - start]:
            continue
        own, other = logprob(actor, place), logprob(reference, place)
        reward = -kl_coef * (own - other) + (score if last else 0.0)
        value = values[place - 1]
        delta = reward + gamma * next_value - value
        next_advantage = delta + gamma * lam * next_advantage
        next_value, last = value, False
        steps.insert(0, (own, own - other, next_advantage, next_advantage + value))
    return steps


def test_episodes_are_those_of_a_slow_loop_over_every_token():
    outputs = networks(EPISODES)
    mask, (logprobs, reference, values) = tables(EPISODES, outputs)
    scores = torch.tensor(SCORES, dtype=torch.float64)
    experience = Experience(EPISODES, mask, reference, scores, logprobs, values)
    targets = advantages_and_returns(experience, scores, PPO, kl_coef=PPO.kl_coef)
    total = 0.0
    for row, (response, output, score) in enumerate(zip(EPISODES, outputs, SCORES, strict=True)):
        steps = slow_episode(response, output, score, gamma=0.9, lam=0.8, kl_coef=0.3)
        assert len(steps) == response.num_actor_tokens == int(mask[row].sum())
        outcome = zip(
            *(
                table[row, : len(steps)].tolist()
                for table in (logprobs, experience.kl(), targets.advantages, targets.returns)
            ),
            strict=True,
        )
        for mine, expected in zip(outcome, steps, strict=True):
            assert mine == pytest.approx(expected, abs=1e-12)
        # A policy that has moved: half of the tokens by a ratio of 1.5, which the clip bounds.
        moved = [math.log(1.5) * (n % 2) for n in range(len(steps))]
        for (*_, advantage, _), log_ratio in zip(steps, moved, strict=True):
            ratio = math.exp(log_ratio)
            total += max(-advantage * ratio, -advantage * min(ratio, 1.2))
    odd = math.log(1.5) * (torch.arange(mask.shape[1]) % 2).double()
    loss = policy_loss(
        logprobs + odd, logprobs, targets.advantages, mask, cliprange=0.2, cliprange_high=0.2
    )
    assert float(loss.total) == pytest.approx(total, abs=1e-10)


def test_responses_are_compared_whole_and_padding_teaches_nothing():
    config = PpoConfig(algorithm="rloo", kl_coef=0.3)
    pair = [EPISODES[0], EPISODES[1]]
    pair[1] = Response(**{**vars(pair[1]), "group": 0})
    outputs = networks(pair)
    mask, (logprobs, reference, _) = tables(pair, outputs)
    scores = torch.tensor(SCORES[:2], dtype=torch.float64)
    experience = Experience(pair, mask, reference, scores, logprobs, None)
    outcome = advantages_and_returns(experience, scores, config, kl_coef=0.3).advantages
    steps = [
        slow_episode(r, o, 0.0, gamma=1.0, lam=1.0, kl_coef=0.0)
        for r, o in zip(pair, outputs, strict=True)
    ]
    rewards = [
        score - 0.3 * sum(kl for _, kl, _, _ in own)
        for score, own in zip(SCORES, steps, strict=False)
    ]
    assert outcome[0].tolist() == pytest.approx([rewards[0] - rewards[1]] * 5)
    assert outcome[1].tolist() == pytest.approx([rewards[1] - rewards[0]] * 3 + [0, 0])


def test_an_episode_is_read_whole_and_scored_at_its_last_token():
    batch = collate(EPISODES, [3, 1], pad_id=0)
    assert batch.input_ids.tolist() == [[6, 2, 8, 3, 8, 8, 4], [5, 6, 2, 8, 2, 0, 0]]
    assert batch.ends.tolist() == [6, 7 + 4]
    assert batch.target_ids.tolist() == [2, 3, 4, 6, 2, 2]
    assert batch.logit_positions.tolist() == [0, 2, 5, 7 + 0, 7 + 1, 7 + 3]
    assert batch.step.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.counts.num_targets == 6
    assert batch.counts.num_tokens == 7 + 5


# ---------------------------------------------------------------------------- turns and ends


def environment(function, **options):
    return Environment("environment", "mine:reply", function, Words(), **options)


def user(content, **more):
    return {"role": "user", "content": content, **more}


def cycle():
    outcome = user("x")
    outcome["more"] = outcome
    return outcome


def replies_of(found):
    function = environment(lambda responses: found)
    return function.replies([Response((9,), (5, 2), T, 0)], [0])


def play(function, turns, *, max_turns=4, max_tokens=20):
    """Episodes of one, whose turns are given as tokens; 2 ends one. What was asked, too."""
    draw = Script(turns, is_end=lambda token: token == 2, max_tokens=max_tokens)
    tasks = [Response((9, n), (), F, n, origin=Origin(n)) for n in range(len(turns))]
    say = lambda response, reply: [int(c) for m in reply for c in m["content"]]  # noqa: E731
    played = Episodes(environment(function), say, max_turns).play(tasks, draw, key=())
    return played, draw.told


def test_turns_follow_each_other_until_the_environment_ends_the_episode():
    def reply(messages, responses, ended):
        assert all(ended)
        return [
            user("77") if len(played) < 4 and said != "3" else None
            for played, said in zip(messages, responses, strict=True)
        ]

    played, told = play(reply, [[(5, 2), (6, 2)], [(3, 2)], [(4, 4)]])
    assert [each.tokens for each in played] == [(5, 2, 7, 7, 6, 2), (3, 2), (4, 4)]
    assert [each.ended for each in played] == [True, True, False]  # the last was cut off
    assert [each.actor_mask for each in played] == [(T, T, F, F, T, T), (), ()]
    assert told == [(0, 2, (5, 2, 7, 7))]
    assert played[0].last_turn == (6, 2)
    assert json.loads(played[0].episode.earlier) == [
        {"role": "assistant", "content": "5"},
        user("77"),
    ]


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"max_turns": 1}, (5, 2)),
        ({"max_turns": 2}, (5, 2, 7, 5, 2)),
        ({"max_tokens": 3}, (5, 2)),  # no room for an answer
        ({"max_tokens": 4}, (5, 2, 7, 5, 2)),  # the decoder keeps to it
        ({"max_tokens": 6}, (5, 2, 7, 5, 2)),
    ],
)
def test_an_episode_that_is_cut_off_ends_in_a_turn_and_counts_as_not_ended(options, tokens):
    played, _ = play(lambda responses: [user("7")], [[(5, 2), (5, 2), (5, 5)]], **options)
    assert (played[0].tokens, played[0].ended) == (tokens, F)


def test_an_environment_that_ends_at_once_leaves_responses_as_they_are():
    turns = [[(5, 2)], [(6, 6)]]
    played, told = play(lambda responses: [None] * len(responses), turns)
    assert [(each.tokens, each.ended) for each in played] == [((5, 2), T), ((6, 6), F)]
    assert [each.actor_mask for each in played] == [(), ()]
    assert not told


def test_an_environment_may_take_one_response_at_a_time_and_return_several_messages():
    async def reply(response, prompt, messages):
        assert messages[0] == user(prompt)
        return [user("7"), user("8")] if response == "5" else None

    played, _ = play(reply, [[(5, 2), (6, 2)], [(6, 2)]])
    assert [each.tokens for each in played] == [(5, 2, 7, 8, 6, 2), (6, 2)]


def test_reward_functions_see_all_messages_and_the_last_turn():
    row = json.dumps({"prompt": [user("q")], "answer": "x"}).encode()
    earlier = json.dumps([{"role": "assistant", "content": "5"}, user("7")]).encode()
    tokens, mask = (5, 2, 7, 6, 2), (T, T, F, T, T)
    episode = Response((9,), tokens, T, 0, row, (), mask, episode=Episode(earlier))
    said = [{"role": "assistant", "content": "5"}, user("7"), {"role": "assistant", "content": "6"}]
    (own,) = calls_of(lambda responses, messages, answer: 0, [episode], Words())
    assert own == {"responses": ["6"], "messages": [[user("q"), *said]], "answer": ["x"]}
    (trl,) = calls_of(lambda prompts, completions: 0, [episode], Words())
    assert trl == {"prompts": [[user("q")]], "completions": [said]}


def _no_messages(prompts):
    return prompts


NESTED = reduce(lambda inner, _: [inner], range(3000), [])
NO_REPLIES = {
    "nothing": (None, "returned a NoneType for 1 response;"),
    "generator": ((None for _ in range(1)), "returned a generator for"),
    "one message": (user("x"), "returned a dict for"),
    "too few": ([], "returned 0 replies for"),
    "text": (["x"], "must have 'role' and 'content', found str"),
    "number": ([0], "found int"),
    "false": ([False], "found bool"),
    "tuple": ([(user("x"),)], "found tuple"),
    "list in a list": ([[[user("x")]]], "found list"),
    "NaN": ([user(math.nan)], "'content' must be text, found float"),
    "bytes": ([user(b"x")], "'content' must be text, found bytes"),
    "tensor": ([user(torch.ones(1))], "'content' must be text, found Tensor"),
    "NaN beside": (
        [user("x", score=math.nan)],
        "returned a value that JSON cannot represent: Out of range",
    ),
    "half an emoji": ([user("\ud83d")], "returned a value that JSON cannot represent: 'utf-8'"),
    "cycle": ([cycle()], "returned a value that JSON cannot represent: Circular reference"),
    "without end": (
        [user("x", more=NESTED)],
        "returned a value that JSON cannot represent: maximum",
    ),
    "long integer": (
        [user("x", more=10**5000)],
        "returned a value that JSON cannot represent: Exceeds",
    ),
    "no role": ([{"content": "7"}], "must have 'role' and 'content', found ['content']"),
    "a second": ([[user("7"), {"role": "user"}]], "message 2 that it returned must have 'role'"),
    "role": ([{"role": 1, "content": "7"}], "'role' must be text, found int"),
    "actor's": ([{"role": "assistant", "content": "7"}], "'assistant', which is the actor's"),
    "set": (
        [user("x", more={1})],
        "returned a value that JSON cannot represent: Object of type set",
    ),
}


@pytest.mark.parametrize(("found", "words"), NO_REPLIES.values(), ids=NO_REPLIES)
def test_whatever_is_no_reply_is_named_in_one_line(found, words):
    with pytest.raises(EnvironmentFailedError) as caught:
        replies_of(found)
    line = str(caught.value.__cause__)
    assert line.startswith("--environment mine:reply")
    assert words in line
    assert "\n" not in line


@pytest.mark.parametrize("found", [[None], [[]], np.array([None]), (None,)])
def test_whatever_holds_no_message_ends_the_episode(found):
    assert replies_of(found) == [[]]


def test_an_environment_that_raises_is_tried_again_and_keeps_its_error():
    calls = []

    def reply(responses):
        calls.append(1)
        raise KeyError("the sandbox is gone")

    with pytest.raises(EnvironmentFailedError) as caught:
        environment(reply, retries=2).replies([Response((9,), (5, 2), T, 0)], [0])
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(calls) == 3


def test_a_failed_environment_saves_the_last_whole_iteration_and_shows_its_own_error():
    saved = []
    checkpointer = SimpleNamespace(save_rest=lambda *each: saved.append(each))
    error = KeyError("the sandbox is gone")
    progress, engine = SimpleNamespace(step=7), SimpleNamespace(released=False)
    failures = _failures_saved(checkpointer, progress, engine, in_python=False)
    with pytest.raises(KeyError) as caught, failures:
        raise EnvironmentFailedError from error
    assert caught.value is error
    assert saved == [(7, "stopped by an environment that failed")]


def test_an_environment_must_take_responses():
    with pytest.raises(ValueError, match="--environment .* must take responses, completions or"):
        load_environment(
            f"{__name__}:_no_messages", Words(), chat=Chat(Words(), "2"), max_prompt_tokens=9
        )


# ---------------------------------------------------------------------------- tokens of a turn


def turn_tokens(tokenizer):
    eos = tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id)
    return TurnTokens(Chat(tokenizer, eos), tokenizer)


def answered(tokenizer, prompt, text):
    """A response to a text or to messages, of this text with special tokens in it."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    row = json.dumps({"prompt": prompt}).encode()
    return Response((9,), tuple(tokens), T, 0, row)


def test_the_next_turn_is_what_the_whole_conversation_has_after_the_last():
    tokenizer = build_byte_tokenizer(chat_template=BUILT_IN_TEMPLATE)
    response = answered(tokenizer, [user("2 + 3?")], " 5</s>")
    outcome = turn_tokens(tokenizer)(response, [user("Sure?")])
    assert tokenizer.decode(outcome) == "\n\nHuman: Sure?\n\nAssistant:"
    whole = "\n\nHuman: 2 + 3?\n\nAssistant: 5</s>\n\nHuman: Sure?\n\nAssistant:"
    ids = tokenizer.encode(whole, add_special_tokens=False)
    assert ids[-len(outcome) :] == outcome
    # An answer that a stop string ended has no end token yet.
    outcome = turn_tokens(tokenizer)(answered(tokenizer, "2 + 3?", " 5!"), [user("Sure?")])
    assert tokenizer.decode(outcome) == "</s>\n\nHuman: Sure?\n\nAssistant:"


@pytest.mark.parametrize("role", ["tool", "user"])
def test_templates_write_the_reply_and_open_the_next_turn(role):
    tokenizer = build_chat_tokenizer("qwen2_5")
    first = [user("2 + 3?")]
    response = answered(tokenizer, first, "<tool_call>\n5<|im_end|>")
    reply = [{"role": role, "content": "6"}]
    outcome = turn_tokens(tokenizer)(response, reply)
    whole = tokenizer.apply_chat_template(
        [*first, {"role": "assistant", "content": "<tool_call>\n5"}, *reply],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert whole.endswith("5<|im_end|>" + tokenizer.decode(outcome))
    assert tokenizer.decode(outcome).endswith("<|im_start|>assistant\n")


def test_a_template_that_rewrites_earlier_answers_is_refused():
    tokenizer = build_chat_tokenizer("qwen3")
    response = answered(tokenizer, [user("2 + 3?")], "5<|im_end|>")
    turns = turn_tokens(tokenizer)
    # It drops the thoughts of answers before a user's message, not before a tool's.
    assert turns(response, [{"role": "tool", "content": "6"}])
    with pytest.raises(ValueError, match="renders an earlier answer differently") as caught:
        turns(response, [user("6")])
    assert "role 'user'" in str(caught.value)
    assert "\n" not in str(caught.value)
    tokenizer = build_byte_tokenizer(chat_template=BUILT_IN_TEMPLATE)
    with pytest.raises(ValueError, match="role 'tool' has no place in the built-in chat format"):
        turn_tokens(tokenizer)(response, [{"role": "tool", "content": "6"}])
