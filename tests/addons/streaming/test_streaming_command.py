"""Streamed rows: the run of prepared files, however it is divided, stopped or broken."""

import gzip
import json
import signal
import time

import pytest
from safetensors.torch import load_file

from helpers.launcher import ROOT
from helpers.step1 import metrics

pytestmark = pytest.mark.stage

SIZES = (15, 6, 14)  # rows of the shards
RUN = """
    --data_path shards --eval_data_path eval.jsonl --lora_dim 2 --max_steps 16 --max_seq_len 64
    --dtype fp32 --sample_generations 0 --output_dir out
    --preprocessing_num_workers 1
""".split()
STREAM = ["--streaming", "--shuffle_buffer_size", "10"]
SAVES = ["--save_interval", "1", "--save_total_limit", "0", "--preprocessing_num_workers", "2"]
RESUME = ["--output_dir", "out", "--resume_from_checkpoint", "latest"]
FIELDS = ("step", "loss", "grad_norm", "tokens", "samples", "supervised_tokens")


def row(shard, number):
    answer = " well" * (number * 7 % 5)
    prompt = f"\n\nHuman: What is {number} plus {shard}?\n\nAssistant:"
    return json.dumps({"prompt": prompt, "completion": f"{answer} {number + shard}."}) + "\n"


@pytest.fixture
def home(tmp_path):
    (tmp_path / "shards").mkdir()
    for shard, size in enumerate(SIZES):
        text = "".join(row(shard, number) for number in range(size)).encode()
        (tmp_path / f"shards/part{shard}.jsonl.gz").write_bytes(gzip.compress(text))
    (tmp_path / "eval.jsonl").write_text("".join(row(9, number) for number in range(4)))
    return tmp_path


def trained(home):
    lines = metrics(home / "out", "train")
    adapter = load_file(home / "out/adapter/adapter_model.safetensors")
    values = {name: tensor.tolist() for name, tensor in adapter.items()}
    return [[line[name] for name in FIELDS] for line in lines], values


def command(launcher, home, *argv, ranks=1):
    running = launcher.start(argv, home, ranks=ranks)
    return running.wait(), running.out(), running.err()


def wait_for_checkpoint(home, step):
    while not (home / f"out/checkpoints/step-{step:08}").exists():
        time.sleep(0.02)


def batch(micro):
    return ["--per_device_train_batch_size", str(micro)]


@pytest.mark.thorough
def test_a_buffer_that_holds_all_rows_gives_the_run_of_prepared_files(launcher, home):
    found = []
    for options in ([], ["--streaming"]):
        codes, _, err = command(launcher, home, *RUN, *batch(4), *options, "--overwrite_output_dir")
        assert codes == [0], err
        found.append(trained(home))
    assert found[0] == found[1]


OTHER_STAGES = {
    "step2_dpo": """--loss_type kto --no-precompute_ref_log_probs --lora_dim 2 --max_steps 12
        --max_seq_len 64 --per_device_train_batch_size 4""",
    # A pass of 35 prompts ends in an iteration of three, which has fewer steps.
    "step3_rlhf": """--algorithm grpo --actor_lora_dim 2 --num_generations 2 --max_steps 20
        --per_device_generation_batch_size 8 --generation_batches 1 --max_answer_seq_len 6
        --per_device_training_batch_size 3 --dynamic_sampling 1 --eval_prompts 2
        --reward_function rewards:score""",
}


@pytest.mark.thorough
@pytest.mark.parametrize("stage", OTHER_STAGES)
def test_other_stages_too_have_the_run_of_prepared_files(launcher, home, stage):
    for file in [*home.glob("shards/*.gz"), home / "eval.jsonl"]:
        lines = (gzip.decompress if file.suffix == ".gz" else bytes)(file.read_bytes()).splitlines()
        rows = [json.loads(line) | {"label": n % 3 > 0} for n, line in enumerate(lines)]
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    (home / "rewards.py").write_text(
        "def score(completions, **columns):\n    return [len(set(c)) % 3 for c in completions]\n"
    )
    found = []
    common = "--data_path shards --eval_data_path eval.jsonl --dtype fp32 --sample_generations 0"
    for options in ("", "--streaming", "--streaming --preprocessing_num_workers 2"):
        argv = [*OTHER_STAGES[stage].split(), *common.split(), *options.split()]
        out = home / f"out{len(found)}"
        script = ROOT / "training" / stage / "main.py"
        running = launcher.start([*argv, "--output_dir", out], home, script=script)
        assert running.wait() == [0], running.err()
        (adapter,) = out.glob("**/adapter/adapter_model.safetensors")
        lines = [
            {name: line[name] for name in ("step", "loss", "reward", "grad_norm") if name in line}
            for line in metrics(out, "train")
        ]
        assert len({line["step"] for line in lines}) > 5
        found.append((lines, adapter.read_bytes()))
    assert found[0] == found[1] == found[2]


def test_a_run_that_is_killed_and_loses_a_shard_ends_as_if_nothing_had_been(launcher, home):
    codes, _, err = command(launcher, home, *RUN, *STREAM, *batch(4))
    assert codes == [0], err
    whole = trained(home)
    (home / "out").rename(home / "whole")

    running = launcher.start([*RUN, *STREAM, *batch(4), *SAVES], home)
    wait_for_checkpoint(home, 2)
    running.signal(signal.SIGKILL)
    running.wait()
    killed = max(int(path.name[-8:]) for path in (home / "out/checkpoints").glob("step-????????"))

    # The next one loses the end of a shard before its second pass.
    shard = home / "shards/part1.jsonl.gz"
    content = shard.read_bytes()
    running = launcher.start(RESUME, home)
    wait_for_checkpoint(home, killed + 2)
    shard.write_bytes(content[: len(content) // 2])
    assert running.wait() == [2]
    assert "shards/part1.jsonl.gz could not be read on after row" in running.err()
    assert running.err().count("\n") == 1
    assert "stopped by the data after step" in running.out()
    shard.write_bytes(content)
    codes, _, err = command(launcher, home, *RESUME)
    assert codes == [0], err
    assert trained(home) == whole

    # Over two processes, whose sums are in another order.
    codes, _, err = command(
        launcher, home, *RUN, *STREAM, *batch(2), "--overwrite_output_dir", ranks=2
    )
    assert codes == [0, 0], err
    for one, two in zip(whole[0], trained(home)[0], strict=True):
        assert two == pytest.approx(one, rel=1e-4)
