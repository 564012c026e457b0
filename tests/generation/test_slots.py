"""Rows that join and leave a running batch, against transformers' own generation."""

import pytest
import torch

from dschat_lora.generation.cuda_graphs import RecordedSteps
from dschat_lora.generation.sampling import Sampling, sample_each, uniforms
from dschat_lora.generation.slots import SlotRows
from dschat_lora.models.loading import share_parameters
from helpers.addons import of_addon
from helpers.decoding import CPU, decoder_of, generated, shapes_read
from helpers.tape import Tape
from helpers.tiny import KINDS, adapted, tiny_model

MIXED = of_addon("serving.mixed")
GREEDY = Sampling(1, do_sample=False)
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14], list(range(3, 20)), [21], [30, 31, 32, 33]]
NUMBERS = [1, 0, 2, 1, 2, 0]
# When each request comes, and how many tokens it wants: batches grow, shrink and grow again.
COMES = [0, 0, 2, 3, 3, 7]
WANTS = [12, 3, 9, 6, 14, 5]


@torch.inference_mode()
def continuous(rows, samplings, numbers=NUMBERS, *, draws=None):
    """The tokens of each of ``PROMPTS``, which come and go as the lists above say."""
    said = [[] for _ in PROMPTS]
    running = []

    def push(requests, logits):
        uniform = [1.0 if draws is None else float(draws[r, len(said[r])]) for r in requests]
        chosen = sample_each(logits, [samplings[r] for r in requests], uniform)
        for request, token in zip(requests, chosen, strict=True):
            said[request].append(token)

    with rows.kernels():
        for time in range(40):
            new = [r for r, comes in enumerate(COMES) if comes == time]
            if new:
                push(new, rows.join([PROMPTS[r] for r in new], [numbers[r] for r in new])[0])
                running += new
            if running:
                push(running, rows.step([said[r][-1] for r in running]))
            for row in reversed(range(len(running))):
                if len(said[running[row]]) >= WANTS[running[row]]:
                    rows.leave(row)
                    running[row] = running[-1]
                    running.pop()
    return said


@pytest.fixture(params=["as they are", "recorded"])
def record(request, monkeypatch):
    """What records steps, in shapes of few columns; None."""
    if request.param == "as they are":
        yield None
        return
    monkeypatch.setattr("dschat_lora.generation.slots.COLUMN_BUCKET", 8)
    tapes = []
    yield lambda step: tapes.append(Tape(step)) or tapes[-1]
    assert len(tapes) > 3


@pytest.mark.skipif(not MIXED, reason="the add-on is not there")
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_come_and_go_with_their_adapters_say_what_transformers_generates(kind, record):
    base = tiny_model(kind)
    models = [adapted(base, seed) for seed in range(2)]
    model, chosen = share_parameters(base), MIXED[0].AdapterRows(CPU)
    MIXED[0].mix_adapters(model, models, rows=chosen)
    rows = SlotRows(model.eval(), chosen, pad_id=0, record=record)
    said = continuous(rows, [GREEDY] * len(PROMPTS))
    for prompt, number, count, tokens in zip(PROMPTS, NUMBERS, WANTS, said, strict=True):
        assert tokens == generated([base, *models][number], prompt, count)


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_sliding_windows_move_with_each_row(kind, record):
    model = tiny_model(kind, sliding_window=4)
    said = continuous(SlotRows(model, pad_id=0, record=record), [GREEDY] * len(PROMPTS))
    for prompt, count, tokens in zip(PROMPTS, WANTS, said, strict=True):
        assert tokens == generated(model, prompt, count)


def test_each_row_draws_by_its_own_options_and_seed_as_when_decoded_alone():
    model = tiny_model("llama")
    options = [
        {"do_sample": False},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 5},
        {"top_p": 0.6},
        {"temperature": 0.7},
        {},
    ]
    samplings = [Sampling(1, **each) for each in options]
    seeds = [11, 12, 13, 14, 15, 16]
    said = continuous(SlotRows(model, pad_id=0), samplings, draws=uniforms(seeds, 40))
    for row, prompt in enumerate(PROMPTS):
        sampling = Sampling(WANTS[row], **options[row])
        alone = decoder_of(model)([prompt], sampling, seeds=[[seeds[row]]])
        assert [said[row]] == alone.tokens()


