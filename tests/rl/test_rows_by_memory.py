"""How many responses a device decodes at a time: by its memory, of which no text depends."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dschat_lora.config.options import parse_config
from dschat_lora.data.samples import PromptSample
from dschat_lora.generation.generate import Decoder
from dschat_lora.generation.sampling import Sampling
from dschat_lora.perf.cards import USABLE
from dschat_lora.rl.draw.generator import Generator
from dschat_lora.rl.draw.own_engine import OwnEngine
from dschat_lora.rl.loop import memory
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.response.errors import FullWhileDecodingError
from dschat_lora.runtime.memory import MemoryPlan
from helpers.addons import of_addon
from helpers.roles import config_of
from helpers.spread import ALL
from helpers.tiny import adapted, tiny_model

# Of 8 rows of 128 columns, in fp32: keys and values of both layers, 32 numbers each.
EIGHT = 8 * 128 * 2 * 2 * 32 * 4
LENGTHS = {"max_prompt_seq_len": 40, "max_answer_seq_len": 30}
PROMPTS = [PromptSample(torch.arange(3, 6 + n % 5), b"") for n in range(16)]


def options(**batch):
    sizes = {"per_device_generation_batch_size": 16, "generation_batches": 4, "num_generations": 4}
    return config_of(batch=sizes | batch, data=LENGTHS)


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(memory, "device_type", lambda: "cuda")
    monkeypatch.setattr(memory, "passes_bytes", lambda *_, rows: 0)
    monkeypatch.setattr(memory, "_reading_bytes", lambda *_, **__: 0)
    monkeypatch.setattr(memory, "READ_ROWS", 0)


def chosen(config, *, eights, passes=None):
    """Rows decoded at a time, and the plan, where so many times 8 rows fit beside the weights."""
    model, weights = tiny_model("opt"), 10 * EIGHT
    plan = MemoryPlan(weights, weights, EIGHT, 0, 3 * EIGHT + memory.cache_bytes(config, model))
    free = int((14 + eights) * EIGHT / USABLE) + 1
    return memory.decoding_by_memory(config, plan, model, free=free)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("eights", "rows"), [(3.5, 24), (1, 8), (8, 64), (99, 64), (0.5, 4)])
def test_as_many_rows_are_decoded_as_fit_beside_all_else(eights, rows):
    config, plan = chosen(options(), eights=eights)
    assert config.batch.rows_decoded == rows
    assert plan.cache == (3 + -(-rows // 8)) * EIGHT
    assert (config.batch.responses, config.batch.per_device_generation_batch_size) == (64, 16)


@pytest.mark.usefixtures("on_gpu")
def test_rows_are_whole_groups_and_the_fullest_rank_decides(monkeypatch):
    few = options(num_generations=16)
    assert chosen(few, eights=5)[0].batch.rows_decoded == 32
    monkeypatch.setattr(memory, "max_over_ranks", lambda value: max(value, -1.0))
    assert chosen(few, eights=5)[0].batch.rows_decoded == 16


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ({"max_num_seqs": 12}, 12),
        *[({"rollout_engine": "vllm"}, 16)] * bool(of_addon("engines.addon")),
    ],
)
def test_numbers_shares_of_batches_and_other_engines_stay_as_they_are(batch, rows):
    config, plan = chosen(options(**batch), eights=8)
    assert config.batch.rows_decoded == rows
    assert plan.cache == 3 * EIGHT + memory.cache_bytes(config, tiny_model("opt"))


def test_a_cpu_decodes_a_batch_at_a_time():
    assert chosen(options(), eights=8)[0] == options()


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("share", "rows"), [(0.9, 64), (1.1, 56)])
def test_passes_over_prompts_have_half_of_what_estimates_leave(monkeypatch, share, rows):
    room = (14 + 8) * EIGHT / USABLE * (1 - USABLE) / 2
    monkeypatch.setattr(memory, "passes_bytes", lambda *_, rows: share * room)
    assert chosen(options(), eights=8)[0].batch.rows_decoded == rows


@pytest.mark.usefixtures("on_gpu")
def test_recorded_passes_over_prompts_take_the_room_of_rows_that_are_refilled(monkeypatch):
    each = 2 * EIGHT / (8 * 40 * 128)  # bytes of a pair, so that 8 prompts of 40 take as 16 rows
    monkeypatch.setattr(
        memory, "_reading_bytes", lambda *_, tokens, columns: each * tokens * columns
    )
    asked = replace(options(), eval_prompts=0)
    assert chosen(asked, eights=5)[0].batch.rows_decoded == 24
    assert chosen(asked, eights=8)[0].batch.rows_decoded == 64, "none is refilled"


def test_rows_by_memory_may_be_asked_for():
    assert parse_config(RlhfConfig, ["--max_num_seqs", "auto"]).batch.max_num_seqs == "auto"


def engine_of(config, said=None):
    model = adapted(tiny_model("llama"), 0)
    site = SimpleNamespace(
        config=config,
        run=SimpleNamespace(log=SimpleNamespace(say=said.append if said is not None else print)),
        trained=SimpleNamespace(device=torch.device("cpu"), zero_stage=0),
        rollout=model,
        sharded=model,
        ends=frozenset([2]),
        pad_id=0,
        plan=None,
        unpacked=None,
    )
    return OwnEngine(site)


def responses(engine):
    generate = Generator(engine, eos_ids=[2], batch_size=16)
    return generate(PROMPTS, Sampling(30), num_generations=4, key=("x",), keep_logprobs=True)


def same(drawn, expected):
    assert [each.tokens for each in drawn] == [each.tokens for each in expected]
    for ours, theirs in zip(drawn, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_texts_and_logprobs_do_not_depend_on_the_rows_decoded():
    whole = responses(engine_of(options(max_num_seqs=64)))
    for rows in (4, 16) if ALL else (4,):
        same(responses(engine_of(options(max_num_seqs=rows))), whole)


def by_memory(rows):
    config = options()
    return replace(config, batch=replace(config.batch, rows_that_fit=rows))


def full_above(monkeypatch, most):
    """A GPU on which no decoder has room for more than so many rows."""
    decode, asked = Decoder.__call__, []

    def call(self, *args, **more):
        asked.append(self._largest[0])
        if asked[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(self, *args, **more)

    monkeypatch.setattr(Decoder, "__call__", call)
    return asked


@pytest.mark.usefixtures("one_rank")
def test_where_rows_do_not_fit_half_of_them_decode_and_the_texts_are_the_same(monkeypatch):
    expected, said = responses(engine_of(options(max_num_seqs=64))), []
    engine, asked = engine_of(by_memory(64), said), full_above(monkeypatch, 32)
    same(responses(engine), expected)
    assert said == [
        "  note         a GPU ran out of memory with 64 responses decoded at a time; from here on "
        "it decodes 32, which does not change the results"
    ]
    responses(engine)
    assert asked == [64, 32, 32]


@pytest.mark.parametrize(("config", "asked"), [(by_memory(64), [64, 32]), (options(), [16])])
def test_a_rollout_is_tried_once_more_and_a_number_never(monkeypatch, config, asked):
    rows = full_above(monkeypatch, 8)
    with pytest.raises(FullWhileDecodingError):
        responses(engine_of(config))
    assert rows == asked


@pytest.mark.usefixtures("one_rank")
def test_ranks_decode_as_few_as_the_one_that_was_full(monkeypatch):
    monkeypatch.setattr("dschat_lora.rl.draw.own_engine.max_over_ranks", lambda value: -16.0)
    said = []
    engine, asked = engine_of(by_memory(64), said), full_above(monkeypatch, 64)
    responses(engine)
    responses(engine)
    assert asked == [64, 16]
    assert len(said) == 1
