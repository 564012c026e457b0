"""Training on rows with pictures, against plain loops in stock transformers and PEFT."""

import json
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from addons.images.training import EXACT, PICTURES, Seeing, pair_row, sample_row, train_steps
from addons.images.vlms import SEEING, spread
from dschat_lora.checkpoint.adapter import read_adapter
from dschat_lora.config.stages import DpoConfig, PairConfig
from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.data.media import FIRST_ID
from dschat_lora.generation.greedy import greedy_decode
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.models.backbone import Backbone
from dschat_lora.models.causal_lm import CausalLMLogprobs, CausalLMLoss
from dschat_lora.supervised.batching import resolve_pair_layout
from dschat_lora.supervised.evaluation import first_sequences, token_losses
from dschat_lora.supervised.objectives import causal_lm_loss
from dschat_lora.supervised.pair_objectives import answer_logprobs, dpo_objective

NAMES = list(PICTURES)
# Of each step: rows of a batch, with one, several and no picture.
BATCHES = (
    (("one", "several"), ("none", "like")),
    (("several",), ("none",), ("another",)),
    (("none",), ("one",)),
)
# Of layouts of pairs by default: masks within a picture, positions by a grid, a recurrence.
SOME = {("gemma3", "shared"), ("qwen3_vl", "separate"), ("qwen3_5", "alone")}
FEW = spread("gemma3", "qwen3_vl")


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    """The tiny model of a type, made once."""
    return cache(lambda kind: Seeing(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture
def seeing(request, homes):
    return homes(request.param)


def factors_of(model):
    return {name: p.detach() for name, p in adapter_parameters(model).items()}


def trained(seeing, theirs, losses):
    """Losses and factors of a stock model after a step for each of the losses."""
    losses = train_steps(theirs.parameters(), losses)
    theirs.save_pretrained(seeing.folder / "theirs")
    return SimpleNamespace(losses=losses, factors=read_adapter(seeing.folder / "theirs").tensors)


def compare(model, losses, wanted):
    torch.testing.assert_close(losses, wanted.losses, rtol=0, atol=EXACT)
    torch.testing.assert_close(factors_of(model), wanted.factors, rtol=0, atol=EXACT)


@pytest.mark.parametrize("seeing", spread(*SEEING, smoke=("gemma3", "qwen3_vl")), indirect=True)
def test_sft_is_that_of_stock_transformers_and_peft(seeing):
    samples = dict(zip(NAMES, seeing.data(map(sample_row, NAMES)), strict=True))
    model = seeing.ours()
    theirs = seeing.stock(seeing.write(model))
    network = CausalLMLoss(model)

    def our_loss(rows):
        batch = SampleCollator(1)([[samples[name] for name in row] for row in rows])
        return causal_lm_loss(network, batch).total / batch.num_targets

    def plain_loss(rows):
        conversations = [(sample_row(n)["messages"], PICTURES[n]) for n in sum(rows, ())]
        return -torch.cat([seeing.logprobs(theirs, *each) for each in conversations]).mean()

    ours = train_steps(network.parameters(), map(partial(partial, our_loss), BATCHES))
    wanted = trained(seeing, theirs, map(partial(partial, plain_loss), BATCHES))
    compare(model, ours, wanted)


def both_logprobs(seeing, model, rows):
    """(2 P,) log-probabilities of the answers of the pairs of rows, one at a time, by stock."""
    names = sum(rows, ())
    pairs = {name: pair_row(name) for name in names}
    return torch.stack(
        [
            seeing.logprobs(model, pairs[name]["prompt"] + pairs[name][side], PICTURES[name]).sum()
            for side in ("chosen", "rejected")
            for name in names
        ]
    )


@pytest.fixture(scope="module")
def dpo_of(homes):
    """Three steps of DPO in stock transformers and PEFT, by the type."""
    return cache(lambda kind: three_steps(homes(kind)))


@pytest.fixture
def plain_dpo(seeing, dpo_of):
    """Pairs, and three steps of DPO on them in stock transformers and PEFT."""
    wanted = dpo_of(seeing.kind)
    pairs = dict(zip(NAMES, seeing.data(map(pair_row, NAMES), "pairs"), strict=True))
    return SimpleNamespace(pairs=pairs, **vars(wanted))


def three_steps(seeing):
    seeing.data(map(pair_row, NAMES), "pairs")
    theirs = seeing.stock(seeing.write(seeing.ours()))
    with torch.no_grad():
        reference = [both_logprobs(seeing, theirs, rows) for rows in BATCHES]

    def loss(rows, reference):
        chosen, rejected = (both_logprobs(seeing, theirs, rows) - reference).chunk(2)
        return -F.logsigmoid(0.5 * (chosen - rejected)).mean()

    result = trained(seeing, theirs, map(partial(partial, loss), BATCHES, reference))
    return SimpleNamespace(reference=reference, **vars(result))


@pytest.mark.parametrize(
    ("seeing", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in SOME else pytest.mark.thorough)
        for kind in SEEING
        for layout in ("shared", "separate", "alone")
    ],
    indirect=["seeing"],
)
def test_dpo_is_that_of_stock_transformers_and_peft(seeing, plain_dpo, layout):
    model = seeing.ours()
    network = CausalLMLogprobs(model)
    rows_of = [[[n] for n in sum(rows, ())] if layout == "alone" else rows for rows in BATCHES]
    batches = [
        PairCollator(1, layout)([[plain_dpo.pairs[name] for name in row] for row in rows])
        for rows in rows_of
    ]
    with torch.no_grad():
        known = [answer_logprobs(network, batch) for batch in batches]
    torch.testing.assert_close(known, plain_dpo.reference, rtol=1e-6, atol=EXACT)

    def loss(batch, reference):
        objective = dpo_objective(DpoConfig(beta=0.5), lambda _: reference)
        return objective.loss(network, batch).total / batch.num_samples

    losses = train_steps(network.parameters(), map(partial(partial, loss), batches, known))
    compare(model, losses, plain_dpo)


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("seeing", FEW, indirect=True)
def test_rows_under_masks_have_the_log_probabilities_of_stock_transformers(
    seeing, plain_dpo, share_prompt
):
    options = ("--attn_implementation", "eager")
    pairs = dict(zip(NAMES, seeing.data(map(pair_row, NAMES), "pairs", *options), strict=True))
    network = CausalLMLogprobs(seeing.ours())
    engine = SimpleNamespace(module=network, device=torch.device("cpu"), eval=network.eval)
    said = []
    run = SimpleNamespace(
        log=SimpleNamespace(say=said.append), record=SimpleNamespace(update=lambda _: None)
    )
    layout, _ = resolve_pair_layout(
        engine,
        PairConfig(share_prompt=share_prompt),
        packing=False,
        vocab_size=len(seeing.tokenizer),
        run=run,
    )
    for rows, wanted in zip(BATCHES, plain_dpo.reference, strict=True):
        rows = [[name] for name in sum(rows, ())] if layout == "alone" else rows
        batch = PairCollator(1, layout)([[pairs[name] for name in row] for row in rows])
        with torch.no_grad():
            logprobs = answer_logprobs(network, batch)
        torch.testing.assert_close(logprobs, wanted, rtol=1e-6, atol=EXACT)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gemma4_whose_pictures_are_seen_whole_in_windows_is_that_of_stock(tmp_path, attention):
    seeing, names = Seeing("gemma4", tmp_path), ("one", "several", "none")
    file = seeing.base / "config.json"
    config = json.loads(file.read_text("utf-8"))
    config["text_config"]["use_bidirectional_attention"] = "vision"  # as in the larger models
    file.write_text(json.dumps(config), "utf-8")
    options = ("--attn_implementation", attention)
    pairs = seeing.data(map(pair_row, names), "pairs", *options)
    model = seeing.ours()
    theirs = seeing.stock(seeing.write(model))
    with torch.no_grad():
        logprobs = answer_logprobs(CausalLMLogprobs(model), PairCollator(1, "shared")([pairs]))
        wanted = both_logprobs(seeing, theirs, [names])
    torch.testing.assert_close(logprobs, wanted, rtol=1e-6, atol=EXACT)
    # What the last layer says of pictures reaches no answer.
    samples = seeing.data(map(sample_row, names), "samples", *options)
    batch = SampleCollator(1)([samples])
    rows = batch.input_ids, batch.position_ids, batch.segment_ids, None, batch.spans
    inputs = [seeing.inputs(sample_row(name)["messages"], PICTURES[name])[0] for name in names]
    with torch.no_grad():
        hidden = Backbone(model)(*rows)[0, : batch.num_tokens]
        own = [theirs.base_model.model.model(**each).last_hidden_state[0] for each in inputs]
    torch.testing.assert_close(hidden, torch.cat(own), rtol=0, atol=2 * EXACT)


@pytest.mark.parametrize("seeing", FEW, indirect=True)
def test_sample_answers_and_losses_of_tokens_are_those_of_stock_transformers(seeing):
    samples = seeing.data(map(sample_row, NAMES))
    model = seeing.ours()
    theirs = seeing.stock(seeing.write(model))
    engine = SimpleNamespace(module=SimpleNamespace(model=model), device=torch.device("cpu"))
    answers = greedy_decode(
        model,
        seeing.tokenizer,
        [sample.prompt.tolist() for sample in samples],
        eos_ids=[seeing.tokenizer.eos_token_id],
        max_new_tokens=5,
        device=engine.device,
    )
    shown = first_sequences(samples, len(samples))
    losses = token_losses(engine, shown)
    for name, answer, sequence, own in zip(NAMES, answers, shown, losses, strict=True):
        messages = sample_row(name)["messages"]
        inputs, before = seeing.inputs(messages, PICTURES[name])
        prompt = seeing.prompt_inputs(messages, PICTURES[name])
        wanted = theirs.generate(**prompt, max_new_tokens=5, do_sample=False)[0, before:].tolist()
        assert answer == wanted
        with torch.no_grad():
            logprobs = theirs(**inputs).logits[0, :-1].log_softmax(-1)
        ids = inputs["input_ids"][0, 1:]
        picture = ids == seeing.media.token_id
        told = logprobs.gather(1, ids[:, None])[:, 0]
        assert [each is None for each in own] == [True, *picture.tolist()]
        values = torch.tensor([each for each in own if each is not None])
        torch.testing.assert_close(values, -told[~picture], rtol=0, atol=EXACT)
        assert len(sequence.ids) == len(own)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_attention_by_flex_is_refused_where_tokens_of_a_picture_see_each_other(kind, tmp_path):
    seeing = Seeing(kind, tmp_path)
    seeing.data([sample_row("one")])
    model = seeing.ours()
    model.base_model._forward_pre_hooks.clear()  # as before it is attached
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=f"flex_attention: .* in {kind} models"):
        seeing.media.attach(model)