def test_rows_read_nothing_of_one_that_is_not_finite_and_has_gone():
    broken = tiny_model("llama")
    with torch.inference_mode():
        broken.get_input_embeddings().weight[9] = torch.nan
        rows = SlotRows(broken, pad_id=0)
        with rows.kernels():
            rows.join([[9] * 30, [9] * 30, [5]], [0] * 3)
            rows.leave(0)
            rows.leave(1)
            logits, _ = rows.join([[6, 7], [8] * 40], [0] * 2)
            assert logits.isfinite().all()
            assert rows.step([5, 6, 7]).isfinite().all()


@torch.inference_mode()
def test_nothing_recorded_is_replayed_once_the_cache_has_grown(monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.slots.COLUMN_BUCKET", 8)
    logits, tapes = [], []

    def record(step):
        tapes.append(Tape(step))
        return tapes[-1]

    for each in (None, record):
        rows, steps = SlotRows(tiny_model("llama"), pad_id=0, record=each), []
        with rows.kernels():
            rows.join([[5, 6]], [0])
            steps += [rows.step([7]).clone() for _ in range(3)]  # recorded, and replayed
            rows.join([list(range(3, 23))], [0])  # which needs more rows and columns
            steps += [rows.step([8, 9])[:1].clone()]
            rows.leave(1)
            steps += [rows.step([10]).clone()]  # of the shape of before
        logits.append(torch.cat(steps))
    assert len(tapes) == 1
    torch.testing.assert_close(*logits)


@torch.inference_mode()
def test_another_request_takes_a_row_of_the_shape_that_is_recorded():
    logits, tapes = [], []

    def record(step):
        tapes.append(Tape(step))
        return tapes[-1]

    for each in (None, record):
        rows = SlotRows(tiny_model("llama"), pad_id=0, record=each)
        with rows.kernels():
            rows.join([[5, 6], [7], [8, 9, 10]], [0] * 3)
            steps = [rows.step([11] * 3).clone() for _ in range(2)]
            rows.join([[12, 13]], [0])
            steps += [rows.step([14] * 4).clone() for _ in range(2)]
        logits.append(torch.cat(steps))
    assert len(tapes) == 1, "three rows in four"
    torch.testing.assert_close(*logits)


def test_no_more_shapes_are_kept_than_a_bound(monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.cuda_graphs.MOST_SHAPES", 2)
    recorded, run = [], []
    steps = RecordedSteps(lambda step: recorded.append(step) or step)
    for shape in (1, 2, 3, 3, 1):  # twice each: as it is, and recorded; 3 leaves 1 and 2 out
        for _ in range(2):
            steps.run(shape, lambda shape=shape: run.append(shape), CPU)
    assert run == [1, 1, 2, 2, 3, 3, 3, 3, 1, 1]
    assert len(recorded) == 4


def test_a_model_without_cached_attention_of_ours_is_refused():
    model = tiny_model("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot decode several requests"):
        SlotRows(model, pad_id=0)


@pytest.mark.skipif(not MIXED, reason="the add-on is not there")
@torch.inference_mode()
@pytest.mark.parametrize(("prefix_cache", "known"), [(True, [21, 0, 18]), (False, [0, 0, 0])])
def test_a_prompt_takes_what_it_has_in_common_with_a_running_row_of_its_adapter(
    prefix_cache, known
):
    base = tiny_model("llama")
    model, chosen = share_parameters(base), MIXED[0].AdapterRows(CPU)
    MIXED[0].mix_adapters(model, [adapted(base, 0)], rows=chosen)
    text, numbers = list(range(3, 25)), [1, 0, 1]
    prompts = [text, text, [*text[:18], 50, 51]]
    rows = SlotRows(model.eval(), chosen, pad_id=0, prefix_cache=prefix_cache)
    other = SlotRows(model, chosen, pad_id=0)
    with rows.kernels():
        rows.join([[5, 6], text], [0, 1])
        logits, taken = rows.join(prompts, numbers)
        anew, _ = other.join(prompts, numbers)
    assert taken == known
    torch.testing.assert_close(logits, anew, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_equal_prompts_are_read_once_unless_nothing_is_shared(prefix_cache):
    model = tiny_model("llama")
    shapes = shapes_read(model)
    rows = SlotRows(model, pad_id=0, prefix_cache=prefix_cache)
    with rows.kernels():
        logits, _ = rows.join([[5, 6, 7]] * 3, [0] * 3)
    assert shapes == [(1 if prefix_cache else 3, 3)]
    torch.testing.assert_close(logits[1:], logits[:1].expand(2, -1))
