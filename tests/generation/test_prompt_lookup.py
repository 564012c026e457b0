"""Prompt look-up: drafts, and texts and log-probabilities that stay what they are without them."""

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from dschat_lora.generation.generate import Decoder
from dschat_lora.generation.prompt_lookup import PromptLookup, proposed
from dschat_lora.generation.sampling import Sampling
from dschat_lora.generation.slots import SlotRows
from generation.test_slots import SLIDING
from generation.test_turns import MODELS, play
from helpers.spread import ALL
from helpers.tape import Tape
from helpers.tiny import KINDS, adapted, tiny_model

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14] * 6, list(range(3, 23)), [21, 22, 23, 21, 22]]
SEEDS = [[number, 50 + number] for number in range(len(PROMPTS))]
LIMITS = [30, 1, 30, 7, 30]
GREEDY = {"do_sample": False}


def drawn(model, count, options=GREEDY, *, prompts=PROMPTS, seeds=SEEDS, rows=3, **more):
    decoder = Decoder(
        model, eos_ids=[2], pad_id=0, device=CPU, num_drafts=count, largest=(rows, 0), **more
    )
    sampling = Sampling(30, **options)
    limits = LIMITS if prompts is PROMPTS else None
    found = decoder(prompts, sampling, seeds=seeds, limits=limits, keep_logprobs=True)
    return decoder, found


def static(model, options=GREEDY, **more):
    """The same by one batch, whose rows are not refilled."""
    return drawn(model, 0, options, rows=0, **more)[1]


def same(plain, found):
    assert found.tokens() == plain.tokens()
    for name in ("logprobs", "sampler_logprobs"):
        pairs = zip(getattr(found, name)(), getattr(plain, name)(), strict=True)
        for ours, expected in pairs:
            # Logits of about 10 are rounded otherwise, and divided by a temperature.
            assert ours == pytest.approx(expected, abs=1e-4)


def test_a_draft_is_what_followed_the_longest_run_of_last_tokens():
    lookup = PromptLookup([1, 2, 3, 4, 5, 9, 2, 3, 8, 7], 4)
    assert lookup.draft(9) == [], "8 7 is new"
    lookup.add([2, 3])
    assert lookup.draft(9) == [8, 7, 2, 3], "what followed the last 2 3"
    lookup = PromptLookup([1, 2, 3, 4, 5, 9, 2, 3, 8, 7, 1, 2, 3], 4)
    assert lookup.draft(9) == [4, 5, 9, 2], "1 2 3 goes before the later 2 3"
    assert lookup.draft(2) == [4, 5]
    assert lookup.draft(0) == []


def test_a_text_that_repeats_itself_goes_on_in_its_period():
    assert PromptLookup([7, 5, 6, 5, 6], 5).draft(9) == [5, 6, 5, 6, 5]


def test_drafts_grow_as_they_are_right_and_pause_once_they_are_wrong():
    lookup, lengths = PromptLookup([5, 6] * 4, 8), []
    for accepted in (8, 2, 0):
        lengths.append(len(lookup.draft(9)))
        lookup.learn(accepted)
    assert lengths == [8, 8, 4]
    pauses = []
    for _ in range(9):
        pauses.append(0)
        while not lookup.draft(9):
            pauses[-1] += 1
        lookup.learn(0)
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    lookup.learn(1)
    assert lookup.draft(9) == [5, 6]


def test_a_batch_takes_drafts_of_a_token_a_row_on_average():
    silent = [PromptLookup([row], 8) for row in range(3)]
    repeats = PromptLookup([5, 6] * 4, 8)
    assert [*map(len, proposed([repeats, *silent], [4] * 4))] == [4, 0, 0, 0]
    assert [*map(len, proposed([repeats, *silent], [3] * 4))] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "options", [GREEDY, {"temperature": 0.4}, {"top_p": 0.6, "top_k": 9}][:: 1 if ALL else 2]
)
@pytest.mark.parametrize("kind", KINDS if ALL else ["llama"])
@pytest.mark.parametrize("drafts", [0, 4])
def test_texts_and_logprobs_are_those_of_one_batch_without_drafts(kind, options, drafts):
    model = adapted(tiny_model(kind), 0)
    decoder, found = drawn(model, drafts, options)
    same(static(model, options), found)
    if options == GREEDY and drafts:
        assert decoder.drafted > decoder.accepted > 0


