"""Training by processes that share a model: the losses, replicas and files of one process."""

from functools import cache

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.spread import ALL
from helpers.tiny import KINDS, VOCAB

pytestmark = pytest.mark.stage
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
STEPS = 4
OVERFLOW = 2
HALF = [("llama", "bf16"), *[("opt", "bf16")] * ALL]
# Eight rows of a step in two micro-batches, clipped at most steps.
RUN = {"accumulation": 2, "max_grad_norm": 0.3, "steps": STEPS, "packing": True}
TWO = [
    {"tensor_parallel": 2, "micro": 4},
    {"tensor_parallel": 2, "micro": 4, "sequence_parallel": True, "checkpointing": True},
]
FOUR = [
    {"tensor_parallel": 4, "micro": 4, "sequence_parallel": True},
    *({"tensor_parallel": 2, "micro": 2, "stage": stage} for stage in (0, 1)),
    *({"tensor_parallel": 2, "micro": 2, "stage": s, "sequence_parallel": True} for s in (2, 3)),
]


def reports(ranks, size, path, layouts, **common):
    """Of each layout the reports of every rank."""
    runs = [{**RUN, "path": path, **common, **layout} for layout in layouts]
    return list(zip(*ranks(size).run("helpers.runs:train_many", runs=runs), strict=True))


@pytest.fixture(scope="module")
def runs(ranks, model_directory):
    """``runs(kind, dtype)``: (report of one process, those of every rank), of each layout."""

    @cache
    def of(kind, dtype="fp32"):
        path, compared = model_directory(kind), []
        layouts = [(2, TWO if dtype == "fp32" else TWO[1:], STEPS if kind == "opt" else 2)]
        layouts += [(4, FOUR, 2)] * (ALL and (kind, dtype) == ("opt", "fp32"))
        for size, some, steps in layouts:
            options = {"dtype": dtype, "steps": steps}
            ((one,),) = reports(ranks, 1, path, [{"micro": 4}], **options)
            compared += [(one, each) for each in reports(ranks, size, path, some, **options)]
        return compared

    return of


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "fp32") for kind in (KINDS if ALL else KINDS[:1])), *HALF]
)
def test_ranks_agree_to_the_bit_and_losses_norms_and_adapters_are_those_of_one_process(
    runs, kind, dtype
):
    atol = TOLERANCE[dtype]
    for one, (first, *others) in runs(kind, dtype):
        assert [report["unlike"] for report in (first, *others)] == [[]] * (1 + len(others))
        for other in others:
            assert (other["losses"], other["norms"]) == (first["losses"], first["norms"])
        assert max(one["losses"]) - min(one["losses"]) > 10 * TOLERANCE["fp32"]
        assert first["losses"] == pytest.approx(one["losses"], abs=atol)
        assert first["norms"] == pytest.approx(one["norms"], abs=2 * atol)
        assert first["base_changed"] == []
        for name, expected in one["trained"].items():
            value = first["trained"][name]
            torch.testing.assert_close(value, expected, rtol=0.0, atol=3 * atol)


def test_clipping_changes_the_runs_that_are_compared(runs):
    for one, _ in runs("opt"):
        assert sum(norm > RUN["max_grad_norm"] for norm in one["norms"]) >= 2


@pytest.mark.thorough
def test_infinite_gradient_on_one_rank_is_skipped_by_all_that_share_the_model(
    ranks, model_directory
):
    run = {"dtype": "fp16", "overflow_at": OVERFLOW, "steps": OVERFLOW + 3}
    path = model_directory("opt")
    ((one,),) = reports(ranks, 1, path, [{"micro": 4}], **run)
    for every in reports(ranks, 2, path, TWO[:1], **run):
        for report in every:
            assert [n for n, skipped in enumerate(report["skipped"]) if skipped] == [OVERFLOW]
            assert report["scales"] == one["scales"]
        assert every[0]["losses"] == pytest.approx(one["losses"], abs=1e-2)


# tensor-parallel size and ZeRO stage of four processes, or of two
LAYOUTS = [(1, 1), (2, 3), (4, 0)] if ALL else [(1, 1), (2, 0)]
HANDED = [(writer, reader) for writer, _ in LAYOUTS for reader, _ in LAYOUTS]
handed = pytest.mark.parametrize(("writer", "reader"), HANDED)


