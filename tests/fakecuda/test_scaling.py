"""Bytes of collectives counted on a fake GPU, against numbers worked out by hand."""

import json
from collections import Counter

import pytest

pytestmark = pytest.mark.stage

FEW = 2000  # bytes: losses, norms and requests of a step
# Elements of adapters of rank 16 on every linear layer of a block: (in + out) x 16 each.
OPT_FACTORS = 16 * (4 * (2048 + 2048) + 2 * (2048 + 8192))
LLAMA_FACTORS = 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
# Frozen elements of OPT-1.3B: of a block with biases and norms, and of both embeddings.
OPT_BLOCK = 4 * (2048 + 1) * 2048 + 2 * 2048 * 8192 + 8192 + 2048 + 2 * 2 * 2048
OPT_EMBEDDINGS = (50272 + 2048 + 2) * 2048


def counted(found):
    """{(kind, ranks): bytes}."""
    return {(kind, ranks): count for kind, ranks, _, count in found["moved"]}


def zero_3_bytes(layers):
    """Gathered at ZeRO 3: all weights forward, those of blocks but 500 M elements backward."""
    frozen, factors = layers * OPT_BLOCK, layers * OPT_FACTORS
    kept = min(1, (500e6 - OPT_EMBEDDINGS) / (frozen + factors))
    again = OPT_EMBEDDINGS if frozen > 1e9 else 0  # of the tied head
    return 2 * (OPT_EMBEDDINGS + again) + (2 - kept) * (2 * frozen + 4 * factors)


# Of every tensor-parallel rank 4 layers of 7 factors beside the hidden size are whole.
WHOLE = 4 * 7 * 16 * 4096
CASES = [
    ("opt-1.3b", 2, 512, {"zero_stage": 0}, {("all_reduce", 512): 4 * 2 * OPT_FACTORS}),
    *(
        (
            *("opt-1.3b", 2, 64, {"zero_stage": stage, "accumulation": 2}),
            {
                ("all_reduce", 64): sums * 4 * 2 * OPT_FACTORS,
                ("all_gather", 64): 4 * 2 * OPT_FACTORS,
            },
        )
        for stage, sums in ((1, 1), (2, 2))
    ),
    *(
        (
            *("opt-1.3b", layers, 64, {"zero_stage": 3}),
            {
                ("reduce_scatter", 64): 4 * layers * OPT_FACTORS,
                ("all_gather", 64): zero_3_bytes(layers),
            },
        )
        for layers in (2, 24)
    ),
    *(
        (
            *("llama-2-7b", 4, 8, {"tensor_parallel": 4, "recompute": recompute}),
            {
                # Activations of 2,048 tokens, factors, and loss of 1,024 targets.
                ("all_reduce", 4): sums * 2048 * 4096 * 2 + 4 * WHOLE + 1024 * (4096 * 2 + 12),
                ("all_reduce", 2): 4 * (WHOLE + (4 * LLAMA_FACTORS - WHOLE) // 4),
            },
        )
        for recompute, sums in ((False, 4 * 4), (True, 5 * 4 + 1))
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("shape", "layers", "ranks", "options", "expected"), CASES)
def test_a_step_exchanges_what_its_setting_asks_for(
    fake_device, shape, layers, ranks, options, expected
):
    """A step on 4 rows of 512 tokens, half of them supervised."""
    noted = fake_device.run(
        "fakecuda.programs:train",
        shape=shape,
        layers=layers,
        rows=4,
        world_size=ranks,
        timeout=1200,
        **options,
    )
    rel = 0.02 if options.get("zero_stage") == 3 else 1e-9
    found = Counter(counted(noted))
    assert expected.keys() <= found.keys()
    for key, count in found.items():
        assert count == pytest.approx(expected.get(key, 0), rel=rel, abs=FEW), key


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
    experience = {}
    if stage == "step3_rlhf":
        # Of 16 responses a rank, which are of a token each on a device without values, in fp64:
        # four numbers, tokens and two log-probabilities of each; number and score; number and
        # log-probability of the reference. What actor and critic find in the one step stays.
        experience = {("all_gather", ranks): 8 * 16 * ranks * (4 + 3 * 32 + 2 + 2)}
    assert step == experience
