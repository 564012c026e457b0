"""What the decoder is asked for: random numbers of each response's own, and turns that go on."""

from types import SimpleNamespace

import torch

from dschat_lora.data.samples import PromptSample
from dschat_lora.rl.draw.player import Draw
from dschat_lora.rl.response.response import DecodedTurn, Origin, Response, unanswered

T, F = True, False
PROMPTS = [(n, PromptSample(torch.tensor([3 + n, 4]), b"")) for n in range(3)]


def draw_of(decode, *key, copies=4):
    """A draw of responses of 8 tokens, which token 2 ends."""
    return Draw(
        decode,
        ("rollout", *key),
        copies,
        8,
        keep_logprobs=True,
        is_end=lambda token: token == 2,
        find_end=lambda tokens: None,
    )


class Decoder:
    """Draws the tokens of a turn for every seed, and keeps what it was asked for."""

    def __init__(self, *turns):
        self.turns, self.asked = iter(turns), []

    def __call__(self, ids, *, seeds, **options):
        self.asked.append(SimpleNamespace(ids=ids, seeds=seeds, **options))
        turn, count = next(self.turns), sum(map(len, seeds))
        own, drawn = [-0.5 * (n + 1) for n in range(len(turn))], [-0.25] * len(turn)
        if not options.get("keep_logprobs"):
            own = drawn = []
        return lambda: [DecodedTurn([*turn], own, drawn, undrawn=False) for _ in range(count)]


def tasks_of(prompts, copies=4):
    return [unanswered(n, p, n * copies + k) for n, p in prompts for k in range(copies)]


def seeds_of(prompts, *key):
    decoder = Decoder((2,))
    draw_of(decoder, *key)(tasks_of(prompts))
    return decoder.asked[0].seeds


def test_each_response_has_a_seed_that_depends_on_run_prompt_and_copy_alone():
    seeds = seeds_of(PROMPTS, 1, 0)
    assert len({seed for own in seeds for seed in own}) == 3 * 4
    assert seeds_of(PROMPTS[1:2], 1, 0) == seeds[1:2]
    assert not {*seeds[0]} & {*seeds_of(PROMPTS, 1, 1)[0]}


def test_a_prompt_is_read_once_for_all_of_its_first_turns():
    decoder = Decoder((2,))
    draw_of(decoder)(tasks_of(PROMPTS))
    assert decoder.asked[0].ids == [[3, 4], [4, 4], [5, 4]]


def test_the_tokens_of_a_further_turn_are_the_actors():
    decoder = Decoder((5, 2), (6, 2))
    draw = draw_of(decoder, copies=2)
    first = draw([Response((9, 4), (), F, 1, origin=Origin(place)) for place in (2, 3)])
    assert first[0].tokens == (5, 2)
    assert first[0].ended
    (response,) = draw([first[1].read([7, 7])])
    assert response.tokens == (5, 2, 7, 7, 6, 2)
    assert response.actor_mask == (T, T, F, F, T, T)
    assert response.logprobs == (-0.5, -1.0, -0.5, -1.0)
    assert response.sampler_logprobs == (-0.25,) * 4
    assert response.ended
    asked = decoder.asked[1]
    assert asked.ids == [[9, 4, 5, 2, 7, 7]]
    assert asked.limits == [8 - 4]
    # Keys and values are there of all tokens before the actor's last one, in row 1.
    assert asked.prefixes == [(1, 3)]
    assert not {*asked.seeds[0]} & {seed for own in decoder.asked[0].seeds for seed in own}


def test_a_second_turn_of_the_same_prompt_is_another_and_reuses_nothing_of_the_first():
    decoder = Decoder((5, 5), (6, 2), (7, 2))
    draw, tasks = draw_of(decoder), tasks_of(PROMPTS[:1])
    first, second = draw(tasks), draw(tasks)
    assert {each.tokens for each in (*first, *second)} == {(5, 5), (6, 2)}
    assert not {*decoder.asked[0].seeds[0]} & {*decoder.asked[1].seeds[0]}
    # What is in the cache is the second turn, with which the first one does not go on.
    draw([first[0].read([8])])
    assert not hasattr(decoder.asked[2], "prefixes")


def test_what_the_decoder_did_not_compute_is_no_prefix():
    decoder = Decoder((5, 6, 7), (5, 6), (7, 2))
    draw = draw_of(decoder, copies=1)
    tasks = tasks_of(PROMPTS[:1], 1)
    first, _ = draw(tasks), draw(tasks)
    draw([first[0].read([8])])  # of whose tokens 6, the last of the second turn, is one
    assert not hasattr(decoder.asked[2], "prefixes")


def test_a_turn_that_was_drawn_twice_at_once_goes_on_from_its_own_row():
    decoder = Decoder((5, 6), (7, 2))
    draw = draw_of(decoder, copies=1)
    (task,), (other,) = tasks_of(PROMPTS[:1], 1), [unanswered(*PROMPTS[1], 1)]
    responses = draw([task, task, other])
    draw([responses[2].read([8])])
    # Row 2, behind both of the first prompt's; all but the last token that was chosen.
    assert decoder.asked[1].prefixes == [(2, 3)]


def test_a_response_without_room_for_a_token_stays_as_it_is():
    decoder = Decoder((6, 2))
    full = Response((9,), (5,) * 8, F, 0)
    short = Response((9,), (5,) * 6, F, 0, origin=Origin(1))
    responses = draw_of(decoder)([full, short])
    assert responses[0] == full
    assert responses[1].tokens == (*(5,) * 6, 6, 2)
    assert decoder.asked[0].limits == [2]
