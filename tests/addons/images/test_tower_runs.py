"""Whole runs with pictures: ranks and ZeRO stages, four bits, checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file

from addons.images.training import Seeing, numbered, sample_row
from addons.images.vlms import drawn
from helpers.launcher import ROOT

pytestmark = [pytest.mark.stage, pytest.mark.thorough]
# So that a rank has rows without a picture.
ROWS = ("one", "none", "several", "none", "another", "several", "like", "none")
MAIN = ROOT / "dschat_lora" / "__main__.py"
RUN = """
    --model_name_or_path base --data_path rows.jsonl --eval_ratio 0.25 --lora_dim 4
    --lora_learning_rate 5e-3 --max_seq_len 128 --eval_iters 1 --sample_generations 0 --dtype fp32
    --no-packing --max_steps 4 --preprocessing_num_workers 1
""".split()
# llava_next has a parameter of its own beside the parts that are called, gemma3's tower a layer
# whose weight another one reads.
KINDS = ("llava_next", "gemma3", "qwen3_vl")
TOWERS = {"frozen": (), "trained": ("--train_vision",)}


@pytest.fixture(scope="module", params=KINDS)
def run(request, launcher, tmp_path_factory):
    """``run(out, *argv)``: the losses of a run of so many ``ranks``, or the line of its error."""
    home = tmp_path_factory.mktemp(request.param)
    Seeing(request.param, home)
    rows = [json.dumps(numbered(sample_row(name), n)) for n, name in enumerate(ROWS)]
    (home / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")

    def call(out, *argv, ranks=1):
        size = ("--per_device_train_batch_size", str(4 // ranks))
        argv = ["sft", *RUN, *size, "--output_dir", out, *argv]
        running = launcher.start(argv, home, ranks=ranks, script=MAIN)
        if any(running.wait()):
            return running.err()
        lines = map(json.loads, (home / out / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    call.home = home
    return call


@pytest.mark.parametrize("tower", TOWERS)
def test_losses_are_those_of_one_process_on_two_at_every_zero_stage(run, tower):
    wanted = run(f"one-{tower}", *TOWERS[tower])
    assert len(wanted) >= 6
    for stage in range(4):
        out = f"{tower}-{stage}"
        losses = run(out, *TOWERS[tower], "--zero_stage", str(stage), ranks=2)
        assert losses == pytest.approx(wanted, abs=1e-5), stage
    recomputed = run(f"again-{tower}", *TOWERS[tower], "--gradient_checkpointing")
    assert recomputed == pytest.approx(wanted, abs=1e-6)


def test_a_base_in_four_bits_has_its_tower_in_sixteen(run):
    wanted = run("four", "--base_bits", "4", "--train_vision")
    options = ("--base_bits", "4", "--train_vision", "--zero_stage", "3")
    assert run("four-3", *options, ranks=2) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("tower", TOWERS)
def test_a_run_goes_on_to_the_bit_and_only_with_the_same_pictures(run, tower):
    saving = (*TOWERS[tower], "--save_interval", "2", "--save_total_limit", "0")
    run(f"whole-{tower}", *saving)
    (middle,) = (run.home / f"whole-{tower}" / "checkpoints").glob("*2")
    resuming = (*saving, "--resume_from_checkpoint", str(middle))
    run(f"half-{tower}", *resuming)
    whole, half = (
        load_file(run.home / f"{name}-{tower}" / "adapter" / "adapter_model.safetensors")
        for name in ("whole", "half")
    )
    assert whole.keys() == half.keys()
    assert all(torch.equal(tensor, half[name]) for name, tensor in whole.items())
    assert any("vision" in name or "visual" in name for name in whole) == (tower == "trained")
    picture = run.home / "square.png"
    kept = picture.read_bytes()
    drawn(32, 32, seed=7).save(picture)
    assert "beside text (picture 1, square.png: was " in run(f"other-{tower}", *resuming)
    picture.write_bytes(kept)
