"""GPT-2 puts data into words, as users type it: train, resume, decode, evaluate."""

import json
import math

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat_lora.addons.loralib.lora_only import read_lora_only
from dschat_lora.addons.nlg.evaluate import chosen_metrics
from helpers.launcher import ROOT
from helpers.restaurants import save_base, write_data
from helpers.step1 import metrics

pytestmark = pytest.mark.stage

SCRIPT = ROOT / "training" / "nlg_gpt2" / "main.py"
TRAIN = """
    --lr 2e-2 --scheduler cosine --warmup_step 2 --max_step 8 --label_smooth 0.1 --no-correct_bias
    --decay_after_update --lora_dropout 0.0 --save_interval 4 --log_interval 4
    --sample_generations 0
""".split()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where the commands of this module run."""
    directory = tmp_path_factory.mktemp("nlg")
    write_data(directory)
    save_base(directory / "base")
    return directory


@pytest.fixture(scope="module")
def command(home, launcher):
    """``command(verb, *argv, ranks=1)``: what rank 0 wrote, of a command that must succeed."""

    def run(*argv, ranks=1):
        running = launcher.start([*argv], home, ranks=ranks, script=SCRIPT)
        assert running.wait() == [0] * ranks, running.output(0)
        return running.output(0)

    return run


def train(command, name, *argv, ranks=1):
    data = ["--train_data", "train.txt", "--valid_data", "held.txt", "--output_dir", name]
    return command("--init_checkpoint", "base", *data, *TRAIN, *argv, ranks=ranks)


def as_the_original(home):
    """Data as token ids, the base's weights as one file, and a full checkpoint of a training."""
    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    for name in ("train", "held"):
        with (home / f"{name}.jsonl").open("w") as file:
            for line in (home / f"{name}.txt").read_text().splitlines():
                context, text = line.split("||")
                row = {
                    "context": tokenizer.encode(context),
                    "completion": tokenizer.encode(f" {text}"),
                }
                row = {part: [*ids, tokenizer.eos_token_id] for part, ids in row.items()}
                file.write(json.dumps(row) + "\n")
    weights = load_file(home / "base" / "model.safetensors")
    names = {name: name.removeprefix("transformer.") for name in weights}
    torch.save({names[name]: tensor for name, tensor in weights.items()}, home / "weights.bin")


@pytest.fixture(scope="module")
def trained(home, command):
    """A run in one process."""
    train(command, "one", "--train_batch_size", "8", "--save_epochs")
    return home / "one"


def evaluations(directory):
    return [line["loss"] for line in metrics(directory, "eval")]


def test_training_learns(trained):
    losses = evaluations(trained)
    assert losses[-1] < losses[0] - 0.05
    assert json.loads((trained / "run.json").read_text())["status"] == "finished"


def test_the_rate_follows_the_originals_cosine(trained):
    falling = [1e-2 * (1 + math.cos(math.pi * step / 8)) for step in range(2, 8)]
    rates = [line["learning_rate"] for line in metrics(trained, "train")]
    assert rates == pytest.approx([0, 1e-2, *falling])


@pytest.mark.thorough
def test_two_processes_and_the_originals_files_train_the_same(trained, command, home):
    as_the_original(home)
    rows = ["--train_data", "train.jsonl", "--valid_data", "held.jsonl"]
    weights = ["--init_checkpoint", "weights.bin", "--model_name_or_path", "base"]
    batches = ["--train_batch_size", "2", "--grad_acc", "2"]
    command(*weights, *rows, *TRAIN, *batches, "--work_dir", "two", ranks=2)
    assert evaluations(home / "two") == pytest.approx(evaluations(trained), rel=1e-6)
    one, two = (
        read_lora_only(d / "lora" / "step-00000008.safetensors").tensors
        for d in (trained, home / "two")
    )
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-6)


