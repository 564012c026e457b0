"""Runs on a fake GPU whose step does not fit whole: divided rather than recomputed, and it fits."""

import json
from dataclasses import replace

import pytest

from benchmarks.common import shapes
from dschat_lora.perf.cards import USABLE
from fakecuda.test_memory_of_roles import write_base
from helpers.spread import ALL

pytestmark = [pytest.mark.stage, pytest.mark.thorough]


@pytest.mark.parametrize(
    ("card", "layers", "length"), [("3060", 4, 1536), *[("4090", 36, 512)] * ALL]
)
def test_qwen3_4b_at_defaults_is_divided_and_fits(fake_device, tmp_path, card, layers, length):
    base, data, out = tmp_path / "base", tmp_path / "rows.jsonl", tmp_path / "out"
    base.mkdir()
    write_base(base, replace(shapes.SHAPES["qwen3-4b"], num_layers=layers))
    rows = [{"prompt": f"{n}", "completion": " word" * (length // 2 - 20)} for n in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    noted = fake_device.run(
        "fakecuda.programs:stage",
        script="training/step1_sft/main.py",
        card=card,
        options=[
            *("--model_name_or_path", str(base), "--data_path", str(data), "--lora_dim", "16"),
            *("--max_seq_len", str(length), "--max_steps", "2", "--sample_generations", "0"),
            *("--output_dir", str(out)),
        ],
    )
    assert noted["error"] is None, fake_device.log()
    record = json.loads((out / "run.json").read_text())
    rows = record["per_device_train_batch_size"]
    assert rows in (2, 4, 8)
    assert record["gradient_accumulation_steps"] == 16 // rows
    assert record["gradient_checkpointing"] is False
    assert noted["peak"] == pytest.approx(record["memory"]["peak"], rel=0.1)
    total = {"3060": 12, "4090": 24}[card] * 10**9
    assert noted["peak"] <= USABLE * total
    *_, said = fake_device.log().split(f"output: {out}")
    words = " ".join(said.split())
    assert f"--per_device_train_batch_size {rows} --gradient_accumulation_steps" in words
    assert "recomputed in whole ones" in words
