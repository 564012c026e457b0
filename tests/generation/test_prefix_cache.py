"""Prompts that begin as an earlier row did, against the model without any cache."""

import random
from contextlib import contextmanager

import pytest
import torch

from dschat_lora.generation.prefix_cache import MIN_PREFIX
from dschat_lora.generation.slots import SlotCache, SlotRows
from dschat_lora.models.loading import share_parameters
from helpers.addons import of_addon
from helpers.rounding import assert_same_sums
from helpers.tiny import VOCAB, adapted, tiny_model, unusual_model

CPU = torch.device("cpu")
MIXED = of_addon("serving.mixed")


def sliding_model():
    return tiny_model("gemma3", sliding_window=5)


class Served:
    """Rows whose logits are compared with those of whole texts; counts tokens that are read."""

    def __init__(self, models, rows=None):
        self.models = models
        self.rows = SlotRows(models[0], pad_id=0) if rows is None else rows
        self.texts, self.numbers, self.next, self.read = [], [], [], []
        self.seen = []  # text, adapter and logits after it
        self.rows.model.register_forward_pre_hook(
            lambda module, args, given: self.read.append(given["input_ids"].numel()),
            with_kwargs=True,
        )

    @contextmanager
    def kernels(self):
        """Within, rows join, step and leave; then all logits are compared."""
        with torch.inference_mode():
            with self.rows.kernels():
                yield
            for text, number, logits in self.seen:
                ids = torch.tensor([text])
                expected = self.models[number](input_ids=ids, use_cache=False).logits[0, -1]
                assert_same_sums(logits, expected)
                assert logits.argmax() == expected.argmax()

    def take(self, logits):
        last = list(zip(self.texts, self.numbers, strict=True))[-len(logits) :]
        for (text, number), own in zip(last, logits, strict=True):
            self.seen.append((tuple(text), number, own))
        self.next = self.next[: len(self.texts) - len(logits)] + logits.argmax(-1).tolist()

    def join(self, prompts, numbers=None):
        numbers = numbers or [0] * len(prompts)
        self.texts += map(list, prompts)
        self.numbers += numbers
        logits, cached = self.rows.join(prompts, numbers)
        self.take(logits)
        return cached

    def steps(self, count):
        for _ in range(count):
            for text, token in zip(self.texts, self.next, strict=True):
                text.append(token)
            self.take(self.rows.step(self.next))

    def leave(self, row):
        """Ends a row; gives its prompt and answer, of which the last token was not fed."""
        self.rows.leave(row)
        ended = [*self.texts[row], self.next[row]]
        for values in (self.texts, self.numbers, self.next):
            values[row] = values[-1]
            values.pop()
        return ended


def drawn(count, seed):
    return random.Random(seed).choices(range(3, VOCAB), k=count)


