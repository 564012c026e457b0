"""Decoding, against transformers' own generation, plain loops and exact distributions."""

import hashlib
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dschat_lora.config.groups import LoraConfig
from dschat_lora.generation.batch_state import CachedRows
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.generation.generate import Decoder, decode
from dschat_lora.generation.kv_cache import fast_attention, takes_cache
from dschat_lora.generation.sampling import Responses, Sampling, keep_top, sample_tokens, uniforms
from dschat_lora.lora.model import adapter_layers, adapters_disabled, apply_lora
from dschat_lora.models.loading import share_parameters
from helpers.rounding import assert_same_sums
from helpers.spread import ALL
from helpers.tape import Tape
from helpers.tiny import KINDS, VOCAB, tiny_model

CPU = torch.device("cpu")
PAD = 0
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14], list(range(3, 20)), [21]]
GREEDY = Sampling(12, do_sample=False)


def adapted(kind, attention="sdpa"):
    """A tiny model whose adapters change what it says."""
    model = tiny_model(kind, attention)
    apply_lora(model, LoraConfig(lora_dim=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.3, generator=generator)
    return model


def run(model, prompts, sampling, *, seeds=None, eos_ids=(), **options):
    seeds = [[0] for _ in prompts] if seeds is None else seeds
    return decode(
        model,
        prompts,
        sampling,
        seeds=seeds,
        eos_ids=eos_ids,
        pad_id=PAD,
        device=CPU,
        **options,
    )


def generated(model, prompt, steps, eos=None):
    """transformers' greedy answer to one prompt."""
    ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        do_sample=False,
        pad_token_id=PAD,
        eos_token_id=eos,
    )
    return output[0, len(prompt) :].tolist()


