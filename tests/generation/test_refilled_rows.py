"""More sequences than rows: texts and log-probabilities are those of one batch of all of them."""

import pytest
import torch

from dschat_lora.generation.sampling import Sampling
from dschat_lora.generation.slots import SlotRows
from helpers.decoding import check_alike, decoder_of, shapes_read
from helpers.spread import ALL
from helpers.tape import Tape
from helpers.tiny import KINDS, adapted, tiny_model

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14] * 6, list(range(3, 23)), [21, 22, 23, 21, 22]]
SEEDS = [[number, 50 + number] for number in range(len(PROMPTS))]
LIMITS = [30, 1, 30, 7, 30]
GREEDY = {"do_sample": False}


def drawn(model, options=GREEDY, *, prompts=PROMPTS, seeds=SEEDS, rows=3, **more):
    decoder = decoder_of(model, [2], largest=(rows, 0), **more)
    sampling = Sampling(30, **options)
    limits = LIMITS if prompts is PROMPTS else None
    responses = decoder(prompts, sampling, seeds=seeds, limits=limits, keep_logprobs=True)
    return decoder, responses


def static(model, options=GREEDY, **more):
    """The same by one batch, whose rows are not refilled."""
    return drawn(model, options, rows=0, **more)[1]


@pytest.mark.parametrize(
    "options", [GREEDY, {"temperature": 0.4}, {"top_p": 0.6, "top_k": 9}][:: 1 if ALL else 2]
)
@pytest.mark.parametrize("kind", KINDS if ALL else ["llama"])
def test_texts_and_logprobs_are_those_of_one_batch(kind, options):
    model = adapted(tiny_model(kind), 0)
    check_alike(static(model, options), drawn(model, options)[1])


