"""Players of a user's: what they are given, what is learnt of what they return, and refusals."""

import json
from types import SimpleNamespace

import pytest

from dschat_lora.addons.environments.environment import EnvironmentFailedError
from dschat_lora.addons.environments.players import UserPlayer
from dschat_lora.config.held import held
from dschat_lora.rl.draw.player import Draw, OneTurn
from dschat_lora.rl.response.response import (
    DecodedTurn,
    Episode,
    Origin,
    Response,
    TokenSequence,
    response_from_json,
    responses_as_json,
)
from dschat_lora.rl.score.user_functions import find_object
from helpers.players import BetterOfTwo, Hint

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("one_rank")]
T, F = True, False
TASKS = [Response((9, n), (), F, n, b'{"answer": 5}', origin=Origin(n)) for n in range(2)]


class Letters:
    """Reads and writes letters as their numbers."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) - 96 for letter in text]

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(token + 96) for token in tokens)


def draw_of(*turns):
    """Draws the tokens of one turn after another for all responses; 2 ends a turn."""
    left = iter(turns)

    def decode(ids, *, seeds, limits=None, **options):
        turn, count = [*next(left)], sum(map(len, seeds))
        rows = [turn[: None if limits is None else limits[n]] for n in range(count)]
        return lambda: [
            DecodedTurn(row, [-0.5] * len(row), [-0.25] * len(row), undrawn=False) for row in rows
        ]

    return Draw(
        decode,
        ("k",),
        1,
        12,
        keep_logprobs=True,
        is_end=lambda token: token == 2,
        find_end=lambda tokens: None,
    )


def play(player, *turns, tasks=TASKS):
    own = player if callable(getattr(player, "play", None)) else SimpleNamespace(play=player)
    return UserPlayer("mine:Player", own, Letters()).play(tasks, draw_of(*turns), key=("k",))


def test_of_two_answers_a_player_may_keep_the_better_by_its_own_rule():
    played = play(BetterOfTwo(), (5, 5, 5, 2), (5, 6, 7, 8))
    assert [each.tokens for each in played] == [(5, 6, 7, 8)] * 2
    assert [each.ended for each in played] == [False] * 2
    assert [each.episode.reward for each in played] == [1.0] * 2
    assert [each.logprobs for each in played] == [(-0.5,) * 4] * 2


def test_a_hint_is_read_and_what_is_drawn_is_learnt():
    played = play(Hint(), (5, 2), (6, 7, 7, 7))
    assert [each.tokens for each in played] == [(5, 2, 1, 2, 6, 7, 7)] * 2  # of "ab"; 3 at most
    assert [each.actor_mask for each in played] == [(T, T, F, F, T, T, T)] * 2
    assert [len(each.logprobs) for each in played] == [5] * 2
    assert [each.episode.reward for each in played] == [None] * 2


def test_a_player_sees_prompt_and_row_of_its_tasks():
    def own(tasks, draw, *, key):
        assert [(each.prompt, each.row, each.tokens) for each in tasks] == [
            ((9, 0), {"answer": 5}, ()),
            ((9, 1), {"answer": 5}, ()),
        ]
        assert key == ("k",)
        assert draw.decode([1, 2]) == "ab"
        assert draw.max_tokens == 12
        return draw(tasks)

    assert len(play(own, (5, 2))) == 2


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lambda tasks, draw, key: draw(tasks)[:1], "for each of the 2 tasks"),
        (lambda tasks, draw, key: draw(tasks)[::-1], "in their order"),
        (lambda tasks, draw, key: None, "for each of the 2 tasks"),
        (lambda tasks, draw, key: [5, 6], "for each of the 2 tasks"),
        (lambda tasks, draw, key: tasks, "0 tokens of the actor"),
        (
            lambda tasks, draw, key: [
                Response(each.prompt, (*each.tokens, 3), T, each.group, origin=each.origin)
                for each in draw(tasks)
            ],
            "3 tokens of the actor, of which 0 were drawn",
        ),
        (
            lambda tasks, draw, key: [
                Response(**{**vars(each), "tokens": (*each.tokens, 3)}) for each in draw(tasks)
            ],
            "3 tokens of the actor, of which 2 were drawn",
        ),
        (lambda tasks, draw, key: [r.read([5] * 11) for r in draw(tasks)], "of 13 tokens"),
        (lambda tasks, draw, key: [r.rewarded("nan") for r in draw(tasks)], "the reward nan"),
        (lambda tasks, draw, key: draw([(9, 0)]), "draw takes tasks"),
        (lambda tasks, draw, key: draw(tasks, limits=[3]), "one for each of 2 responses"),
        (lambda tasks, draw, key: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_player_whose_responses_cannot_be_learnt_from_is_refused(own, message):
    with pytest.raises(EnvironmentFailedError) as played:
        play(own, (5, 2))
    assert message in str(played.value.__cause__)
    assert "--environment mine:Player" in str(played.value.__cause__)


def test_a_failure_to_draw_is_no_failure_of_the_player():
    def lost(*args, **options):
        raise OSError("the server is gone")

    draw = Draw(lost, ("k",), 1, 12, keep_logprobs=T, is_end=bool, find_end=lambda tokens: None)
    with pytest.raises(OSError, match="the server is gone"):
        UserPlayer("mine:Player", BetterOfTwo(), Letters()).play(TASKS, draw, key=())


def test_the_reward_has_the_name_of_the_class_or_the_one_it_says():
    assert UserPlayer("m:P", BetterOfTwo(), Letters()).reward_name == "BetterOfTwo"
    assert UserPlayer("m:P", Hint(), Letters()).reward_name is None
    assert OneTurn().reward_name is None


def test_an_object_with_play_is_found_by_its_name():
    assert find_object("environment", "helpers.players:BetterOfTwo") is BetterOfTwo
    own = BetterOfTwo()
    with held(own, "mine") as name:
        assert find_object("environment", name) is own


def test_a_response_is_read_from_checkpoints_of_before():
    episode = Episode(b"[1]", 0.5, (TokenSequence((1,), (2,), (T,)),), 3, 1, "", {"a": 1.0})
    whole = Response(
        (1, 2), (3,), T, 4, b"{}", (-0.5,), (T,), (-0.25,), F, (7,), episode, Origin(0, 2, F, 6)
    )
    before = {
        "prompt": [1, 2],
        "tokens": [3],
        "ended": True,
        "group": 4,
        "columns": "",
        "logprobs": [-0.5],
        "actor_mask": [True],
        "earlier": "[1]",
        "sampler_logprobs": [-0.25],
        "undrawn": False,
        "environment_reward": 0.5,
        "earlier_sequences": [{"prompt": [1], "tokens": [2], "actor_mask": [True]}],
        "num_calls": 3,
        "num_retries": 1,
        "failure": "",
        "logged": {"a": 1.0},
        "is_drawn": False,
        "policy_version": 6,
        "reference_prompt": [7],
        "source": 2,
    }
    (fields,) = json.loads(responses_as_json({0: whole})).values()
    for each in (before, fields):
        assert response_from_json(each, b"{}") == whole