def test_a_resumed_run_is_the_one_that_was_not_stopped_bit_for_bit(trained, command, home):
    checkpoint = "one/checkpoints/step-00000004"
    command("--resume_from_checkpoint", checkpoint, "--output_dir", "resumed")
    files = [d / "adapter" / "adapter_model.safetensors" for d in (trained, home / "resumed")]
    assert files[0].read_bytes() == files[1].read_bytes()
    whole, rest = metrics(trained, "train"), metrics(home / "resumed", "train")
    fields = ("step", "loss", "learning_rate", "grad_norm")
    assert [[line[f] for f in fields] for line in rest[-4:]] == [
        [line[f] for f in fields] for line in whole[-4:]
    ]


def test_factors_alone_are_kept_at_every_interval_in_loralibs_layout(trained):
    kept = sorted(path.name for path in (trained / "lora").iterdir())
    epochs = ["epoch-1.safetensors", "epoch-2.safetensors"]
    assert kept == [*epochs, "step-00000004.safetensors", "step-00000008.safetensors"]
    file = read_lora_only(trained / "lora" / kept[-1])
    last = read_lora_only(trained / "lora" / epochs[1]).tensors
    assert all(torch.equal(tensor, last[name]) for name, tensor in file.tensors.items())
    shapes = {name: tuple(tensor.shape) for name, tensor in file.tensors.items()}
    assert shapes == {
        f"transformer.h.{block}.attn.c_attn.lora_{factor}": shape
        for block in range(2)
        for factor, shape in (("A", (8, 32)), ("B", (64, 4)))
    }
    assert (file.settings.lora_alpha, file.settings.enable_lora) == (32, ("q", "v"))


def test_adapter_in_stock_peft_and_merged_model_are_one(trained, home):
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(home / "base")
        untrained = base(ids).logits
        adapted = PeftModel.from_pretrained(base, trained / "adapter")(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(trained / "model")(ids).logits
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-5)
    assert (adapted - untrained).abs().max() > 0.05


def test_keys_keep_the_weights_of_the_base(trained, home):
    name = "transformer.h.0.attn.c_attn.weight"
    base, merged = (
        load_file(d / "model.safetensors")[name] for d in (home / "base", trained / "model")
    )
    changed = (merged != base).any(0).view(3, 32).any(1)
    assert changed.tolist() == [True, False, True]


@pytest.fixture(scope="module")
def texts(trained, command, home):
    """What two processes write to the held-out meanings."""
    decode = ["decode", "--data_path", "held.txt", "--num_beams", "3", "--max_new_tokens", "24"]
    common = [*decode, "--per_device_eval_batch_size", "2"]
    command(*common, "--model_name_or_path", "one", "--output_path", "two.jsonl", ranks=2)
    command(*common, "--init_checkpoint", "one", "--output_path", "one.jsonl")
    factors = ["--model_name_or_path", "base", "--lora_path", "one/lora/epoch-2.safetensors"]
    output = ["--work_dir", "epochs", "--output_path", "two.jsonl"]
    command(*common, *factors, "--lora_dim", "4", *output)
    return home


def test_one_and_two_processes_and_the_last_epochs_factors_write_the_same(texts):
    written = [(texts / f"{name}.jsonl").read_text() for name in ("one", "two", "epochs/two")]
    assert written[0] == written[1] == written[2]
    rows = [json.loads(line) for line in written[0].splitlines()]
    assert [len(row["references"]) for row in rows] == [2, 2, 2, 2]
    assert len({row["meaning"] for row in rows}) == 4


def test_texts_are_judged_by_every_metric(texts, command):
    argv = ["evaluate", "--predictions", "one.jsonl", "--output_path", "scores.json"]
    shown = command(*argv)
    scores = json.loads((texts / "scores.json").read_text())["metrics"]
    assert list(scores) == list(chosen_metrics("e2e"))
    for name, score in scores.items():
        assert math.isfinite(score["value"])
        assert f"{name} " in shown


def test_factors_without_a_base_are_refused(trained, launcher, home):
    file = "one/lora/step-00000008.safetensors"
    argv = ["decode", "--data_path", "held.txt", "--lora_path", file]
    running = launcher.start(argv, home, script=SCRIPT)
    assert running.wait() == [2]
    assert f"--lora_path {file} contains only LoRA weights; give their base" in running.output(0)
