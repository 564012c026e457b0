"""``--tensor_parallel_size``: what is refused before torch is there, and what resuming keeps."""

import json
import shutil

import pytest

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.config.options import parse_config
from dschat_lora.models.option_checks import check_divides, sizes_of
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.resume import settle
from helpers.step1 import checked, parsed, write_checkpoint, write_jsonl


@pytest.fixture(autouse=True)
def elsewhere(own_directory, tmp_path):
    """A directory with one row of data, without a launcher's environment."""
    write_jsonl(tmp_path / "row.jsonl", [{"prompt": "a", "chosen": " b", "rejected": " c"}])


@pytest.fixture
def processes(monkeypatch):
    """``processes(n)``: as if a launcher had started so many."""
    return lambda n: monkeypatch.setenv("WORLD_SIZE", str(n))


@pytest.fixture
def model(tmp_path):
    """``model(name, **fields)``: a directory with nothing but this configuration."""

    def make(name="model", **fields):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(fields))
        return directory

    return make


# The bundled rows take longer to check.
ROW = ("--data_path", "row.jsonl")


def divided(size, *argv):
    return checked(*ROW, "--lora_dim", 4, "--tensor_parallel_size", size, *argv)


def step3(*argv):
    argv = (*ROW, "--reward_function", "dschat_lora.world:reward", *argv)
    return check_rlhf(parse_config(RlhfConfig, [str(each) for each in argv]))


def error_of(check, *argv):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        check(*argv)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("size", "count"), [(1, 1), (1, 3), (2, 2), (2, 6), (4, 4)])
def test_groups_that_the_processes_fill_are_taken(processes, size, count):
    processes(count)
    assert divided(size).parallel.tensor_parallel_size == size


# ---------------------------------------------------------------------------- the model's numbers

# Fields of config.json as transformers writes them.
FITTING = {
    "opt": {"num_attention_heads": 4, "ffn_dim": 64, "hidden_size": 32},
    "gpt2": {"n_head": 4, "n_embd": 32, "n_inner": None},
    "gpt_neox": {"num_attention_heads": 4, "intermediate_size": 64},
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64},
    "mistral": {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 64},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64},
}


@pytest.mark.parametrize("kind", FITTING)
def test_numbers_that_fit_are_taken_and_others_named_with_those_that_would(kind):
    fields = {"model_type": kind, **FITTING[kind]}
    check_divides(fields, 4)
    with pytest.raises(ValueError, match=r"--tensor_parallel_size 3 does not .* heads; 1, 2, 4 wo"):
        check_divides(fields, 3)


@pytest.mark.parametrize(
    ("fields", "size", "words"),
    [
        (
            {"model_type": "opt", "num_attention_heads": 12, "ffn_dim": 64},
            8,
            "12 attention heads; 1, 2, 4 would",
        ),
        (
            {
                "model_type": "llama",
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "intermediate_size": 64,
            },
            4,
            "2 key and value heads; 1, 2 would",
        ),
        (
            {"model_type": "qwen2", "num_attention_heads": 4, "intermediate_size": 90},
            4,
            "90 MLP features; 1, 2 would",
        ),
        ({"model_type": "gpt2", "n_head": 6, "n_inner": 61}, 2, "61 MLP features; 1 would"),
        ({"model_type": "gpt2", "n_head": 25, "n_embd": 1600}, 2, "25 attention heads; 1, 5, 25"),
    ],
)
def test_each_number_that_has_to_be_divided_counts(fields, size, words):
    message = error_of(check_divides, fields, size)
    assert message.startswith(f"--tensor_parallel_size {size} does not divide the model's {words}")


def test_sizes_are_found_under_the_names_of_every_architecture():
    words = ("attention heads", "key and value heads", "MLP features")
    gpt2 = {"n_head": 12, "n_embd": 768, "n_inner": None}
    assert sizes_of(gpt2) == dict(zip(words, (12, 12, 3072), strict=True))
    opt = {"num_attention_heads": 16, "ffn_dim": 4096}
    assert sizes_of(opt) == dict(zip(words, (16, 16, 4096), strict=True))
    grouped = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    assert sizes_of(grouped) == dict(zip(words, (32, 8, 14336), strict=True))
    assert sizes_of({}) == {}


