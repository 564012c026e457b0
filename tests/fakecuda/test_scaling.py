"""Bytes of collectives counted on a fake GPU, against benchmarks/common/exchanges.py."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.common.exchanges import data_exchanges, experience_exchanges, tensor_exchanges
from benchmarks.common.shapes import SHAPES
from benchmarks.scaling import adapted, size_of

pytestmark = pytest.mark.stage

FEW = 2000  # bytes: losses, norms and requests of a step


def size(shape, layers=None):
    options = replace(SHAPES[shape], lora_dim=16)
    options = replace(options, num_layers=layers or options.num_layers)
    return size_of(adapted(options), options)


def by_kind(exchanges):
    """{(kind, ranks): bytes}."""
    noted = Counter()
    for each in exchanges:
        noted[each.kind, each.ranks] += each.bytes
    return noted


def counted(found):
    return {(kind, ranks): count for kind, ranks, _, count in found["moved"]}


def check(found, exchanges, *, rel=1e-9):
    expected = by_kind(exchanges)
    for key, count in counted(found).items():
        assert count == pytest.approx(expected[key], rel=rel, abs=FEW), key
    assert expected.keys() <= counted(found).keys()


def check_exchanges(found, shape, *, ranks, zero_stage, layers=None, tensor=1, **options):
    """Against the formulas, whose ``options`` these are, on 4 rows of 512 tokens."""
    model = size(shape, layers)
    part = replace(model, trained=model.trained_on(tensor)) if tensor > 1 else model
    data = data_exchanges(part, ranks=ranks // tensor, zero_stage=zero_stage, **options)
    inside = tensor_exchanges(model, ranks=tensor, positions=2048, targets=1024, **options)
    check(found, [*data, *inside], rel=0.02 if zero_stage == 3 else 1e-9)


def check_step(fake_device, shape, *, layers=None, ranks, zero_stage, tensor=1, **options):
    """A step on rows of 512 tokens, half of them supervised; ``options`` as the formulas have."""
    steps, again = options.get("micro_batches", 1), options.get("recomputes", False)
    noted = fake_device.run(
        "fakecuda.programs:train",
        shape=shape,
        layers=layers,
        rows=4,
        world_size=ranks,
        zero_stage=zero_stage,
        tensor_parallel=tensor,
        accumulation=steps,
        recompute=again,
        timeout=1200,
    )
    given = {"ranks": ranks, "zero_stage": zero_stage, "layers": layers, "tensor": tensor}
    check_exchanges(noted, shape, **given, **options)


@pytest.mark.thorough
def test_64_ranks_of_which_8_hold_a_model_between_them(fake_device):
    check_step(fake_device, "opt-1.3b", layers=2, ranks=64, tensor=8, zero_stage=2, micro_batches=2)


CASES = [
    ("opt-1.3b", {"ranks": 8, "zero_stage": 0, "layers": 4}),
    ("opt-1.3b", {"ranks": 64, "zero_stage": 1, "layers": 2, "micro_batches": 2}),
    ("opt-1.3b", {"ranks": 512, "zero_stage": 0, "layers": 2}),
    ("opt-1.3b", {"ranks": 512, "zero_stage": 2, "layers": 2}),
    ("opt-1.3b", {"ranks": 64, "zero_stage": 3}),
    ("llama-2-7b", {"ranks": 8, "zero_stage": 3, "layers": 16, "recomputes": True}),
    ("llama-2-7b", {"ranks": 64, "zero_stage": 3, "layers": 6}),
    ("llama-2-7b", {"ranks": 8, "zero_stage": 2}),
    ("llama-2-7b", {"ranks": 8, "zero_stage": 0, "tensor": 4, "layers": 4}),
    ("llama-2-7b", {"ranks": 8, "zero_stage": 0, "tensor": 2, "layers": 4, "recomputes": True}),
    ("llama-2-13b", {"ranks": 8, "zero_stage": 0, "tensor": 8}),
    ("llama-2-13b", {"ranks": 8, "zero_stage": 0}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("shape", "options"), CASES)
def test_a_step_of_other_shapes_and_settings(fake_device, shape, options):
    check_step(fake_device, shape, **options)


STAGES = {
    "step1_sft": ["--lora_dim", "8", "--sample_generations", "0"],
    "step2_reward": ["--lora_dim", "8"],
    "step3_rlhf": [
        *("--actor_lora_dim", "8", "--critic_lora_dim", "8", "--max_answer_seq_len", "32"),
        *("--gradient_accumulation_steps", "2", "--per_device_training_batch_size", "8"),
    ],
}


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("stage", STAGES)
def test_a_second_step_of_a_stage_exchanges_gradients_and_experience(
    fake_device, tmp_path, stage, ranks
):
    moved, out = [], tmp_path / "2"
    for steps in (1, 2):
        options = [
            *STAGES[stage],
            "--max_steps",
            f"{steps}",
            "--output_dir",
            f"{tmp_path / str(steps)}",
        ]
        noted = fake_device.run(
            "fakecuda.programs:stage",
            script=f"training/{stage}/main.py",
            options=options,
            world_size=ranks,
            timeout=1200,
        )
        assert noted["error"] is None
        moved.append(Counter(counted(noted)))
    trained = json.loads((out / "run.json").read_text())["parameters"]["trainable"]
    step = moved[1] - moved[0]
    assert step.pop(("all_reduce", ranks)) == pytest.approx(4 * trained, abs=FEW)
    tables = []
    if stage == "step3_rlhf":
        # 16 responses a rank, which are of a token each on a device without values.
        tables = experience_exchanges(16 * ranks, new_tokens=32, longest=1, ranks=ranks)
    assert step == by_kind(tables)
