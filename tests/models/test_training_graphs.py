"""Passes that are replayed on padded micro-batches give what each gives as it is."""

import warnings
from functools import partial

import pytest
import torch

from dschat_lora.algos.segments import make_spans
from dschat_lora.config.groups import LoraConfig
from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.lora.casts import FactorCasts
from dschat_lora.models import attention, training_graphs
from dschat_lora.models.blocks import recompute_blocks
from dschat_lora.models.causal_lm import CausalLMLogprobs, CausalLMLoss, Policy
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.models.training_graphs import Shape, shape_of
from dschat_lora.rl.response.batch import collate
from dschat_lora.rl.response.response import Response
from helpers.iterations import ragged_responses
from helpers.pairs import ragged_pairs
from helpers.recorded import record, recordable
from helpers.spread import ALL
from helpers.tiny import ragged_samples, tiny_model, trained

SIZES = {n: v for n, v in vars(training_graphs).items() if isinstance(v, int)}  # of a run


@pytest.fixture(autouse=True)
def on_gpu():
    """Every device has the kernel."""
    with recordable():
        yield


def adapted(model, **options):
    return trained(model.requires_grad_(False), LoraConfig(lora_dim=3, **options))


def text_loss(network, batch):
    return network(
        batch.input_ids,
        batch.position_ids,
        batch.segment_ids,
        batch.logit_positions,
        batch.target_ids,
        batch.spans,
    )


def texts(packed):
    """Micro-batches of rows of one sample, or several, of changing lengths."""
    samples, size = ragged_samples(24, longest=9), 2 if packed else 1
    rows = [samples[i : i + size] for i in range(0, len(samples), size)]
    return [SampleCollator(0)(rows[i : i + 2]) for i in range(0, len(rows), 2)]


def pair_batches():
    pairs = [each.sample() for each in ragged_pairs(12, longest=5)]
    return [PairCollator(0, "shared")([pairs[i : i + 2]]) for i in range(0, 12, 2)]


def pair_loss(network, batch, *, places="logit_positions", targets=("target_ids",)):
    ours = network(
        batch.input_ids,
        batch.position_ids,
        batch.segment_ids,
        batch.branch_ids,
        getattr(batch, places),
        *(getattr(batch, name) for name in targets),
        spans=batch.spans,
    )
    return torch.nn.functional.softplus((ours * torch.linspace(-1, 2, len(ours))).sum())


def responses():
    drawn = [Response(tuple(p), tuple(t), True, g) for p, t, g in ragged_responses(12, seed=2)]
    return [collate(drawn, range(i, i + 2), pad_id=0) for i in range(0, 12, 2)]


def policy_loss(network, batch):
    inputs = *batch.inputs, batch.logit_positions, batch.target_ids
    logprobs, _ = network(*inputs, 0.7, batch.spans)
    weights = torch.linspace(-1.0, 2.0, len(logprobs))
    return -(weights * torch.exp(logprobs / 3).clamp(0.5, 1.2)).sum()


def scorer(kind):
    return RewardModel(adapted(tiny_model(kind, num_labels=1), modules_to_save=("score",)))


CASES = {
    "texts": (lambda kind: CausalLMLoss(adapted(tiny_model(kind))), text_loss, partial(texts, 0)),
    "packed": (lambda kind: CausalLMLoss(adapted(tiny_model(kind))), text_loss, partial(texts, 1)),
    "pairs": (lambda kind: CausalLMLogprobs(adapted(tiny_model(kind))), pair_loss, pair_batches),
    "rewards": (scorer, partial(pair_loss, places="ends", targets=()), pair_batches),
    "policy": (lambda kind: Policy(adapted(tiny_model(kind))), policy_loss, responses),
}


def train(network, loss_of, batches, *, accumulation=2, times=2):
    """Losses, gradient norms and weights of steps over all micro-batches, ``times`` over."""
    network.train()
    trained = [p for p in network.parameters() if p.requires_grad]
    losses, norms = [], []
    for _ in range(times):
        for number, batch in enumerate(batches, 1):
            loss = loss_of(network, batch)
            loss.backward()
            losses.append(loss.detach())
            if number % accumulation == 0:
                norms.append(torch.nn.utils.clip_grad_norm_(trained, 0.01))
                with torch.no_grad():
                    for parameter in trained:
                        parameter -= parameter.grad
                        parameter.grad = None
    return torch.stack(losses), torch.stack(norms), [p.detach().clone() for p in trained]