def test_what_a_configuration_leaves_out_is_left_to_the_loaded_one(processes, model):
    processes(2)
    for name, fields in (("bare", {}), ("kind", {"model_type": "llama"})):
        divided(2, "--model_name_or_path", model(name, **fields))
    check_divides({"model_type": "opt", "ffn_dim": 64}, 4)


@pytest.mark.parametrize("count", ["4", 4.0, 0, True])
def test_number_that_is_none_is_a_damaged_configuration(count):
    with pytest.raises(ValueError, match=f"configuration says {count!r} of its n_head"):
        check_divides({"model_type": "gpt2", "n_head": count}, 2)


def test_quantised_weights_are_not_read_in_parts(model):
    fields = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    assert "reads weights in parts, which is not supported for quantised weights;" in error_of(
        check_divides, fields, 2
    )
    check_divides(fields, 1)


def test_model_of_the_hub_is_not_looked_up_before_the_run(processes):
    processes(2)
    assert divided(2, "--model_name_or_path", "org/model").parallel.tensor_parallel_size == 2


# ---------------------------------------------------------------------------- what goes with it


@pytest.mark.parametrize(
    "line",
    [
        "--train_bias lora_only --lora_dropout 0.1 --use_rslora --sequence_parallel",
        "--target_modules lm_head embed_tokens q_proj",
        "--modules_to_save decoder.final_layer_norm",
        "--offload --zero_stage 3 --merge_adapter --dtype fp16 --gradient_checkpointing",
    ],
)
def test_what_a_divided_model_can_train_is_taken(processes, line):
    processes(2)
    assert divided(2, *line.split())


def test_sequence_parallelism_of_one_process_is_noted(processes, capsys):
    note = "  note         --sequence_parallel has no effect without --tensor_parallel_size above 1"
    divided(1, "--sequence_parallel")
    assert note in capsys.readouterr().out.splitlines()
    step3("--sequence_parallel")
    assert note in capsys.readouterr().out.splitlines()
    processes(2)
    divided(2, "--sequence_parallel")
    assert "note" not in capsys.readouterr().out


# What --tensor_parallel_size 2 refuses, and what it does not.
@pytest.mark.parametrize(
    ("size", "line"),
    [
        (1, "--model_name_or_path bloom"),
        (1, "--model_name_or_path bin"),
        (2, "--model_name_or_path indexed"),
        (1, "--lora_dim 0"),
        (1, "--no-only_optimize_lora"),
        (1, "--train_bias all"),
        (1, "--modules_to_save model.lm_head"),
        (1, "--dropout 0.1"),
        (2, '{"train_batch_size": 32}'),  # processes of one model count once
        (1, '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}'),
        (2, '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}}'),
        (2, '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": "auto"}}'),
        (1, '{"zero_optimization": {"stage": 3, "zero_quantized_gradients": true}}'),
        (2, '{"zero_optimization": {"stage": 3, "zero_quantized_gradients": false}}'),
    ],
)
def test_only_what_a_divided_model_cannot_do_is_refused(processes, model, tmp_path, size, line):
    processes(4)
    model("bloom", model_type="bloom", n_head=16)
    for name in ("bin", "indexed"):
        (model(name) / "pytorch_model.bin").touch()
    (tmp_path / "indexed" / "model.safetensors.index.json").touch()
    (tmp_path / "ds.json").write_text(line)
    words = ["--deepspeed_config", "ds.json"] if line.startswith("{") else line.split()
    assert divided(size, *words)


# ---------------------------------------------------------------------------- step 3


def test_both_roles_of_step_3_are_named_by_their_options(processes, model):
    processes(2)
    size = ("--tensor_parallel_size", 2)
    assert error_of(step3, *size).startswith("--actor_lora_dim 0 trains all weights")
    both = (*size, "--actor_lora_dim", 4)
    message = error_of(step3, *both, "--critic_lora_dim", 0)
    assert message.startswith("--critic_lora_dim 0 trains all weights, but --tensor_parallel_size")
    assert "give --critic_lora_dim 16, or" in message
    assert error_of(step3, *both, "--no-only_optimize_lora").startswith("--no-only_optimize_lora t")
    config = step3(*both)
    assert (config.actor.lora_dim, config.critic.lora_dim) == (4, 4)