MODELS = {
    "opt": lambda: tiny_model("opt"),
    "llama": lambda: tiny_model("llama"),
    "llama, eager": lambda: tiny_model("llama", "eager"),
    "sliding": sliding_model,
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_turn_reads_what_follows_the_turn_before_and_says_the_same(kind):
    served = Served([MODELS[kind]()])
    with served.kernels():
        text = drawn(20, 0)
        for turn in range(4):
            served.read.clear()
            known = len(text) - 1 if turn else 0
            prompt = text + (drawn(4, turn) if turn else [])
            assert served.join([prompt]) == [known]
            assert served.read == [len(prompt) - known]
            served.steps(5)
            text = served.leave(0)


@pytest.mark.parametrize("kind", MODELS)
def test_turns_join_beside_others_that_run_and_that_are_new(kind):
    served = Served([MODELS[kind]()])
    with served.kernels():
        served.join([drawn(20, 0), drawn(31, 1), drawn(18, 2)])
        served.steps(4)
        ended = [served.leave(1), served.leave(0)]
        served.steps(2)
        new = [ended[0] + drawn(7, 3), drawn(25, 4), ended[1] + drawn(2, 5), drawn(3, 6)]
        assert served.join(new) == [len(ended[0]) - 1, 0, len(ended[1]) - 1, 0]
        served.steps(3)
        served.leave(2)
        served.steps(3)


@pytest.mark.parametrize("kind", ["opt", "llama", "sliding"])
def test_a_prompt_takes_what_it_shares_and_no_more(kind):
    served, earlier = Served([MODELS[kind]()]), drawn(40, 0)
    other = [earlier[30] + 1 if earlier[30] < VOCAB - 1 else 3]
    with served.kernels():
        served.join([earlier])
        served.leave(0)
        prompts = {
            "the same": (earlier, 39),
            "its beginning": (earlier[:25], 24),
            "diverges": (earlier[:30] + other + earlier[31:], 30),
            "too short": (earlier[: MIN_PREFIX - 1] + drawn(20, 1), 0),
            "shortest": (earlier[:MIN_PREFIX] + other + drawn(9, 2), MIN_PREFIX),
        }
        cached = served.join([prompt for prompt, _ in prompts.values()])
        assert cached == [count for _, count in prompts.values()]
        served.steps(3)


def test_padding_is_stored_behind_its_prompt(monkeypatch):
    # On a GPU the order in which equal places are written is not defined.
    served, texts, places = Served([tiny_model("llama")]), [drawn(20, 0), drawn(23, 1)], []
    read = SlotCache.read_prompts
    monkeypatch.setattr(
        SlotCache,
        "read_prompts",
        lambda cache, rows, columns, width, **more: (
            places.append(columns.tolist()),
            read(cache, rows, columns, width, **more),
        ),
    )
    with served.kernels():
        served.join(texts)
        served.leave(1)
        served.leave(0)
        served.join([[*texts[0], 5], [*texts[1], 5, 6, 7]])
    assert places == [[[20, 20, 20, *range(20)], [*range(23)]], [[21, 21, 20], [23, 24, 25]]]


def test_a_prompt_takes_the_longest_of_several_that_begin_as_it_does():
    served, text = Served([tiny_model("llama")]), drawn(40, 0)
    lengths = (20, 30, 25)
    with served.kernels():
        served.join([[*text[:length], 1] for length in lengths])
        for _ in lengths:
            served.leave(0)
        assert served.join([text]) == [30]


@pytest.mark.skipif(not MIXED, reason="the add-on is not there")
def test_adapters_share_nothing_with_one_another_or_the_base():
    base = tiny_model("llama")
    models = [base, *(adapted(base, seed) for seed in range(2))]
    model, chosen = share_parameters(base), MIXED[0].AdapterRows(CPU)
    MIXED[0].mix_adapters(model, models[1:], rows=chosen)
    served, prompt = Served(models, SlotRows(model.eval(), chosen, pad_id=0)), drawn(30, 0)
    with served.kernels():
        served.join([prompt], [1])
        served.steps(2)
        text = served.leave(0) + drawn(3, 1)
        assert served.join([text, text, text, prompt], [0, 1, 2, 1]) == [0, 32, 0, 29]
        served.steps(3)
        served.leave(0)
        served.leave(2)
        # Of the row of adapter 1 that runs, and of that of adapter 2 that has ended.
        assert served.join([text, text], [1, 2]) == [len(text) - 1] * 2


def kept_by(served):
    """Numbers of tokens of what is kept; each has storage of its own, of no more."""
    sequences = served.rows._prefixes._sequences
    for sequence in sequences:
        for keys, values in sequence.layers.values():
            assert keys.shape[1] == values.shape[1] == len(sequence.tokens)
            assert keys.untyped_storage().nbytes() == keys.nbytes
    return [len(sequence.tokens) for sequence in sequences]


# Two layers of keys and values of 32 numbers of 4 bytes each.
TOKEN_BYTES = {"opt": 2 * 2 * 32 * 4, "llama": 2 * 2 * 16 * 4}


@pytest.mark.parametrize("kind", TOKEN_BYTES)
@pytest.mark.parametrize("bound", ["KEPT_TOKENS", "KEPT_BYTES"])
def test_what_is_kept_is_bounded_and_the_least_recently_used_go(monkeypatch, kind, bound):
    most = 60 if bound == "KEPT_TOKENS" else 61 * TOKEN_BYTES[kind] - 1
    monkeypatch.setattr(f"dschat_lora.generation.prefix_cache.{bound}", most)
    served, texts = Served([tiny_model(kind)]), [drawn(20, n) for n in range(4)]

    def ask(number):
        (cached,) = served.join([texts[number]])
        served.leave(0)
        kept = kept_by(served)
        assert sum(kept) <= 60
        return cached

    with served.kernels():
        assert [ask(number) for number in (0, 1, 2)] == [0, 0, 0]
        assert kept_by(served) == [20, 20, 20]
        assert [ask(number) for number in (0, 3, 0, 1)] == [19, 0, 19, 0]


def test_of_a_longer_text_the_beginning_is_kept(monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.prefix_cache.KEPT_TOKENS", 20)
    served, text = Served([tiny_model("llama")]), drawn(30, 0)
    with served.kernels():
        for cached in (0, 20):
            assert served.join([text]) == [cached]
            served.steps(2)
            served.leave(0)
            assert kept_by(served) == [20]


def test_nothing_is_copied_that_is_not_kept(monkeypatch):
    served, text, copied = Served([tiny_model("llama")]), drawn(30, 0), []
    copy_of = SlotCache.copy_of
    monkeypatch.setattr(
        SlotCache, "copy_of", lambda *args: copied.append(args[2]) or copy_of(*args)
    )
    with served.kernels():
        for prompt in (text[: MIN_PREFIX - 1], text, text[:20], text):
            served.join([prompt])
            served.leave(0)
    assert copied == [30]


def test_a_switch_turns_it_off():
    model, prompt = tiny_model("llama"), drawn(20, 0)
    served = Served([model], SlotRows(model, pad_id=0, prefix_cache=False))
    with served.kernels():
        for _ in range(2):
            assert served.join([prompt]) == [0]
            served.leave(0)


def test_a_turn_takes_the_place_of_the_one_before_it():
    served = Served([tiny_model("llama")])
    with served.kernels():
        served.join([drawn(20, 0)])
        served.steps(2)
        text = served.leave(0)
        served.join([text])
        served.leave(0)
        served.join([text[:20]])  # it is within what is kept
        served.leave(0)
    assert [sequence.tokens for sequence in served.rows._prefixes._sequences] == [text]


def test_nothing_is_kept_after_clear():
    served, prompt = Served([tiny_model("llama")]), drawn(20, 0)
    with served.kernels():
        served.join([prompt])
        served.leave(0)
        served.rows.clear()
        assert served.join([prompt]) == [0]


def stretched_model(kind):
    """A model whose keys depend on the length of the whole text."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
        rope["original_max_position_embeddings"] = 28
    longest = 28 if kind == "dynamic" else 64
    return tiny_model("llama", rope_parameters=rope, max_position_embeddings=longest)


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "lfm2", "qwen3_5_text"])
def test_states_and_keys_that_change_with_the_length_are_computed_anew(kind):
    stretched = kind in ("longrope", "dynamic")
    model = stretched_model(kind) if stretched else unusual_model(kind)
    rows, prompt = SlotRows(model, pad_id=0), drawn(24, 0)
    plain = stretched_model(kind) if stretched else unusual_model(kind)
    with torch.inference_mode(), rows.kernels():
        rows.join([prompt], [0])
        rows.leave(0)
        longer = prompt + drawn(9, 1)
        logits, cached = rows.join([longer], [0])
    assert cached == [0]
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([longer]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-4)