def frequent_token(model, prompts, steps):
    """A token that several answers hold, none of them first."""
    answers = [generated(model, prompt, steps) for prompt in prompts]
    counts = Counter(token for answer in answers for token in set(answer[1:]) - {answer[0]})
    return counts.most_common(1)[0][0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"] if ALL else ["sdpa"])
@pytest.mark.parametrize(
    "make", [tiny_model, adapted][1 - ALL :], ids=["base", "adapted"][1 - ALL :]
)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_generate(kind, make, attention):
    model = make(kind, attention)
    expected = [generated(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)
    assert run(model, PROMPTS, GREEDY) == [[answer] for answer in expected]


@pytest.mark.parametrize("kind", KINDS if ALL else ["opt", "llama"])
def test_answers_end_with_their_first_end_of_sequence_whatever_goes_on_beside_them(kind):
    model = adapted(kind)
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
    expected = [plainly(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in expected}) > 3
    assert run(model, PROMPTS, GREEDY) == [[answer] for answer in expected]


def plainly(model, prompt, steps):
    """Greedy answer of a loop that reads everything at each step."""
    ids = list(prompt)
    for _ in range(steps):
        ids.append(
            int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        )
    return ids[len(prompt) :]


def test_a_model_without_position_ids_is_computed_the_slow_way():
    model = tiny_model("bloom", None, scale=0.2, vocab_size=40)
    assert not takes_cache(model)
    expected = [plainly(model, prompt, 12) for prompt in PROMPTS]
    answers = run(model, PROMPTS, GREEDY, seeds=[[1, 2]] * len(PROMPTS))
    assert answers == [[answer] * 2 for answer in expected]
    eos = expected[0][3]
    cut = [answer[: answer.index(eos) + 1] if eos in answer else answer for answer in expected]
    assert run(model, PROMPTS, GREEDY, eos_ids=[eos]) == [[answer] for answer in cut]


def test_decoding_changes_no_parameter_no_forward_and_no_setting():
    model = adapted("opt")
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
    model = adapted(kind)
    base = [[generated(tiny_model(kind), prompt, 12)] for prompt in PROMPTS]
    assert run(model, PROMPTS, GREEDY) != base
    with adapters_disabled(model):
        assert run(model, PROMPTS, GREEDY) == base


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("products", [0, 2**40], ids=["oneDNN", "plain"])
def test_quick_linear_layers_compute_what_they_did(kind, products, monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.fast_linears.MIN_PACKED_PRODUCTS", products)
    model = adapted(kind)
    layer = next(iter(adapter_layers(model).values()))
    if layer.bias is not None:
        layer.trained_bias = torch.nn.Parameter(torch.randn_like(layer.bias))
    ids = torch.tensor([PROMPTS[3], PROMPTS[3][::-1]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with FastLinears(model).in_use():
            assert "forward" in vars(layer)
            logits = model(input_ids=ids).logits
    assert_same_sums(logits, expected)


SAMPLINGS = [
    Sampling(10),
    Sampling(10, temperature=0.7, top_p=0.9),
    Sampling(10, temperature=1.4, top_k=12),
    Sampling(10, top_k=20, top_p=0.8),
]


@pytest.mark.parametrize("sampling", SAMPLINGS if ALL else SAMPLINGS[-1:], ids=str)
def test_a_text_is_a_function_of_its_prompt_and_seed_alone(sampling):
    model = adapted("llama")
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


def test_seeds_differ_in_all_their_bits():
    rows = uniforms([7, 7 + 2**32, 7 + 2**62, 7], 4)
    assert torch.equal(rows[0], rows[3])
    assert len(set(rows[:3].flatten().tolist())) == 12


def test_random_numbers_are_above_0_and_may_be_1(monkeypatch):
    class Least:
        def __init__(self, seed):
            self.random = lambda: 0.0

    monkeypatch.setattr("dschat_lora.generation.sampling.Random", Least)
    assert uniforms([1], 2).tolist() == [[1.0, 1.0]]


def test_a_longer_bound_goes_on_with_the_same_text():
    model = tiny_model("opt")
    short = run(model, PROMPTS, Sampling(5))
    long = run(model, PROMPTS, Sampling(9))
    assert [texts[0][:5] for texts in long] == [texts[0] for texts in short]


def plain_distribution(logits, sampling):
    """Probabilities of one row of logits by the definitions, token by token."""
    scaled = [value / sampling.temperature for value in logits.double().tolist()]
    kept = set(range(len(scaled)))
    if sampling.top_k:
        worst = sorted(scaled, reverse=True)[: sampling.top_k][-1]
        kept = {i for i in kept if scaled[i] >= worst}
    weights = torch.tensor([scaled[i] if i in kept else -torch.inf for i in range(len(scaled))])
    probabilities = weights.double().softmax(0).tolist()
    total, nucleus = 0.0, set()
    for index in sorted(kept, key=lambda i: -probabilities[i]):
        if total >= sampling.top_p:
            break
        nucleus.add(index)
        total += probabilities[index]
    rest = sum(probabilities[i] for i in nucleus)
    return [p / rest if i in nucleus else 0.0 for i, p in enumerate(probabilities)]


FILTERS = [
    Sampling(1),
    Sampling(1, temperature=0.5),
    Sampling(1, top_p=0.6),
    Sampling(1, top_k=5),
    Sampling(1, temperature=2.0, top_k=9, top_p=0.7),
    Sampling(1, top_k=1),
    Sampling(1, top_p=1e-6),
    Sampling(1, top_k=100),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_filters_keep_what_their_definitions_keep(sampling):
    logits = 2 * torch.randn(6, 31, generator=torch.Generator().manual_seed(3))
    kept = keep_top(logits / sampling.temperature, sampling).softmax(-1)
    expected = torch.tensor([plain_distribution(row, sampling) for row in logits])
    torch.testing.assert_close(kept, expected)


def test_tokens_tied_with_the_last_one_kept_stay():
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, -1.0]])
    top = {
        "top_k": keep_top(logits, Sampling(1, top_k=2)),
        "top_p": keep_top(logits, Sampling(1, top_p=0.6)),
    }
    for kept in top.values():
        assert kept.isfinite().tolist() == [[False, True, True, True, False]]


def test_a_bound_that_rounding_never_reaches_keeps_all():
    logits = torch.randn(200, 31, generator=torch.Generator().manual_seed(3))
    kept = keep_top(logits, Sampling(1, top_p=1 - 1e-12))
    # a probability too small to move the sum may be left out
    assert kept.isfinite().sum(-1).min() > 25


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_drawn_tokens_follow_the_exact_distribution(sampling):
    logits = 1.5 * torch.randn(1, 12, generator=torch.Generator().manual_seed(5))
    count = 20_000
    uniform = uniforms(range(count), 1)[:, 0]
    drawn = sample_tokens(logits.expand(count, -1), uniform, sampling)
    counts = torch.bincount(drawn, minlength=12)
    expected = count * torch.tensor(plain_distribution(logits[0], sampling))
    assert not counts[expected == 0].any()
    possible = expected > 0
    misfit = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    # chi-square of at most 11 degrees of freedom: above 31.3 once in a thousand times
    assert misfit < 31.3


def test_a_token_is_the_first_whose_cumulated_probability_reaches_the_random_number():
    logits = torch.tensor([0.25, 0.0, 0.5, 0.25]).log().repeat(6, 1)
    uniform = torch.tensor([1e-17, 0.25, 0.2500001, 0.75, 0.76, 1.0], dtype=torch.float64)
    assert sample_tokens(logits, uniform, Sampling(1)).tolist() == [0, 0, 2, 2, 3, 3]


def test_a_token_of_no_probability_is_not_drawn_at_either_end():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    for value in (2.0**-53, 1.0):
        assert sample_tokens(logits, torch.tensor([value]).double(), Sampling(1)).tolist() == [1]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_step_draws_from_the_models_distribution_by_its_own_random_number(sampling):
    model = adapted("gpt2")
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, found 0"),
        ({"temperature": 0.0}, "temperature must be at least 1e-06, found 0.0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], found 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], found 1.1"),
        ({"top_k": -1}, r"top_k must be 0 \(all\) or more, found -1"),
    ],
)
def test_options_that_mean_no_distribution_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**{"max_new_tokens": 1, **options})


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