def test_models_of_both_roles_have_to_be_divided(processes, model):
    processes(4)
    scores = {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}
    odd = model("odd", model_type="opt", num_attention_heads=6)
    reward = model("reward", num_attention_heads=4, num_key_value_heads=2, **scores)
    options = ("--tensor_parallel_size", 4, "--actor_lora_dim", 4, "--critic_lora_dim", 4)
    scored = ("--critic_model_name_or_path", reward)
    message = error_of(step3, *options, *scored, "--actor_model_name_or_path", odd)
    assert message.startswith(f"--actor_model_name_or_path {odd}: --tensor_parallel_size 4 does")
    message = error_of(step3, *options, *scored)
    assert message == (
        f"--critic_model_name_or_path {reward}: --tensor_parallel_size 4 does not divide the "
        "model's 2 key and value heads; 1, 2 would"
    )


def test_reward_model_that_does_not_learn_needs_no_adapter(processes, tmp_path):
    processes(2)
    reward = tmp_path / "reward"
    shutil.copytree(BUNDLED_MODEL, reward)
    fields = json.loads((reward / "config.json").read_text())
    fields["architectures"] = ["OPTForSequenceClassification"]
    (reward / "config.json").write_text(json.dumps(fields))
    options = ("--tensor_parallel_size", 2, "--actor_lora_dim", 4)
    options += ("--critic_model_name_or_path", reward, "--num_generations", 2)
    assert step3(*options, "--algorithm", "rloo")
    assert error_of(step3, *options).startswith("--critic_lora_dim 0 trains all weights")


@pytest.mark.parametrize(
    ("training", "inference", "noted"),
    [(2, 1, False), (2, 2, False), (1, 8, True), (2, 4, True), (4, 2, True)],
)
def test_rollouts_run_on_the_processes_that_hold_the_model(
    processes, capsys, training, inference, noted
):
    processes(4)
    options = ("--tensor_parallel_size", training, "--inference_tp_size", inference)
    assert step3("--actor_lora_dim", 4, *options)
    note = f"--inference_tp_size {inference} has no effect: rollouts run on the processes that hold"
    assert (note in capsys.readouterr().out) == noted


# What DeepSpeed-Chat's step 3 is given for OPT-13B on one node and OPT-66B on eight.
HYBRID = """
    --data_split 2,4,4 --num_padding_at_beginning 1 --per_device_generation_batch_size 16
    --per_device_training_batch_size 16 --generation_batches 1 --ppo_epochs 1
    --max_answer_seq_len 48 --max_prompt_seq_len 64 --actor_learning_rate 5e-4
    --critic_learning_rate 5e-6 --num_train_epochs 1 --lr_scheduler_type cosine
    --gradient_accumulation_steps 1 --num_warmup_steps 100 --deepspeed --seed 1234
    --enable_hybrid_engine --inference_tp_size 8 --tp_gather_partition_size 4
    --actor_zero_stage 3 --critic_zero_stage 3 --actor_gradient_checkpointing
    --critic_gradient_checkpointing --actor_lora_dim 128
    --actor_lora_module_name decoder.layers. --output_dir ./output
""".split()


@pytest.mark.parametrize("nodes", [1, 8])
def test_recipes_of_deepspeed_chat_with_a_hybrid_engine_start(processes, capsys, nodes):
    processes(8 * nodes)
    assert step3(*HYBRID).actor.zero_stage == 3
    assert "--inference_tp_size 8 has no effect" in capsys.readouterr().out


