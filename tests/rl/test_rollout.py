"""What the decoder is asked for: random numbers of each response's own, and turns that go on."""

from types import SimpleNamespace

import torch

from dschat_lora.data.samples import PromptSample
from dschat_lora.rl.draw.turn_decoder import TurnDecoder
from dschat_lora.rl.response.response import Response

T, F = True, False
PROMPTS = [(n, PromptSample(torch.tensor([3 + n, 4]), b"")) for n in range(3)]


def decoder(decode, *key):
    """One of responses of 8 tokens, which token 2 ends."""
    return TurnDecoder(
        decode,
        ("rollout", *key),
        8,
        keep_logprobs=True,
        is_end=lambda token: token == 2,
        find_end=lambda tokens: None,
    )


def seeds_of(prompts, *key):
    return decoder(lambda ids, **options: options["seeds"], *key).ask(prompts, 4)


def test_each_response_has_a_seed_that_depends_on_run_prompt_and_copy_alone():
    seeds = seeds_of(PROMPTS, 1, 0)
    assert len({seed for own in seeds for seed in own}) == 3 * 4
    assert seeds_of(PROMPTS[1:2], 1, 0) == seeds[1:2]
    assert not {*seeds[0]} & {*seeds_of(PROMPTS, 1, 1)[0]}


def test_the_tokens_of_a_further_turn_are_the_actors():
    asked = {}

    def decode(ids, **options):
        asked.update(options, ids=ids)
        return SimpleNamespace(
            tokens=lambda: [[6, 2]],
            logprobs=lambda: [[-0.5, -1.0]],
            sampler_logprobs=lambda: [[-0.25, -0.75]],
            undrawn=lambda: [False],
        )

    read = Response(
        (9, 4),
        (5, 2, 7, 7),
        F,
        1,
        actor_mask=(T, T, F, F),
        logprobs=(-2.0, -3.0),
        sampler_logprobs=(-2.5, -3.5),
    )
    rows = [0, 1]  # of the turn before
    (found,) = decoder(decode, 1, 0).next([(0, 0), (0, 1)], rows, [1], [read], 2)
    assert found.tokens == (5, 2, 7, 7, 6, 2)
    assert found.actor_mask == (T, T, F, F, T, T)
    assert found.logprobs == (-2.0, -3.0, -0.5, -1.0)
    assert found.sampler_logprobs == (-2.5, -3.5, -0.25, -0.75)
    assert found.ended
    assert asked["ids"] == [[9, 4, 5, 2, 7, 7]]
    assert asked["limits"] == [8 - 4]
    # Keys and values are there of all tokens before the actor's last one, in row 1.
    assert asked["prefixes"] == [(1, 3)]
    assert rows == [1]
