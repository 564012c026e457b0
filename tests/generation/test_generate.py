"""Decoding, against transformers' own generation, plain loops and exact distributions."""

import hashlib
from collections import Counter

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dschat_lora.generation.batch_state import CachedRows
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.generation.generate import decode
from dschat_lora.generation.kv_cache import fast_attention, takes_cache
from dschat_lora.generation.sampling import Responses, Sampling, uniforms
from dschat_lora.lora.model import adapter_layers, adapters_disabled
from generation.test_token_choice import plain_distribution
from helpers.decoding import CPU, PROMPTS, decoder_of, generated, greedy_loop, shapes_read
from helpers.spread import ALL
from helpers.tape import Tape
from helpers.tiny import KINDS, VOCAB, adapted, tiny_model

PAD = 0
GREEDY = Sampling(12, do_sample=False)


def lively(kind, attention="sdpa"):
    """A tiny model whose adapters change what it says."""
    return adapted(tiny_model(kind, attention), 0)


def run(model, prompts, sampling, *, seeds=None, eos_ids=(), **options):
    seeds = [[0] for _ in prompts] if seeds is None else seeds
    return decode(
        model, prompts, sampling, seeds=seeds, eos_ids=eos_ids, pad_id=PAD, device=CPU, **options
    )


def frequent_token(model, prompts, steps):
    """A token that several answers hold, none of them first."""
    answers = [generated(model, prompt, steps) for prompt in prompts]
    counts = Counter(token for answer in answers for token in set(answer[1:]) - {answer[0]})
    return counts.most_common(1)[0][0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"] if ALL else ["sdpa"])
@pytest.mark.parametrize(
    "make", [tiny_model, lively][1 - ALL :], ids=["base", "adapted"][1 - ALL :]
)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_generate(kind, make, attention):
    model = make(kind, attention)
    expected = [generated(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)
    assert run(model, PROMPTS, GREEDY) == [[answer] for answer in expected]


@pytest.mark.parametrize("kind", KINDS if ALL else ["opt", "llama"])
def test_answers_end_with_their_first_end_of_sequence_whatever_goes_on_beside_them(kind):
    model = lively(kind)
    eos = frequent_token(model, PROMPTS, 12)
    expected = [generated(model, prompt, 12, eos) for prompt in PROMPTS]
    assert len({len(answer) for answer in expected}) > 1
    answers = run(model, PROMPTS, GREEDY, seeds=[[1, 2, 3]] * len(PROMPTS), eos_ids=[eos])
    assert answers == [[answer] * 3 for answer in expected]


def test_any_of_several_tokens_ends_an_answer():
    model = tiny_model("llama")
    whole = generated(model, PROMPTS[3], 12)
    ends = {whole[4], whole[7]}
    first = min(whole.index(end) for end in ends)
    assert run(model, [PROMPTS[3]], GREEDY, eos_ids=ends) == [[whole[: first + 1]]]


def sliding(name, attention):
    return tiny_model(name, attention, scale=0.2, vocab_size=40, sliding_window=4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"] if ALL else ["sdpa"])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_sliding_windows_are_kept(name, attention):
    model = sliding(name, attention)
    assert takes_cache(model)
    expected = [greedy_loop(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in expected}) > 3
    assert run(model, PROMPTS, GREEDY) == [[answer] for answer in expected]


def test_a_model_without_position_ids_is_computed_the_slow_way():
    model = tiny_model("bloom", None, scale=0.2, vocab_size=40)
    assert not takes_cache(model)
    expected = [greedy_loop(model, prompt, 12) for prompt in PROMPTS]
    answers = run(model, PROMPTS, GREEDY, seeds=[[1, 2]] * len(PROMPTS))
    assert answers == [[answer] * 2 for answer in expected]
    eos = expected[0][3]
    cut = [answer[: answer.index(eos) + 1] if eos in answer else answer for answer in expected]
    assert run(model, PROMPTS, GREEDY, eos_ids=[eos]) == [[answer] for answer in cut]


def test_decoding_changes_no_parameter_no_forward_and_no_setting():
    model = lively("opt")
    model.config._attn_implementation = "sdpa"
    before = fingerprint(model)
    forwards = [module.forward for module in model.modules()]
    run(model, PROMPTS, Sampling(6))
    assert fingerprint(model) == before
    assert [module.forward for module in model.modules()] == forwards
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


def fingerprint(model):
    values = {k: v.numpy().tobytes() for k, v in model.state_dict().items()}
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()


@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama"] if ALL else ["llama"])
def test_adapters_that_are_switched_off_have_no_say(kind):
    model = lively(kind)
    base = [[generated(tiny_model(kind), prompt, 12)] for prompt in PROMPTS]
    assert run(model, PROMPTS, GREEDY) != base
    with adapters_disabled(model):
        assert run(model, PROMPTS, GREEDY) == base


SAMPLINGS = [
    Sampling(10),
    Sampling(10, temperature=0.7, top_p=0.9),
    Sampling(10, temperature=1.4, top_k=12),
    Sampling(10, top_k=20, top_p=0.8),
]


@pytest.mark.parametrize("sampling", SAMPLINGS if ALL else SAMPLINGS[-1:], ids=str)
def test_a_text_is_a_function_of_its_prompt_and_seed_alone(sampling):
    model = lively("llama")
    seeds = [[10 * i + j for j in range(3)] for i in range(len(PROMPTS))]
    ends = range(3, 12)
    raise_together = run(model, PROMPTS, sampling, seeds=seeds, eos_ids=ends)
    lengths = {len(text) for texts in raise_together for text in texts}
    assert len(lengths) > 3, "some texts outlive others, which are moved for them"
    alone = [
        [run(model, [prompt], sampling, seeds=[[seed]], eos_ids=ends)[0][0] for seed in each]
        for prompt, each in zip(PROMPTS, seeds, strict=True)
    ]
    assert raise_together == alone
    backwards = run(
        model, PROMPTS[::-1], sampling, seeds=[each[::-1] for each in seeds[::-1]], eos_ids=ends
    )
    assert backwards == [texts[::-1] for texts in raise_together[::-1]]


def test_different_seeds_give_different_texts():
    (texts,) = run(tiny_model("opt"), [PROMPTS[0]], Sampling(10), seeds=[list(range(20))])
    assert len({tuple(text) for text in texts}) == 20


def test_a_longer_bound_goes_on_with_the_same_text():
    model = tiny_model("opt")
    short = run(model, PROMPTS, Sampling(5))
    long = run(model, PROMPTS, Sampling(9))
    assert [texts[0][:5] for texts in long] == [texts[0] for texts in short]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_step_draws_from_the_models_distribution_by_its_own_random_number(sampling):
    model = lively("gpt2")
    seeds = [[3, 4], [5, 6]]
    texts = run(model, PROMPTS[:2], sampling, seeds=seeds)
    numbers = uniforms([seed for each in seeds for seed in each], 10)
    rows = [text for each in texts for text in each]
    for i, text in enumerate(rows):
        prompt = PROMPTS[i // 2]
        logits = model(input_ids=torch.tensor([prompt + text]), use_cache=False).logits[0]
        for step, token in enumerate(text):
            exact = plain_distribution(logits[len(prompt) - 1 + step].detach(), sampling)
            below = sum(exact[:token])
            assert below - 1e-5 < numbers[i, step] < below + exact[token] + 1e-5


def test_ragged_or_missing_seeds_are_refused():
    model = tiny_model("opt")
    for seeds in ([[1], [2, 3]], [[1]], [[], []]):
        with pytest.raises(ValueError, match="one list for each of 2 prompts, all of one length"):
            run(model, PROMPTS[:2], GREEDY, seeds=seeds)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        run(model, [[3], []], GREEDY)


def test_what_does_not_fit_the_positions_is_refused():
    model = tiny_model("opt")
    prompt = [5] * 52
    assert run(model, [prompt], GREEDY) == [[generated(model, prompt, 12)]]
    with pytest.raises(AssertionError, match="53 tokens and 12 new ones exceed the model's 64"):
        run(model, [[5], [5, *prompt]], GREEDY)


def rows_of(model, prompts, sampling, seeds, eos_ids=(), **options):
    """Rows that have read the prompts and chosen their first tokens, and their responses."""
    flat = [seed for each in seeds for seed in each]
    responses = Responses(len(flat), sampling, eos_ids=eos_ids, device=CPU)
    responses.start(flat)
    capacity = len(flat), max(map(len, prompts)) + sampling.max_new_tokens
    rows = CachedRows(model, capacity, pad_id=PAD, device=CPU, **options)
    with torch.no_grad():
        rows.start(prompts, responses, copies=len(seeds[0]))
    return rows, responses


@torch.no_grad()
def drive(rows, responses, *, look_every=1):
    for step in range(1, responses.limits[0]):
        if step % look_every == 0:
            finished = responses.finished(step)
            alive = [not finished[sequence] for sequence in rows.sequences]
            if any(alive):
                rows.keep(alive)
        rows.step()
    return responses.tokens()


@pytest.mark.parametrize("make", [lambda: lively("opt"), lambda: sliding("gemma3", "sdpa")])
def test_steps_of_fixed_shapes_repeated_from_a_recording_equal_plain_ones(make, monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.batch_state.ROW_BUCKETS", (2, 4, 8))
    monkeypatch.setattr("dschat_lora.generation.batch_state.COLUMN_BUCKET", 12)
    model = make()
    seeds, ends, tapes = [[i, i + 10] for i in range(len(PROMPTS))], range(3, 6), []

    def record(step):
        tapes.append(Tape(step))
        return tapes[-1]

    sampling = Sampling(30, top_k=30)
    expected = run(model, PROMPTS, sampling, seeds=seeds, eos_ids=ends)
    with FastLinears(model).in_use(), fast_attention(model):
        options = {"buckets": True, "record": record}
        rows, responses = rows_of(model, PROMPTS, sampling, seeds, ends, **options)
        answers = drive(rows, responses, look_every=4)
    assert answers == [text for each in expected for text in each]
    assert {30} < {len(text) for text in answers}, "some end, some do not"
    # ten sequences in 16 rows at first, and columns for 17 + 30 tokens by twelves
    assert 3 < len(tapes) < 15


@pytest.mark.thorough
@torch.no_grad()
def test_a_decoder_keeps_its_recordings_while_the_weights_stay_where_they_are(monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.batch_state.ROW_BUCKETS", (2, 4, 8))
    monkeypatch.setattr("dschat_lora.generation.batch_state.COLUMN_BUCKET", 12)
    model, tapes = lively("opt").to(torch.bfloat16), []
    for name, parameter in model.named_parameters():
        if ".lora_" in name:  # in fp32, so that the decoder works with copies
            parameter.data = parameter.data.float()

    def record(step):
        tapes.append(Tape(step))
        return tapes[-1]

    decoder = decoder_of(model, range(3, 6), largest=(10, 47), record=record)
    plain = decoder_of(model, range(3, 6))
    texts, sampling = [], Sampling(30, top_k=30)
    for call, number in enumerate((5, 2, 5, 4)):
        prompts, seeds = PROMPTS[:number], [[call, call + 10]] * number
        arguments = {"seeds": seeds, "keep_logprobs": call % 2 == 0}
        responses = decoder(prompts, sampling, **arguments)
        texts.append(responses.tokens())
        expected = plain(prompts, sampling, **arguments)
        assert texts[-1] == expected.tokens()
        if call % 2 == 0:
            assert responses.logprobs() == expected.logprobs()
        for layer in adapter_layers(model).values():  # as an optimizer's step
            layer.lora_B.mul_(1.5)
    assert texts[0] != texts[2]
    seeds, known = [[0, 10]] * 5, []
    for _ in range(3):
        decoder(PROMPTS, sampling, seeds=seeds)
        known.append(len(tapes))
    assert known[0] == known[1] == known[2] < 4 * 12, "each shape is recorded once"
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    decoder(PROMPTS, sampling, seeds=seeds)
    assert len(tapes) > known[2], "what a recording reads has moved"


def test_a_step_that_cannot_be_recorded_is_told_once_and_run_as_it_is(monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.batch_state.COLUMN_BUCKET", 4)
    model = lively("opt")
    seeds = [[i] for i in range(len(PROMPTS))]
    attempts = []

    def refuse(step):
        attempts.append(step)
        raise RuntimeError("no graph today\nand more")

    rows, responses = rows_of(model, PROMPTS, Sampling(6), seeds, buckets=True, record=refuse)
    with pytest.warns(UserWarning, match="without CUDA graphs, more slowly: no graph today$"):
        answers = drive(rows, responses)
    assert [[text] for text in answers] == run(model, PROMPTS, Sampling(6), seeds=seeds)
    assert len(attempts) == 1


@pytest.mark.parametrize(
    ("rows", "room", "bucket"), [(1, 8, 8), (9, 16, 8), (100, 104, 64), (264, 264, 128)]
)
def test_rows_come_in_few_sizes_where_a_gpu_repeats_them(rows, room, bucket):
    cached, _ = rows_of(tiny_model("opt"), [[5]] * rows, Sampling(4), [[0]] * rows, buckets=True)
    assert cached._cache.capacity == (room, 128)
    assert cached._cache.rows == room
    assert (cached.holds(room, 128), cached.holds(room + 1, 128)) == (True, False)
    cached.keep([n <= rows // 3 for n in range(rows)])
    assert cached._cache.rows == bucket


@pytest.mark.parametrize("make", [*KINDS, "mistral", "gemma3"])
@pytest.mark.parametrize(
    ("columns", "width"), [(64, 24), (4, 20)], ids=["rounded up", "as far as the cache has room"]
)
def test_prompts_are_read_in_few_widths_where_shapes_are_to_be_few(
    make, columns, width, monkeypatch
):
    monkeypatch.setattr("dschat_lora.generation.batch_state.COLUMN_BUCKET", columns)
    monkeypatch.setattr("dschat_lora.generation.batch_state.PROMPT_BUCKET", 8)
    model = lively(make) if make in KINDS else sliding(make, "sdpa")
    shapes, asked = shapes_read(model), (PROMPTS, Sampling(12))
    seeds = [[i, i + 9] for i in range(len(PROMPTS))]
    texts = decoder_of(model, record=lambda step: step)(*asked, seeds=seeds).tokens()
    assert [tokens for _, tokens in shapes] == [width] + [1] * 11
    assert texts == decoder_of(model)(*asked, seeds=seeds).tokens()


def test_ended_rows_are_let_go_and_the_living_move_into_their_places():
    model = tiny_model("opt")
    prompts = [[5 + i] for i in range(6)]
    rows, _ = rows_of(model, prompts, Sampling(4), [[i] for i in range(6)])
    shapes = shapes_read(model)
    with torch.no_grad():
        rows.keep([False, True, True, False, True, True])
        rows.step()
    assert rows.sequences == [4, 1, 2, 5] or rows.sequences == [5, 1, 2, 4]
    assert shapes == [(4, 1)]


def test_prompts_are_read_once_whatever_the_number_of_responses():
    model = tiny_model("opt")
    shapes = shapes_read(model)
    run(model, PROMPTS, Sampling(3), seeds=[[1, 2, 3, 4]] * len(PROMPTS))
    assert shapes == [(5, 17), (20, 1), (20, 1)]


def test_libraries_set_themselves_up_in_a_first_step_that_is_not_recorded():
    recorded = []

    def record(step):
        recorded.append(step)
        return step

    rows, _ = rows_of(
        tiny_model("opt"), PROMPTS, Sampling(6), [[0]] * len(PROMPTS), buckets=True, record=record
    )
    counts = []
    with torch.no_grad():
        for _ in range(3):
            rows.step()
            counts.append(len(recorded))
    assert counts == [0, 1, 1]


def test_models_whose_masks_or_kernels_are_none_of_ours_take_no_cache(monkeypatch):
    model = tiny_model("llama")
    assert takes_cache(model)
    with monkeypatch.context() as patch:
        patch.setattr(model.config, "layer_types", ["linear_attention"], raising=False)
        assert not takes_cache(model)
    with monkeypatch.context() as patch:
        patch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
        assert not takes_cache(model)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "_supports_attention_backend", False)
        assert not takes_cache(model)
    assert takes_cache(model)


def test_a_rank_that_is_done_goes_on_with_the_others():
    model = tiny_model("opt")
    calls, shapes = [], shapes_read(model)

    def others(done):
        calls.append(done)
        return len(calls) < 9

    expected = run(model, PROMPTS, Sampling(4))
    shapes.clear()
    assert run(model, PROMPTS, Sampling(4), keep_going=others) == expected
    assert calls == [False] * 3 + [True] * 6
    assert shapes == [(5, 17), *[(5, 1)] * 3, *[(1, 1)] * 5]


def test_a_rank_without_prompts_takes_part():
    model = tiny_model("opt")
    forwards = shapes_read(model)
    answers = iter([True, True, False])
    assert run(model, [], Sampling(4), keep_going=lambda done: done and next(answers)) == []
    assert len(forwards) == 3
    assert run(model, [], Sampling(4)) == []
    assert len(forwards) == 3


def test_decoding_stops_when_all_have_ended():
    model = tiny_model("opt")
    forwards = shapes_read(model)
    texts = run(model, PROMPTS, Sampling(30), eos_ids=range(VOCAB))
    assert [len(each[0]) for each in texts] == [1] * len(PROMPTS)
    assert len(forwards) == 1


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(AssertionError, match="evaluation mode"):
        run(tiny_model("opt").train(), PROMPTS, GREEDY)


@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        (
            Sampling(9, temperature=0.7, top_k=20),
            [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20)],
        ),
        (Sampling(9, top_p=0.6), [TopPLogitsWarper(0.6)]),
        (Sampling(9, temperature=1.4, policy_temperature=1.0), [TemperatureLogitsWarper(1.4)]),
        (Sampling(9, temperature=0.8, policy_temperature=0.8), [TemperatureLogitsWarper(0.8)]),
    ],
)
def test_logprobs_of_the_sampler_are_those_of_what_was_drawn_from(sampling, warpers):
    model = lively("opt").double()
    decoder = decoder_of(model, range(8))
    seeds = [[n] for n in range(len(PROMPTS))]
    responses = decoder(PROMPTS, sampling, seeds=seeds, keep_logprobs=True)
    of_policy, of_sampler = responses.logprobs(), responses.sampler_logprobs()
    texts = responses.tokens()
    for prompt, tokens, own, drawn in zip(PROMPTS, texts, of_policy, of_sampler, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0][len(prompt) - 1 : -1]
        policy = (logits / (sampling.policy_temperature or sampling.temperature)).log_softmax(-1)
        for warper in warpers:
            logits = warper(None, logits)
        sampler = logits.log_softmax(-1)
        places = range(len(tokens))
        assert own == pytest.approx(policy[places, tokens].tolist(), abs=1e-5)
        assert drawn == pytest.approx(sampler[places, tokens].tolist(), abs=1e-5)
    assert (of_policy == of_sampler) == sampling.draws_from_policy


@pytest.mark.parametrize("kind", ["opt", "llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_kept_are_those_of_a_plain_forward_before_any_filter(kind, temperature):
    model, copies = lively(kind).double(), 3
    sampling = Sampling(9, temperature=temperature, top_k=20, top_p=0.9)
    seeds = list(range(copies * len(PROMPTS)))
    decoder = decoder_of(model, range(8))
    own = [seeds[i : i + copies] for i in range(0, len(seeds), copies)]
    responses = decoder(PROMPTS, sampling, seeds=own, keep_logprobs=True)
    texts, kept = responses.tokens(), responses.logprobs()
    assert {len(text) for text in texts} > {9}, "some end early"
    for number, (tokens, logprobs) in enumerate(zip(texts, kept, strict=True)):
        prompt = PROMPTS[number // copies]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0] / temperature
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        picked = [float(row[token]) for row, token in zip(expected, tokens, strict=True)]
        assert logprobs == pytest.approx(picked, abs=1e-5)