def test_streams_of_rows_with_pictures_are_refused(tmp_path):
    seeing, rows = Seeing("llava_next", tmp_path), [sample_row("none"), sample_row("one")]
    with pytest.raises(ValueError, match="--streaming supports text only"):
        seeing.data(rows, "samples", "--streaming", "--max_steps", 3)


def test_no_text_is_cut_within_a_picture(tmp_path):
    seeing, square = Seeing("gemma3", tmp_path), {"images": ["square.png"]}
    behind = [{"text": f"{'a ' * n}<image>"} | square for n in range(20, 60)]
    before = [{"text": f"<image>{'a ' * n}"} | square for n in range(20, 60)]

    def count(rows, overlong):
        samples = seeing.data(rows, "samples", "--overlong", overlong, "--max_seq_len", 40)
        runs = [[i for i in sample.input_ids.tolist() if i >= FIRST_ID] for sample in samples]
        assert {len(run) for run in runs} == {4}
        assert len(set(map(tuple, runs))) == 1
        return len(samples)

    fits = count(behind, "split")
    assert 0 < fits < 40
    # What closes a picture is text, which may be cut.
    assert fits < count(behind, "truncate") < 40
    assert count(before, "split") == fits
    assert count(before, "truncate") == 40


BY_GRID = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")