@pytest.mark.parametrize("make", [lambda: adapted("opt"), lambda: sliding("gemma3", "sdpa")])
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


@torch.no_grad()
@pytest.mark.parametrize("kind", ["opt", "llama", "qwen2"])
def test_one_product_computes_all_layers_that_read_one_input(kind):
    model = adapted(kind)
    ids = torch.tensor([PROMPTS[0]])
    linears, before = FastLinears(model, stacked=True), model(ids).logits
    for scale in (1.0, 1.5):  # the second time as after a step
        for layer in adapter_layers(model).values():
            layer.lora_B.mul_(scale)
        expected = model(ids).logits
        with Count() as count, linears.in_use():
            assert_same_sums(model(ids).logits, expected)
        # Of q, k and v; output; one or two up; down: their weights with first factors, and second
        # factors of each. Then the head.
        wide = 6 if kind == "opt" else 7
        assert count.products == model.config.num_hidden_layers * (4 + wide) + 1
    assert torch.equal(before, adapted(kind)(ids).logits), "moved weights are as they were"
    layers, stacks = adapter_layers(model).values(), linears._stacks.values()
    second = sum(layer.lora_B.numel() for layer in layers)
    assert sum(stack.up.numel() for stack in stacks) == second, "no zeros beside them"


@torch.no_grad()
def test_models_of_one_base_share_the_places_of_its_weights():
    base = adapted("opt").double()
    twin = share_parameters(base)
    ids, weight = torch.tensor([PROMPTS[0]]), base.model.decoder.layers[0].fc1.weight
    for layer in adapter_layers(twin).values():
        layer.lora_A = torch.nn.Parameter(torch.randn(layer.r, layer.in_features).double())
    expected = [model(ids).logits for model in (base, twin)]
    assert not torch.equal(*expected)
    linears = [FastLinears(model, stacked=True) for model in (base, twin)]
    place = weight.data_ptr()
    for number in (0, 1, 0):
        with linears[number].in_use():
            logits = (base, twin)[number](ids).logits
        torch.testing.assert_close(logits, expected[number])
    FastLinears(base, stacked=True)
    assert weight.data_ptr() == place