def test_responses_of_an_iteration_count_processes_of_one_model_once(processes, capsys):
    processes(4)
    options = ("--actor_lora_dim", 4, "--tensor_parallel_size", 2)
    step3(*options, "--gradient_accumulation_steps", 2)
    assert (
        "--generation_batches is raised from 1 to 2: an optimizer step takes 64 responses, and a "
        "generation batch gives 32"
    ) in capsys.readouterr().out
    options += ("--generation_batches", 1)
    horizon = ("--adaptive_kl_target", 1, "--kl_horizon", 7)
    assert step3(*options, *horizon).ppo.kl_horizon == 7  # 5 x 7 is more than 32 responses
    with pytest.raises(ValueError, match="--kl_horizon 6 is too short for 32 responses"):
        step3(*options, "--adaptive_kl_target", 1, "--kl_horizon", 6)


# ---------------------------------------------------------------------------- resuming


@pytest.fixture
def earlier(tmp_path, processes):
    """``earlier(count, *argv)``: a checkpoint as so many processes left it."""

    def make(count, *argv):
        processes(count)
        config = checked(*ROW, "--lora_dim", 4, *argv)
        batch = config.batch
        rows = batch.per_device_train_batch_size * batch.gradient_accumulation_steps
        rows = rows * count // config.parallel.tensor_parallel_size
        write_checkpoint(tmp_path / "out", config, {"rows_per_step": rows})

    return make


def resumed(*argv):
    return settle(parsed("--resume_from_checkpoint", "out", *argv), stage="sft")


def shape(config):
    batch = config.batch
    return (
        config.parallel.tensor_parallel_size,
        batch.per_device_train_batch_size * batch.gradient_accumulation_steps,
    )


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("count", [4, 8])
def test_run_goes_on_at_any_size_and_a_step_keeps_its_rows(
    earlier, processes, before, after, count
):
    earlier(4, "--tensor_parallel_size", before, "--per_device_train_batch_size", 8)
    processes(count)
    config = resumed("--tensor_parallel_size", after)
    rows = 8 * (4 // before)
    assert shape(config) == (after, rows // (count // after))


def test_size_of_the_checkpoint_is_taken_over_with_its_sequence_parallelism(earlier, processes):
    earlier(2, "--tensor_parallel_size", 2, "--sequence_parallel")
    config = resumed()
    assert shape(config) == (2, 16)
    assert config.parallel.sequence_parallel
    processes(4)
    assert shape(resumed()) == (2, 8)


def test_size_that_changes_is_noted_and_frees_from_sequence_parallelism(earlier, processes, capsys):
    earlier(2, "--tensor_parallel_size", 2, "--sequence_parallel")
    processes(1)
    capsys.readouterr()
    assert shape(resumed("--tensor_parallel_size", 1)) == (1, 16)
    lines = capsys.readouterr().out.splitlines()
    assert "  note         --tensor_parallel_size 1 from here on, 2 so far" in lines
    processes(2)
    config = resumed("--no-sequence_parallel")
    assert (config.parallel.tensor_parallel_size, config.parallel.sequence_parallel) == (2, False)


@pytest.mark.parametrize("count", [1, 3])
def test_size_of_the_checkpoint_that_does_not_fit_has_to_be_typed(earlier, processes, count):
    earlier(2, "--tensor_parallel_size", 2, "--per_device_train_batch_size", 3)
    processes(count)
    message = error_of(resumed)
    assert message.startswith(
        "--resume_from_checkpoint out/checkpoints/step-00000005 is of a run with "
        "--tensor_parallel_size 2: give the new size, as --tensor_parallel_size 2 "
        f"does not divide the number of launched processes, {count} "
    )
    assert shape(resumed("--tensor_parallel_size", 1)) == (1, 3 // count)
    message = error_of(resumed, "--tensor_parallel_size", 4)
    assert message.startswith("--tensor_parallel_size 4 does not divide the number of launched")


def test_rows_that_no_share_can_keep_name_the_size(earlier, processes):
    earlier(1, "--per_device_train_batch_size", 4)
    processes(6)
    assert error_of(resumed, "--tensor_parallel_size", 2).endswith(
        "a step had 4 rows, now --per_device_train_batch_size 1 x --gradient_accumulation_steps 1 "
        "x 6 processes / --tensor_parallel_size 2 is 3"
    )