@pytest.mark.parametrize("poll", [1, 3, 16] if ALL else [3])
def test_rows_that_draw_several_tokens_between_two_looks_say_the_same(poll, monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.slots.COLUMN_BUCKET", 8)
    monkeypatch.setattr("dschat_lora.generation.generate.CPU_POLL", poll)
    model, tapes, options = adapted(tiny_model("llama"), 0), [], {"temperature": 0.7}
    record = lambda step: tapes.append(Tape(step)) or tapes[-1]  # noqa: E731
    decoder, found = drawn(model, 0, options, record=record)
    same(static(model, options), found)
    same(static(model, options, seeds=(others := [[9, 8]] * 5)), again(decoder, others, options))
    # What was recorded draws by its own options, into its own table.
    same(static(model, {"temperature": 0.2}), again(decoder, SEEDS, {"temperature": 0.2}))
    assert len(tapes) > 3


def test_a_sequence_that_ends_between_two_looks_leaves_at_the_second(monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.generate.CPU_POLL", 4)
    model, options, sampling = tiny_model("llama"), {"pad_id": 0, "device": CPU}, Sampling(9)
    (text,) = Decoder(model, eos_ids=(), **options)([[5, 6]], sampling, seeds=[[0]]).tokens()
    passes, end = [], text[2]
    model.register_forward_pre_hook(lambda module, args: passes.append(module))
    decoder = Decoder(model, eos_ids=[end], largest=(1, 0), **options)
    found = decoder([[5, 6]], sampling, seeds=[[0, 0]]).tokens()
    assert found == [text[: 1 + text.index(end)]] * 2
    assert text.index(end) == 2
    assert len(passes) == 2 * (1 + 4), "each prompt, and four steps"


def test_a_prompt_takes_of_a_running_row_the_tokens_that_were_drawn_for_it(monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.slots.MIN_PREFIX", 2)
    model, first, options = tiny_model("llama"), [5, 6, 7, 8], {"do_sample": True}
    (text, *_) = static(model, options, prompts=[first], seeds=[[0]]).tokens()
    # They join when the first has drawn some tokens: one begins with them, one with other ones.
    prompts = [first, [9, 10], [*first, *text[:4], 11], [*first, *text[1:5], 11]]
    given = {"limits": [30, 8, 5, 5], "seeds": [[0], [1], [2], [3]]}
    found, plain = (
        Decoder(model, eos_ids=(), pad_id=0, device=CPU, largest=(rows, 0))(
            prompts, Sampling(30, **options), **given
        )
        for rows in (2, 4)
    )
    assert found.tokens() == plain.tokens()


def again(decoder, seeds, options):
    """Another call of a decoder, for which its steps are replayed."""
    sampling = Sampling(30, **options)
    return decoder(PROMPTS, sampling, seeds=seeds, limits=LIMITS, keep_logprobs=True)


@pytest.mark.parametrize("kind", SLIDING)
def test_what_is_taken_back_leaves_no_trace_in_a_sliding_window(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SLIDING[kind]().eval()
    plain = static(model, {"temperature": 0.3})
    same(plain, drawn(model, 0, {"temperature": 0.3})[1])
    decoder, found = drawn(model, 6, {"temperature": 0.3})
    same(plain, found)
    assert decoder.drafted > decoder.accepted


@pytest.mark.parametrize("kind", MODELS)
def test_later_turns_with_drafts_say_what_turns_read_anew_say_without(kind, monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.slots.MIN_PREFIX", 2)
    monkeypatch.setattr("dschat_lora.generation.prefix_cache.MIN_PREFIX", 2)
    model = MODELS[kind]()
    anew, _ = play(model, keeps=False)
    _, more = play(model, keeps=False, num_drafts=3)
    kept, fewer = play(model, keeps=True, num_drafts=3)
    for (rows, tokens, logprobs), (same_rows, expected, wanted) in zip(kept, anew, strict=True):
        assert (rows, tokens) == (same_rows, expected)
        for mine, other in zip(logprobs, wanted, strict=True):
            assert mine == pytest.approx(other, abs=2e-5)
    assert sum(fewer) < sum(more)


def test_what_was_kept_of_other_weights_is_not_used():
    model, prompts, seeds = tiny_model("llama"), [list(range(3, 30))], [[0]]
    decoder, _ = drawn(model, 4, prompts=prompts, seeds=seeds, retains=True)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(tiny_model("qwen2").get_input_embeddings().weight)
    found = decoder(prompts, Sampling(30, **GREEDY), seeds=seeds)
    assert found.tokens() == drawn(model, 0, prompts=prompts, seeds=seeds)[1].tokens()


@torch.no_grad()
def chances_of_second(model, prompt, temperature):
    """Probability of each second token, summed over the first one."""
    first = (model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
    texts = torch.tensor([[*prompt, token] for token in range(len(first))])
    return first @ (model(texts).logits[:, -1] / temperature).softmax(-1)


def test_drafted_tokens_are_drawn_in_the_models_distribution(monkeypatch):
    model, prompt, temperature, count = tiny_model("opt"), [5, 6, 7], 0.3, 3000
    chances = chances_of_second(model, prompt, temperature)
    likely = int(chances.argmax())
    monkeypatch.setattr(PromptLookup, "draft", lambda self, room: [likely][:room])
    decoder = Decoder(model, eos_ids=(), pad_id=0, device=CPU, num_drafts=2)
    found = decoder([prompt], Sampling(3, temperature=temperature), seeds=[range(count)])
    drawn = torch.tensor([tokens[1] for tokens in found.tokens()]).bincount(minlength=61)
    assert decoder.drafted == count, "the first is drawn from the prompt, the third has no draft"
    assert decoder.accepted == drawn[likely] > 0.1 * count
    cells = torch.stack([drawn.double(), count * chances.double()])
    rare = cells[1] < 5
    drawn, expected = torch.cat([cells[:, ~rare], cells[:, rare].sum(1, keepdim=True)], 1)
    degrees = len(drawn) - 1
    assert degrees > 5
    # Wilson and Hilferty's approximation of the quantile at 0.999, 3.09 standard deviations.
    most = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert float(((drawn - expected) ** 2 / expected).sum()) < most


def test_steps_with_drafts_and_without_are_recorded_apart(monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.slots.COLUMN_BUCKET", 8)
    model, tapes, widths = tiny_model("opt"), [], []
    model.register_forward_pre_hook(
        lambda module, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    _, plain = drawn(model, 0)
    widths.clear()
    decoder, found = drawn(model, 4, record=lambda step: tapes.append(Tape(step)) or tapes[-1])
    same(plain, found)
    assert {1, 5} <= set(widths)
    assert set(widths) <= {1, 5, *map(len, PROMPTS)}, "drafts of any length are steps of one shape"
    assert len(tapes) > 3
    assert decoder.accepted > 0


@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_a_long_draft_beside_a_long_text_needs_no_positions_that_the_model_lacks(kind, monkeypatch):
    monkeypatch.setattr(PromptLookup, "draft", lambda self, room: [7] * room)
    model, prompts = tiny_model(kind), [[7] * 60, [8, 9]]  # 64 positions
    options = {"seeds": [[0], [1]], "limits": [4, 30]}
    found = [
        Decoder(model, eos_ids=(), pad_id=0, device=CPU, num_drafts=count)(
            prompts, Sampling(30), **options
        ).tokens()
        for count in (0, 30)
    ]
    assert found[0] == found[1]


def test_models_whose_tokens_cannot_be_taken_back_say_so_and_decode_as_ever():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mamba = MambaForCausalLM(MambaConfig(**sizes)).eval()
    line = r"--prompt_lookup_num_tokens 4 has no effect with MambaForCausalLM: "
    with pytest.warns(UserWarning, match=line):
        decoder, found = drawn(mamba, 4)
    same(drawn(mamba, 0)[1], found)
    assert decoder.drafted == 0


def test_a_prompt_is_read_once_for_its_copies_and_not_again_while_a_row_holds_it():
    model, read = tiny_model("llama"), []
    model.register_forward_pre_hook(
        lambda module, args, given: read.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    prompt = list(range(3, 25))
    decoder = Decoder(model, eos_ids=(), pad_id=0, device=CPU, num_drafts=2, largest=(3, 0))
    options = {"seeds": [[0, 1], [2, 3]], "limits": [4, 9]}
    found = decoder([prompt] * 2, Sampling(9), **options)
    # Of four rows three at a time; the fourth finds all but the last token of its prompt.
    assert read[0] == (1, 22)
    assert [shape for shape in read if shape[0] == 1 and shape[1] > 3] == [(1, 22)]
    plain = Decoder(model, eos_ids=(), pad_id=0, device=CPU)
    assert found.tokens() == plain([prompt] * 2, Sampling(9), **options).tokens()


@pytest.mark.parametrize("drafts", [0, 2])
def test_rows_of_sequences_that_have_ended_are_refilled(drafts):
    model, steps = tiny_model("llama"), []
    model.register_forward_pre_hook(
        lambda module, args, given: steps.append(len(given["input_ids"])), with_kwargs=True
    )
    prompts, limits = [[5, 6], [7, 8], [9, 10], [11, 12]], [2, 9, 4, 3]
    decoder = Decoder(model, eos_ids=(), pad_id=0, device=CPU, num_drafts=drafts, largest=(2, 0))
    options = {"seeds": [[0], [1], [2], [3]], "limits": limits}
    found = decoder(prompts, Sampling(9), **options)
    # Two prompts and a step; the third takes the first one's place, the fourth the third's.
    assert steps == [2, 2, 1, 2, 2, 2, 1, 2, 2, 1, 1]
    assert [*map(len, found.tokens())] == limits
    plain = Decoder(model, eos_ids=(), pad_id=0, device=CPU)
    assert found.tokens() == plain(prompts, Sampling(9), **options).tokens()


def test_calls_of_other_sampling_and_size_keep_what_was_recorded():
    tapes, options = [], {"eos_ids": (), "pad_id": 0, "device": CPU, "largest": (2, 9)}
    decoder = Decoder(
        tiny_model("llama"), record=lambda step: tapes.append(Tape(step)) or tapes[-1], **options
    )
    counts = []
    for size, sampling in [(6, Sampling(4)), (3, Sampling(4, do_sample=False))] * 3:
        decoder([[5, 6]] * size, sampling, seeds=[[n] for n in range(size)])
        counts.append(len(tapes))
    assert counts[1] == counts[-1] > counts[0], "training's and evaluation's steps, each once"


def test_many_rows_take_the_memory_of_a_batch_that_is_not_refilled():
    model, steps = tiny_model("llama"), []
    model.register_forward_pre_hook(
        lambda module, args, given: steps.append(len(given["input_ids"])), with_kwargs=True
    )
    rows = [SlotRows(model, pad_id=0, record=lambda step: step) for _ in range(2)]
    for each, count in zip(rows, (5, 260), strict=True):
        each.reserve(count, 9)
        with each.kernels(), torch.no_grad():
            each.join([[5, 6]] * count, [0] * count)
            each.step([[7]] * count)
    assert steps[1::2] == [8, 384]
    assert [each._cache.rows for each in rows] == [8, 384]


def test_a_sequence_that_ends_within_a_draft_leaves_at_once(monkeypatch):
    model, options = tiny_model("llama"), {"pad_id": 0, "device": CPU}
    sampling = Sampling(9)
    (text,) = Decoder(model, eos_ids=(), **options)([[5, 6]], sampling, seeds=[[0]]).tokens()
    monkeypatch.setattr(PromptLookup, "draft", lambda self, room: text[1:6][:room])
    passes, end = [], text[3]
    model.register_forward_pre_hook(lambda module, args: passes.append(module))
    decoder = Decoder(model, eos_ids=[end], num_drafts=9, **options)
    found = decoder([[5, 6]], sampling, seeds=[[0]]).tokens()
    assert found == [text[: 1 + text.index(end)]]
    assert 0 < text.index(end) < 6
    assert text[6] != end
    assert len(passes) == 2, "the prompt, and one step"


def test_drafts_of_any_length_are_steps_of_one_shape(monkeypatch):
    monkeypatch.setattr(PromptLookup, "draft", lambda self, room: [7][:room])
    model, widths = tiny_model("llama"), []
    model.register_forward_pre_hook(
        lambda module, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    options = {"eos_ids": (), "pad_id": 0, "device": CPU, "num_drafts": 4}
    Decoder(model, record=lambda step: step, **options)([[5, 6]], Sampling(4), seeds=[[0]])
    assert set(widths) <= {2, 1, 5}
    assert widths[1] == 5, "one drafted token, in the shape of four"


@torch.inference_mode()
def test_logits_of_recorded_steps_stay_in_place_once_longer_drafts_come():
    found, tapes = [], []
    for record in (None, lambda step: tapes.append(Tape(step)) or tapes[-1]):
        rows = SlotRows(tiny_model("llama"), pad_id=0, num_drafts=4, record=record)
        with rows.kernels():
            rows.join([[5, 6], [7, 8]], [0, 0])
            rows.step([[9], [10]])
            rows.join([[5, 7], [7, 9]], [0, 0])  # which needs more rows
            for own in ([7], [7], [7, 7]):  # run, recorded, and one with drafts
                rows.step([own] * 4)
            rows.keep([1] * 4)
            found.append(rows.step([[8], [9], [10], [11]]).clone())
    assert len(tapes) == 1
    torch.testing.assert_close(*found)


def test_a_sequence_that_can_draw_nothing_takes_none_of_its_prompt_along():
    model, prompt, options = tiny_model("llama"), list(range(3, 25)), {"pad_id": 0, "device": CPU}
    with torch.no_grad():
        model.get_input_embeddings().weight[33] = torch.nan
    plain, *others = (
        Decoder(model, eos_ids=(), num_drafts=count, largest=(rows, 0), **options)(
            [prompt], Sampling(20), seeds=[range(12)]
        )
        for rows, count in ((12, 0), (2, 0), (2, 4))
    )
    for found in others:
        assert found.undrawn() == plain.undrawn()
        assert found.tokens() == plain.tokens()
    assert 0 < sum(plain.undrawn()) < 12


@pytest.mark.parametrize("needed", [1, 3, 5])
def test_rows_are_given_up_once_the_needed_prompts_have_their_responses(needed):
    model = adapted(tiny_model("llama"), seed=1)
    _, whole = drawn(model, 4)
    decoder = Decoder(model, eos_ids=[2], pad_id=0, device=CPU, num_drafts=4, largest=(3, 0))
    expected = [list(own) for own in whole.tokens()]
    found = decoder(PROMPTS, Sampling(30, **GREEDY), seeds=SEEDS, limits=LIMITS, needed=needed)
    groups = [found.cut[2 * n : 2 * n + 2] for n in range(len(PROMPTS))]
    assert groups.count([False, False]) == needed
    for own, other, cut in zip(found.tokens(), expected, found.cut, strict=True):
        assert cut or own == other
