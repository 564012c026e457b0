"""Whole stage scripts on a fake GPU, reading and writing files, on the bundled model and data."""

import json
from itertools import islice

import pytest

from dschat_lora.assets import BUNDLED_DATA
from helpers.spread import ALL

pytestmark = pytest.mark.stage

ADAPTERS = ("--lora_dim", "8")
STAGES = {
    "step1_sft": (*ADAPTERS, "--sample_generations", "0"),
    "step2_reward": ADAPTERS,
    "step2_dpo": ADAPTERS,
    "step3_rlhf": (
        *("--actor_lora_dim", "8", "--critic_lora_dim", "8", "--generation_batches", "1"),
        *("--reward_function", "fakecuda.programs:no_reward"),
    ),
}
OFFLOAD = ("--offload", "--zero_stage", "3", "--offload_activations")
CASES = [(stage, card, ()) for card in ("h200", "t4") for stage in STAGES]
CASES += [(stage, "h200", OFFLOAD) for stage in STAGES]
CASES += [(stage, "h200", ("--compile",)) for stage in STAGES]
FLEX = ("--attn_implementation", "flex_attention")
CASES += [(stage, "h200", FLEX) for stage in list(STAGES)[:3]]


@pytest.mark.parametrize(("stage", "card", "extra"), CASES if ALL else CASES[:1])
def test_a_stage_runs_to_its_end(fake_device, tmp_path, stage, card, extra):
    out = tmp_path / "out"
    data = tmp_path / "data.jsonl"
    with open(BUNDLED_DATA["train"], encoding="utf-8") as file:
        data.write_text("".join(islice(file, 160)), encoding="utf-8")
    options = [*STAGES[stage], "--max_steps", "2", "--output_dir", str(out)]
    options += ["--data_path", str(data), *extra]
    refuses = card == "t4"  # to extend segments
    noted = fake_device.run(
        "fakecuda.programs:stage",
        script=f"training/{stage}/main.py",
        options=options,
        card=card,
        trial="import sys; sys.exit('operation not supported')" if refuses else "",
    )
    assert noted["error"] is None
    assert noted["allocator"] == (None if refuses else "expandable_segments:True")
    *_, said = fake_device.log().split(f"output: {out}")  # of this run
    assert said.count("refuses expandable segments") == refuses, said
    # The bundled model is small: launching its kernels takes longer than their work.
    assert ("run as CUDA graphs" in said) == (card == "h200" and not extra), said
    assert noted["plans"] == 0, "cuDNN's attention would be planned for every shape of rows"
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "finished"
    dtype = {"h200": "bfloat16", "t4": "float16"}[card]
    narrow = sum(n for each, n in noted["products"].items() if each.endswith(dtype))
    assert narrow > 0.95 * sum(noted["products"].values()), noted["products"]
    if stage == "step3_rlhf":
        # Of decoding; and the passes of two roles.
        assert noted["graphs"] <= 6 + 4
        assert noted["replays"] > 10 * noted["graphs"]


@pytest.mark.thorough
@pytest.mark.parametrize("stage", STAGES if ALL else ["step3_rlhf"])
def test_further_steps_bring_no_wait(fake_device, tmp_path, stage):
    """Two steps and four of a supervised stage, a step and three of an iteration of step 3."""
    data = tmp_path / "data.jsonl"
    with open(BUNDLED_DATA["train"], encoding="utf-8") as file:
        data.write_text("".join(islice(file, 160)), encoding="utf-8")
    counts = [("--per_device_train_batch_size", "2", "--max_steps", n) for n in "24"]
    if stage == "step3_rlhf":
        small = ("--max_answer_seq_len", "8", "--per_device_generation_batch_size", "8")
        small = (*small, "--per_device_training_batch_size", "8")
        counts = [(*small, "--max_steps", n, "--ppo_epochs", n) for n in "13"]
    noted = []
    for number, options in enumerate(counts):
        home = ["--data_path", str(data), "--output_dir", str(tmp_path / str(number))]
        noted.append(
            fake_device.run(
                "fakecuda.programs:stage",
                script=f"training/{stage}/main.py",
                options=[*STAGES[stage], *home, *options],
            )
        )
        assert noted[-1]["error"] is None
    few, more = noted
    assert sum(more["late_reads"].values()) > sum(few["late_reads"].values())
    # But for those of capturing, once for each shape.
    waits = [
        {k: n for k, n in each["waits"].items() if "/cuda_graphs.py" not in k} for each in noted
    ]
    assert waits[0] == waits[1]