@pytest.mark.parametrize("seeing", spread("qwen2_5_vl", "qwen3_vl", of=BY_GRID), indirect=True)
def test_positions_of_packed_and_padded_rows_are_those_of_the_model(seeing):
    samples = dict(zip(NAMES, seeing.data(map(sample_row, NAMES)), strict=True))
    (hook,) = seeing.ours().base_model._forward_pre_hooks.values()
    stock = AutoModelForImageTextToText.from_pretrained(seeing.base).model
    rows = [("one", "several", "like", "none"), ("another",)]
    batch = SampleCollator(1)([[samples[name] for name in row] for row in rows])
    positions = hook._positions(
        batch.input_ids, batch.position_ids, None, hook._table(torch.device("cpu"))
    )
    for row, names in enumerate(rows):
        for number, name in enumerate(names, 1):
            inputs, _ = seeing.inputs(sample_row(name)["messages"], PICTURES[name])
            grid = inputs.get("image_grid_thw")
            own = stock.get_rope_index(
                inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=grid
            )[0]
            assert torch.equal(positions[:, row, batch.segment_ids[row] == number], own[:, 0])


@pytest.mark.parametrize(("kind", "refused"), [("gemma3", True), ("llava_next", False)])
def test_rows_are_divided_only_where_pictures_are_plain_tokens(kind, refused, tmp_path):
    seeing, options = Seeing(kind, tmp_path), ("samples", "--context_parallel_size", 2)
    if refused:
        with pytest.raises(ValueError, match="--context_parallel_size 2 .* need whole rows"):
            seeing.data([sample_row("one")], *options)
    else:
        assert seeing.data([sample_row("one")], *options)