@torch.no_grad()
@pytest.mark.parametrize("kind", ["opt", "llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("share", [False, True])
def test_merged_copies_give_what_layers_with_adapters_give(kind, share):
    model = adapted(kind)
    ids, before = torch.tensor([PROMPTS[0]]), model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    linears = FastLinears(model, stacked=share, merged=True)
    for scale in (1.0, 1.5):  # the second time as after a step
        for layer in adapter_layers(model).values():
            layer.lora_B.mul_(scale)
        expected = model(ids).logits
        with Count() as plain, FastLinears(model).in_use():
            model(ids)
        with Count() as merged, linears.in_use():
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert merged.products < plain.products
    for name, tensor in model.state_dict().items():
        if not name.endswith("lora_B"):
            assert torch.equal(tensor, before[name])


@torch.no_grad()
def test_merged_copies_in_16_bits_are_their_sum_in_the_mean_and_a_function_of_what_is_asked_for():
    model, asked = adapted("opt").bfloat16(), [0]
    linears = FastLinears(model, stacked=True, merged=True, rounding=lambda: asked[0])
    _, layer = linears._merged[0]
    layer.lora_B.mul_(1e-4)  # most of which rounding to the nearest would lose
    layer.weight[0], layer.lora_B[0] = 1.0, 0.0
    copies = []
    for asked[0] in [*range(200), 0]:
        with linears.in_use():
            copies.append(linears._merged[0][0].clone())
    assert torch.equal(copies[0], copies[200])
    assert not torch.equal(copies[0], copies[1])
    assert (copies[5][0] == 1).all()
    weight, update = layer.weight.double(), layer.scaling * (layer.lora_B @ layer.lora_A).double()
    mean, nearest = torch.stack(copies[:200]).double().mean(0), (weight + update).bfloat16()
    parts = [((each - weight) * update).sum() / update.square().sum() for each in (mean, nearest)]
    assert parts[0] == pytest.approx(1, abs=0.05)
    assert parts[1] < 0.5


@torch.no_grad()
def test_a_layer_that_is_given_another_input_reads_its_own():
    model = adapted("opt")
    attention = model.model.decoder.layers[0].self_attn
    x, y = torch.randn(2, 3, model.config.hidden_size)
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    inputs = [(x, y, x), (x, x, y), (y, x, x)]
    expected = [[f(z) for f, z in zip(layers, each, strict=True)] for each in inputs]
    with FastLinears(model, stacked=True).in_use():
        outputs = [[f(z) for f, z in zip(layers, each, strict=True)] for each in inputs]
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)


class Count(TorchDispatchMode):
    """Counts matrix products."""

    products = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.products += operation._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
        return operation(*args, **(kwargs or {}))


@pytest.mark.thorough
@torch.no_grad()
def test_a_decoder_keeps_its_recordings_while_the_weights_stay_where_they_are(monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.batch_state.ROW_BUCKETS", (2, 4, 8))
    monkeypatch.setattr("dschat_lora.generation.batch_state.COLUMN_BUCKET", 12)
    model, tapes = adapted("opt").to(torch.bfloat16), []
    for name, parameter in model.named_parameters():
        if ".lora_" in name:  # in fp32, so that the decoder works with copies
            parameter.data = parameter.data.float()

    def record(step):
        tapes.append(Tape(step))
        return tapes[-1]

    options = {"eos_ids": range(3, 6), "pad_id": PAD, "device": CPU}
    decoder = Decoder(model, **options, largest=(10, 47), record=record)
    plain = Decoder(model, **options)
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
    model = adapted("opt")
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
    model = adapted(make) if make in KINDS else sliding(make, "sdpa")
    widths = []
    model.register_forward_pre_hook(
        lambda _, args, inputs: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    sampling, seeds = Sampling(12), [[i, i + 9] for i in range(len(PROMPTS))]
    options = {"eos_ids": [], "pad_id": PAD, "device": CPU}
    responses = Decoder(model, **options, record=lambda step: step)(PROMPTS, sampling, seeds=seeds)
    assert widths == [width] + [1] * 11
    assert responses.tokens() == Decoder(model, **options)(PROMPTS, sampling, seeds=seeds).tokens()


def test_ended_rows_are_let_go_and_the_living_move_into_their_places():
    model = tiny_model("opt")
    prompts = [[5 + i] for i in range(6)]
    rows, _ = rows_of(model, prompts, Sampling(4), [[i] for i in range(6)])
    sizes = []
    model.register_forward_pre_hook(
        lambda _, args, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True
    )
    with torch.no_grad():
        rows.keep([False, True, True, False, True, True])
        rows.step()
    assert rows.sequences == [4, 1, 2, 5] or rows.sequences == [5, 1, 2, 4]
    assert sizes == [4]


def test_prompts_are_read_once_whatever_the_number_of_responses():
    model = tiny_model("opt")
    shapes = []
    model.register_forward_pre_hook(
        lambda _, args, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
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
    calls, sizes = [], []
    model.register_forward_pre_hook(
        lambda _, args, inputs: sizes.append(inputs["input_ids"].numel()), with_kwargs=True
    )

    def others(done):
        calls.append(done)
        return len(calls) < 9

    expected = run(model, PROMPTS, Sampling(4))
    sizes.clear()
    assert run(model, PROMPTS, Sampling(4), keep_going=others) == expected
    assert calls == [False] * 3 + [True] * 6
    assert sizes == [5 * 17, 5, 5, 5, *[1] * 5]


def test_a_rank_without_prompts_takes_part():
    model = tiny_model("opt")
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    answers = iter([True, True, False])
    assert run(model, [], Sampling(4), keep_going=lambda done: done and next(answers)) == []
    assert len(forwards) == 3
    assert run(model, [], Sampling(4)) == []
    assert len(forwards) == 3


def test_decoding_stops_when_all_have_ended():
    model = tiny_model("opt")
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    texts = run(model, PROMPTS, Sampling(30), eos_ids=range(VOCAB))
    assert [len(each[0]) for each in texts] == [1] * len(PROMPTS)
    assert len(forwards) == 1


@pytest.mark.parametrize(
    ("whole", "here", "sharded"),
    [(None, None, False), (8, 8, False), (8, 0, True)],
    ids=["no ZeRO 3", "gathered", "in shards"],
)
def test_weights_that_are_shards_outside_a_forward_are_not_prepared(whole, here, sharded):
    model = adapted("opt")
    layer = next(iter(adapter_layers(model).values()))
    if whole is not None:
        # As ZeRO 3 marks them: what is in shards here has fewer numbers than the whole.
        layer.weight.ds_numel = layer.weight.numel() + whole - here
    prepared = []
    model.register_forward_pre_hook(lambda *_: prepared.append("forward" in vars(layer)))
    texts = run(model, PROMPTS, GREEDY)
    assert set(prepared) == {not sharded}
    assert texts == [[generated(model, prompt, 12)] for prompt in PROMPTS]


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
    model = adapted("opt").double()
    decoder = Decoder(model, eos_ids=range(8), pad_id=PAD, device=CPU)
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
    model, copies = adapted(kind).double(), 3
    sampling = Sampling(9, temperature=temperature, top_k=20, top_p=0.9)
    seeds = list(range(copies * len(PROMPTS)))
    decoder = Decoder(model, eos_ids=range(8), pad_id=PAD, device=CPU)
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