@pytest.mark.parametrize("poll", [1, 3, 16] if ALL else [3])
@pytest.mark.parametrize("kind", [*KINDS, "mistral", "gemma3"] if ALL else ["llama"])
def test_rows_that_draw_several_tokens_between_two_looks_say_the_same(kind, poll, monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.slots.COLUMN_BUCKET", 8)
    monkeypatch.setattr("dschat_lora.generation.slots.READ_TOKENS", 32)  # in several passes
    monkeypatch.setattr("dschat_lora.generation.slots.MOVED_ROWS", 2)
    monkeypatch.setattr("dschat_lora.generation.generate.CPU_POLL", poll)
    model = adapted(tiny_model(kind), 0)
    tapes, options = [], {"temperature": 0.7}
    record = lambda step: tapes.append(Tape(step)) or tapes[-1]  # noqa: E731
    decoder, responses = drawn(model, options, record=record, rows=5, refill_share=0.4)
    check_alike(static(model, options), responses)
    check_alike(
        static(model, options, seeds=(others := [[9, 8]] * 5)), again(decoder, others, options)
    )
    # What was recorded draws by its own options, into its own table.
    check_alike(static(model, {"temperature": 0.2}), again(decoder, SEEDS, {"temperature": 0.2}))
    assert len(tapes) > 3


@pytest.mark.parametrize(
    ("share", "joins"), [(0.0, [4, 1, 1, 1, 1]), (0.5, [4, 2, 2]), (1.0, [4, 4])]
)
def test_prompts_are_read_once_a_share_of_the_rows_is_free(share, joins, monkeypatch):
    counts, join = [], SlotRows.join
    monkeypatch.setattr(
        SlotRows,
        "join",
        lambda rows, prompts, *rest: counts.append(len(prompts)) or join(rows, prompts, *rest),
    )
    model, prompts = tiny_model("llama"), [[5 + n, 6] for n in range(8)]
    options = {"seeds": [[n] for n in range(8)], "limits": [2, 3, 4, 5, 6, 7, 8, 9]}
    decoder = decoder_of(model, largest=(4, 0), refill_share=share)
    text = decoder(prompts, Sampling(9), **options).tokens()
    assert counts == joins
    assert text == decoder_of(model)(prompts, Sampling(9), **options).tokens()


def test_rows_fill_gaps_and_move_only_where_a_step_becomes_smaller(monkeypatch):
    moves = []
    rows = SlotRows(tiny_model("llama"), pad_id=0, record=lambda step: step)
    monkeypatch.setattr(rows, "_move", lambda *pairs: moves.append([*map(list, pairs)]))
    with rows.kernels(), torch.no_grad():
        rows.join([[5 + n, 6] for n in range(8)], [0] * 8)
        for row in (6, 2, 0):
            rows.leave(row)
        rows.step([7] * 5)
        rows.join([[9, 8], [9, 9]], [0] * 2)
        assert sorted(rows._at) == [0, 1, 2, 3, 4, 5, 7]
        for _ in range(4):
            rows.leave(0)
        rows.step([7] * 3)
    # Places 3, 1 and 7 are in use.
    assert [pairs for pairs in moves if pairs[0]] == [[[7], [0]]]
    assert sorted(rows._at) == [0, 1, 3]


def test_a_sequence_that_ends_between_two_looks_leaves_at_the_second(monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.generate.CPU_POLL", 4)
    model, sampling = tiny_model("llama"), Sampling(9)
    (text,) = decoder_of(model)([[5, 6]], sampling, seeds=[[0]]).tokens()
    passes, end = shapes_read(model), text[2]
    decoder = decoder_of(model, [end], largest=(1, 0))
    responses = decoder([[5, 6]], sampling, seeds=[[0, 0]]).tokens()
    assert responses == [text[: 1 + text.index(end)]] * 2
    assert text.index(end) == 2
    assert len(passes) == 2 * (1 + 3), "each prompt, and three steps"


def test_a_prompt_takes_of_a_running_row_the_tokens_that_were_drawn_for_it(monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.slots.MIN_PREFIX", 2)
    model, first, options = tiny_model("llama"), [5, 6, 7, 8], {"do_sample": True}
    (text, *_) = static(model, options, prompts=[first], seeds=[[0]]).tokens()
    # They join when the first has drawn some tokens: one begins with them, one with other ones.
    prompts = [first, [9, 10], [*first, *text[:4], 11], [*first, *text[1:5], 11]]
    given = {"limits": [30, 8, 5, 5], "seeds": [[0], [1], [2], [3]]}
    responses, plain = (
        decoder_of(model, largest=(rows, 0))(prompts, Sampling(30, **options), **given)
        for rows in (2, 4)
    )
    assert responses.tokens() == plain.tokens()


def again(decoder, seeds, options):
    """Another call of a decoder, for which its steps are replayed."""
    sampling = Sampling(30, **options)
    return decoder(PROMPTS, sampling, seeds=seeds, limits=LIMITS, keep_logprobs=True)


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_rows_of_a_sliding_window_are_refilled(kind):
    model = tiny_model(kind, sliding_window=4)
    check_alike(static(model, {"temperature": 0.3}), drawn(model, {"temperature": 0.3})[1])


def test_a_prompt_is_read_once_for_its_copies_and_not_again_while_a_row_holds_it():
    model, prompt = tiny_model("llama"), list(range(3, 25))
    read = shapes_read(model)
    decoder = decoder_of(model, largest=(3, 0))
    options = {"seeds": [[0, 1], [2, 3]], "limits": [4, 9]}
    responses = decoder([prompt] * 2, Sampling(9), **options)
    # Of four rows three at a time; the fourth finds all but the last token of its prompt.
    assert read[0] == (1, 22)
    assert [shape for shape in read if shape[0] == 1 and shape[1] > 3] == [(1, 22)]
    assert responses.tokens() == decoder_of(model)([prompt] * 2, Sampling(9), **options).tokens()


def test_rows_of_sequences_that_have_ended_are_refilled():
    model = tiny_model("llama")
    shapes = shapes_read(model)
    prompts, limits = [[5, 6], [7, 8], [9, 10], [11, 12]], [2, 9, 4, 3]
    decoder = decoder_of(model, largest=(2, 0))
    options = {"seeds": [[0], [1], [2], [3]], "limits": limits}
    responses = decoder(prompts, Sampling(9), **options)
    # Two prompts and a step; the third takes the first one's place, the fourth the third's.
    assert [rows for rows, _ in shapes] == [2, 2, 1, 2, 2, 2, 1, 2, 2, 1, 1]
    assert [*map(len, responses.tokens())] == limits
    assert responses.tokens() == decoder_of(model)(prompts, Sampling(9), **options).tokens()


def test_calls_of_other_sampling_and_size_keep_what_was_recorded():
    tapes, counts = [], []
    record = lambda step: tapes.append(Tape(step)) or tapes[-1]  # noqa: E731
    decoder = decoder_of(tiny_model("llama"), record=record, largest=(2, 9))
    for size, sampling in [(6, Sampling(4)), (3, Sampling(4, do_sample=False))] * 3:
        decoder([[5, 6]] * size, sampling, seeds=[[n] for n in range(size)])
        counts.append(len(tapes))
    assert counts[1] == counts[-1] > counts[0], "training's and evaluation's steps, each once"


def test_many_rows_take_the_memory_of_a_batch_that_is_not_refilled():
    model = tiny_model("llama")
    shapes = shapes_read(model)
    rows = [SlotRows(model, pad_id=0, record=lambda step: step) for _ in range(2)]
    for each, count in zip(rows, (5, 260), strict=True):
        each.reserve(count, 9)
        with each.kernels(), torch.no_grad():
            each.join([[5, 6]] * count, [0] * count)
            each.step([7] * count)
    assert shapes[1::2] == [(8, 1), (384, 1)]
    assert [each._cache.rows for each in rows] == [8, 384]


def test_a_sequence_that_can_draw_nothing_takes_none_of_its_prompt_along():
    model, prompt = tiny_model("llama"), list(range(3, 25))
    with torch.no_grad():
        model.get_input_embeddings().weight[33] = torch.nan
    plain, responses = (
        decoder_of(model, largest=(rows, 0))([prompt], Sampling(20), seeds=[range(12)])
        for rows in (12, 2)
    )
    assert responses.undrawn() == plain.undrawn()
    assert responses.tokens() == plain.tokens()
    assert 0 < sum(plain.undrawn()) < 12