def both(make, loss_of, batches, **options):
    """What :func:`train` gives with every operation launched, and with graphs; and these.

    In double precision: steps make more of the last digits of losses that these models have.
    """
    plain = train(make().double(), loss_of, batches, **options)
    network = make().double()
    (recorder,) = record(network)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = train(network, loss_of, batches, **options)
    return plain, ours, recorder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ("llama", "opt", "qwen3") if ALL else ("llama",))
def test_steps_are_those_without_graphs(kind, case):
    make, loss_of, batches = CASES[case]
    plain, ours, recorder = both(partial(make, kind), loss_of, batches())
    torch.testing.assert_close(ours, plain)
    assert len(recorder.tapes) >= 4  # two shapes or more, of which each has two passes


def graphed(network, by=None):
    """The network in training, whose passes are recorded on a CPU, and what records them."""
    return network.train(), *record(network, by=by)


def gradients(network):
    ours = {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
    network.zero_grad()
    return ours


def of(network, batch):
    """The gradients of one micro-batch."""
    text_loss(network, batch).backward()
    return gradients(network)


@pytest.mark.parametrize("layers", [False, True], ids=["kept", "recomputed"])
def test_recomputed_blocks_are_recorded(layers):
    def make():
        network = CausalLMLoss(adapted(tiny_model("llama")))
        if layers:
            recompute_blocks(network.model)
        return network

    plain, ours, recorder = both(make, text_loss, texts(packed=True))
    torch.testing.assert_close(ours, plain)
    # A backward pass that computes blocks again has the operations of both.
    forward, backward = (len(tape.operations) for tape in recorder.tapes[:2])
    assert (backward > 2 * forward) is layers


@pytest.mark.parametrize("shares", [False, True], ids=["alone", "of one input"])
def test_factors_that_changed_are_read_anew(monkeypatch, shares):
    """16-bit weights compute with copies of fp32 factors, which each step makes."""
    monkeypatch.setattr("dschat_lora.lora.shared_input.runs_kernels", lambda device: shares)
    batch = SampleCollator(0)([[each] for each in ragged_samples(2, longest=9)])
    whole = [CausalLMLoss(adapted(tiny_model("llama").bfloat16())).train() for _ in range(2)]
    _, recorder = graphed(whole[0])
    casts = [FactorCasts(each) for each in whole]
    for step in range(4):
        ours = []
        for network, own in zip(whole, casts, strict=True):
            with own.in_use():
                ours.append(of(network, batch))
            with torch.no_grad():
                for name, parameter in network.named_parameters():
                    if "lora_" in name:
                        parameter.add_(0.1 * (step + 1))
        torch.testing.assert_close(*ours, rtol=2e-2, atol=2e-2)
    assert len(recorder.tapes) == 2


def test_copies_elsewhere_are_recorded_anew():
    batch = texts(packed=False)[0]
    network, recorder = graphed(CausalLMLoss(adapted(tiny_model("llama").bfloat16())))
    for tapes in (2, 4):
        casts = FactorCasts(network)
        with casts.in_use():
            ours = [of(network, batch) for _ in range(3)]
        torch.testing.assert_close(ours[2], ours[1])
        assert len(recorder.tapes) == tapes


def test_weights_that_moved_are_not_read_where_they_were():
    batch = texts(packed=False)[0]
    network, recorder = graphed(CausalLMLoss(adapted(tiny_model("llama"))).double())
    expected, *_ = (of(network, batch) for _ in range(3))
    weight = network.model.model.layers[0].mlp.down_proj.weight
    before = weight.data
    weight.data = weight.data.clone()
    before.fill_(torch.nan)
    for _ in range(3):
        torch.testing.assert_close(of(network, batch), expected)
    assert len(recorder.tapes) == 4


def test_a_pass_before_the_last_ones_backward_pass_runs_as_it_is():
    first, second = texts(packed=False)[2:4]
    network, recorder = graphed(CausalLMLoss(adapted(tiny_model("llama"))).double())
    expected = [of(network, batch) for batch in (first, second)]
    of(network, first)  # is recorded
    losses = [text_loss(network, batch) for batch in (first, second)]
    assert len(recorder.tapes) == 2
    for loss, each in zip(losses, expected, strict=True):
        loss.backward()
        torch.testing.assert_close(gradients(network), each)
    # One whose result is gone is not waited for.
    text_loss(network, first)
    calls = []
    network.backbone.graphs._passes[next(iter(network.backbone.graphs._passes))].forward = lambda: (
        calls.append(0) or recorder.tapes[0]()
    )
    torch.testing.assert_close(of(network, first), expected[0])
    assert calls == [0]


def test_gradients_of_other_passes_are_added_up_with_those_of_graphs():
    first, other = texts(packed=False)[2], texts(packed=False)[7]
    plain = CausalLMLoss(adapted(tiny_model("llama"))).double().train()
    network, recorder = graphed(CausalLMLoss(adapted(tiny_model("llama"))).double())
    of(network, first), of(network, first)
    # The other is of a shape that comes once.
    for batches in ((other, first, first), (first,)):
        for each in (plain, network):
            for batch in batches:
                text_loss(each, batch).backward()
        torch.testing.assert_close(gradients(network), gradients(plain))
    assert len(recorder.tapes) == 2


def test_a_pass_is_differentiated_once():
    batch = texts(packed=False)[0]
    network, _ = graphed(CausalLMLoss(adapted(tiny_model("llama"))))
    of(network, batch)
    loss = text_loss(network, batch)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        loss.backward()


def test_without_gradients_or_in_evaluation_nothing_is_recorded():
    batch = texts(packed=False)[0]
    network, recorder = graphed(CausalLMLoss(adapted(tiny_model("llama"))))
    with torch.no_grad():
        text_loss(network, batch), text_loss(network, batch)
    network.eval()
    of(network, batch), of(network, batch)
    assert recorder.tapes == []


def test_what_cannot_be_recorded_runs_as_it_is_and_is_said_once():
    def refuse(step):
        raise RuntimeError("no room for a graph\nand more")

    network, _ = graphed(CausalLMLoss(adapted(tiny_model("llama"))), refuse)
    batch = texts(packed=False)[0]
    expected = of(network, batch)
    with pytest.warns(UserWarning, match="CUDA graphs") as told:
        ours = [of(network, batch) for _ in range(3)]
    assert [str(each.message) for each in told] == [
        "training without CUDA graphs, more slowly: no room for a graph"
    ]
    for each in ours:
        torch.testing.assert_close(each, expected)


def test_layers_that_read_lengths_on_the_host_are_not_recorded(monkeypatch):
    monkeypatch.setattr(attention, "varlen_takes", lambda *of: False)
    network, recorder = graphed(CausalLMLoss(adapted(tiny_model("llama"))))
    batch = texts(packed=False)[0]
    expected = of(network, batch)
    with pytest.warns(UserWarning, match="a layer reads the lengths of sequences on the host"):
        torch.testing.assert_close(of(network, batch), expected)
    assert recorder.tapes == []


def test_shapes_beyond_the_most_run_as_they_are(monkeypatch):
    monkeypatch.setattr(training_graphs, "MOST_SHAPES", 1)
    plain, ours, recorder = both(
        lambda: CausalLMLoss(adapted(tiny_model("llama"))), text_loss, texts(packed=False)
    )
    torch.testing.assert_close(ours, plain)
    assert len(recorder.tapes) == 2


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        # 16 parts of 2,048; the padding is a sequence too
        ([512] * 4, Shape(2048, 0, 8, 512)),
        ([500] * 4, Shape(2048, 0, 8, 512)),
        ([300] * 4, Shape(1280, 0, 8, 512)),
        ([600] * 8, Shape(5120, 0, 16, 1024)),
        ([3], Shape(64, 0, 8, 512)),
    ],
)
def test_shapes_are_few(monkeypatch, lengths, expected):
    for name, value in SIZES.items():
        monkeypatch.setattr(training_graphs, name, value)
    spans = make_spans([[(n,) for n in lengths]], sum(lengths))
    assert shape_of(spans, sum(lengths)) == expected