@pytest.fixture(scope="module")
def carried(ranks, model_directory, tmp_path_factory):
    directory = tmp_path_factory.mktemp("carried")
    for size, _ in LAYOUTS:
        (directory / f"{size}").mkdir()
    result = ranks(LAYOUTS[-1][0]).run(
        "helpers.tensor_parallel_runs:carry_on",
        path=model_directory("gpt2"),  # packed q, k, v
        directory=str(directory),
        layouts=LAYOUTS,
        handed=HANDED,
    )[0]
    return result, directory


@handed
def test_state_saved_at_one_degree_is_bit_identical_at_another_and_trains_on(
    carried, writer, reader
):
    result, _ = carried
    (tensors, next_loss), (read, loss) = result["saved"][writer], result["loaded"][writer, reader]
    assert {name.partition(":")[0] for name in tensors} == {"weight", "exp_avg", "exp_avg_sq"}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name
    assert loss == pytest.approx(next_loss, abs=1e-5)


@handed
def test_adapter_saved_at_one_degree_is_bit_identical_at_another(carried, writer, reader):
    result, directory = carried
    file = load_file(directory / f"{writer}" / "adapter" / "adapter_model.safetensors")
    trained = {n.partition(":")[2]: t for n, t in result["saved"][writer][0].items()}
    read = result["adapters"][writer, reader]
    assert len(file) == len(read)
    for name, tensor in read.items():
        assert torch.equal(file[f"base_model.model.{name}.weight"], tensor), name
    assert read.keys() == trained.keys()


THEIRS = {
    "opt": {"target_modules": ["q_proj", "fc2"], "bias": "lora_only"},
    "opt embeddings": {"target_modules": ["embed_tokens", "v_proj", "out_proj"]},
    "gpt2": {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
    "llama": {"target_modules": ["lm_head", "k_proj", "gate_proj", "down_proj"]},
    "neox": {"target_modules": ["query_key_value", "dense"], "use_rslora": True},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama", "neox"] if ALL else ["opt", "gpt2"])
def test_adapters_of_stock_peft_come_and_go_through_a_shared_model(
    ranks, model_directory, tmp_path, kind
):
    path, ids, pairs, expected = model_directory(kind), [[5, 9, 3, 44, 60, 7, 11, 2]], [], []
    for name, options in THEIRS.items():
        if not name.startswith(kind):
            continue
        base = AutoModelForCausalLM.from_pretrained(path)
        config = peft.LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **options)
        theirs = peft.get_peft_model(base, config).eval()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            expected.append(theirs(input_ids=torch.tensor(ids)).logits)
        theirs.save_pretrained(tmp_path / name)
        pairs.append((str(tmp_path / name), str(tmp_path / f"{name} again")))
    for ours in ranks(2).run(
        "helpers.tensor_parallel_runs:through", path=path, pairs=pairs, ids=ids
    ):
        for logits, wanted in zip(ours, expected, strict=True):
            assert logits.shape[-1] == VOCAB
            torch.testing.assert_close(logits, wanted, rtol=0.0, atol=1e-5)
    for (_, written), wanted in zip(pairs, expected, strict=True):
        base = AutoModelForCausalLM.from_pretrained(path)
        again = peft.PeftModel.from_pretrained(base, written).eval()
        with torch.no_grad():
            logits = again(input_ids=torch.tensor(ids)).logits
        torch.testing.assert_close(logits, wanted, rtol=0.0, atol=1e-5)


def test_fingerprints_do_not_depend_on_how_the_model_is_shared(ranks, model_directory):
    for kind in ("gpt2", "llama"):
        hashes = ranks(2).run(
            "helpers.tensor_parallel_runs:fingerprints", path=model_directory(kind), sizes=[1, 2]
        )[0]
        assert hashes[0] == hashes[1]


def test_merged_model_of_a_shared_one_is_that_of_one_process(ranks, model_directory, tmp_path):
    run = {"path": model_directory("gpt2"), "steps": 3}
    for size in (1, 2):
        share = {"tensor_parallel": size, "save_merged_to": str(tmp_path / f"{size}")}
        ranks(size).run("helpers.runs:train", **run, **share)
    one, two = (load_file(tmp_path / f"{size}" / "model.safetensors") for size in (1, 2))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0.0, atol=1e-6)
