"""The planner: sizes known from elsewhere, and settings that fit when they are planned again."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import dschat_lora as dl
from dschat_lora.addons.pipeline.placeholders import write_config
from dschat_lora.addons.planning import verbs
from dschat_lora.addons.planning.cards import Card, find_card
from dschat_lora.addons.planning.plan import GENERATION, TRAINING, StepTime
from dschat_lora.addons.planning.plan_report import expected_speeds, lines, to_dict
from dschat_lora.addons.planning.plan_search import plan_stage, planning
from dschat_lora.addons.planning.published import MODEL_OPTIONS, PUBLISHED, published_name
from dschat_lora.commands.stages import STAGES
from dschat_lora.config.options import parse_config, typed_options
from dschat_lora.models import option_checks
from helpers.spread import ALL
from helpers.step1 import write_jsonl

ROOT = Path(__file__).resolve().parents[3]
# As the hub's pages of the models count them.
PARAMETERS = {
    "facebook/opt-1.3b": 1_315_758_080,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
}
HIDDEN, MLP, LAYERS, RANK, VOCAB = 64, 256, 3, 4, 64
# Numbers of an adapter of the tiny model below: four projections, up and down, in each block.
ADAPTER = LAYERS * RANK * (4 * 2 * HIDDEN + 2 * (HIDDEN + MLP))


pytestmark = pytest.mark.usefixtures("first_rows")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A directory with the configuration of a tiny OPT, and no weights."""
    home = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {"hidden_size": HIDDEN, "word_embed_proj_dim": HIDDEN, "ffn_dim": MLP}
    heads = {"num_attention_heads": 4, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    write_config(home, {**PUBLISHED["facebook/opt-1.3b"], **sizes, **heads})
    return str(home)


@pytest.fixture
def home():
    with planning() as directory:
        yield directory


def card(usable):
    """A device of which so many bytes are planned with, or a few more."""
    made_up = Card("made up", 0)
    return replace(made_up, memory_bytes=int(usable / 0.9) + 2 - round(made_up.usable_bytes / 0.9))


@pytest.mark.parametrize("name", PARAMETERS if ALL else list(PARAMETERS)[:4])
def test_published_shapes_have_as_many_parameters_as_their_pages_say(tmp_path, name):
    import torch

    write_config(tmp_path / "model", PUBLISHED[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("unsloth/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("qwen3-4b-instruct-2507", "Qwen/Qwen3-4B"),
        ("Llama-2-70b-hf", None),
        ("output/opt-1.3b", None),
        ("./opt-1.3b", None),
    ],
)
def test_models_are_known_by_their_names_but_not_by_paths(given, name):
    assert published_name(given) == name


def test_parts_are_those_of_an_adapter_on_frozen_16_bit_weights(tiny, home):
    options = {"model_name_or_path": tiny, "lora_dim": RANK, "max_seq_len": 32}
    role = plan_stage("sft", options, home, card=None).plan.roles["model"]
    norms = 2 * HIDDEN
    block = 4 * (HIDDEN**2 + HIDDEN) + 2 * HIDDEN * MLP + MLP + HIDDEN + 2 * norms
    frozen = LAYERS * block + (VOCAB + 2048 + 2) * HIDDEN + norms
    assert role.weights == 2 * frozen
    assert (role.adapters, role.gradients, role.moments) == (4 * ADAPTER, 4 * ADAPTER, 8 * ADAPTER)
    # 16 rows of 32 positions in one chunk: logits, their fp32 copy, error and gradient.
    assert role.logits == 16 * 32 * (VOCAB * (2 * 2 + 8) + HIDDEN * 2)


def test_roles_on_one_base_count_its_weights_once_and_decoding_its_cache(tiny, home):
    options = {
        "actor_model_name_or_path": tiny,
        "actor_lora_dim": RANK,
        "reward_function": ("builtin:regex=a",),
        "max_prompt_seq_len": 96,
        "max_answer_seq_len": 16,
        "per_device_generation_batch_size": 12,
    }
    plan = plan_stage("rlhf", options, home, card=None).plan
    # A GPU keeps them of 16 rows of 128 columns.
    assert plan.memory_plan.cache == 2 * LAYERS * HIDDEN * 2 * 16 * 128
    critic, head = plan.roles["critic"], HIDDEN
    assert plan.roles["reference"].weights == 0
    assert critic.adapters == 4 * (ADAPTER + head)
    kept = sum(r.weights + r.adapters + r.gradients + r.moments for r in plan.roles.values())
    assert plan.phases[GENERATION] == kept + plan.memory_plan.cache
    moving = sum(r.activations + r.logits for r in plan.roles.values())
    assert plan.phases[TRAINING] == kept + moving


def test_rows_are_planned_beside_what_graphs_of_training_keep(home):
    options = {
        **{"actor_model_name_or_path": "Qwen3-0.6B", "actor_lora_dim": 16, "algorithm": "grpo"},
        **{"reward_function": ("builtin:regex=a",), "per_device_generation_batch_size": 256},
        **{"max_prompt_seq_len": 256, "max_answer_seq_len": 1024},
        **{"per_device_training_batch_size": 8},
    }
    card, decoded = find_card("RTX 4090"), {}
    for graphs in ("on", "off"):
        asked = options | {"training_graphs": graphs}
        plan = plan_stage("rlhf", asked, home, card=card).plan
        kept = plan.time.graph_bytes_on(card)
        assert (kept > 0) == (graphs == "on")
        assert plan.phases[GENERATION] + kept <= card.usable_bytes
        decoded[graphs] = plan.config.batch.rows_decoded
    assert decoded["on"] < decoded["off"] < 256


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "name", "rows"),
    [
        *[("Llama-3.2-1B", name, 256) for name in ("RTX 4090", "A100", "H200")],
        *[("Llama-3.1-8B", name, n) for name, n in (("RTX 4090", 24), ("A100", 256))],
    ],
)
def test_a_card_decodes_as_many_responses_at_a_time_as_it_holds(home, model, name, rows):
    options = {
        **{"actor_model_name_or_path": model, "actor_lora_dim": 16, "algorithm": "grpo"},
        **{"reward_function": ("builtin:regex=a",), "num_generations": 8},
        **{"max_prompt_seq_len": 256, "max_answer_seq_len": 1024},
        **{"per_device_generation_batch_size": 16, "generation_batches": 16},
    }
    device = find_card(name)
    planned = plan_stage("rlhf", options, home, card=device)
    plan = planned.better or planned.plan
    assert plan.config.batch.rows_decoded == rows
    assert plan.phases[GENERATION] <= device.usable_bytes
    assert f"rollouts {rows} of 256 responses at a time (--max" in " ".join(
        "\n".join(lines(planned)).split()
    )
    assert "max_num_seqs" not in (planned.command or "")


@pytest.mark.thorough
def test_a_published_critic_is_an_adapter_beside_the_actors(home):
    options = {
        **dict.fromkeys(("actor_model_name_or_path", "critic_model_name_or_path"), "opt-125m"),
        **dict.fromkeys(("actor_lora_dim", "critic_lora_dim"), 8),
    }
    roles = plan_stage("rlhf", options, home, card=None).plan.roles
    head = 768 * 2  # of the base, in 16 bits, beside the one that trains
    assert {name: role.weights for name, role in roles.items() if name != "actor"} == {
        "reference": 0,
        "critic": head,
        "reward": head,
    }
    assert roles["critic"].adapters == roles["reward"].adapters > 0


def replanned(planned, usable):
    """The plan of the command that was printed."""
    _, name, *argv = shlex.split(planned.command)
    processes = 1
    if "--num_gpus" in argv:
        at = argv.index("--num_gpus")
        processes, argv = int(argv[at + 1]), argv[:at] + argv[at + 2 :]
    options = typed_options(parse_config(STAGES[name].config, argv))
    with planning(processes) as home:
        return plan_stage(name, options, home, card=card(usable), processes=processes)


SEARCHES = [
    ("sft", {"lora_dim": 4}, 1, 0.7),
    ("sft", {"lora_dim": 4}, 1, 0.1),
    ("dpo", {"lora_dim": 4}, 1, 0.1),
    ("reward", {}, 2, 0.3),
    ("sft", {}, 1, 0.15),
]


@pytest.mark.thorough
def test_a_divergence_from_a_teacher_takes_its_chunk_of_tables(home):
    """2^25 logits at a time, of 36 bytes for a KL and 52 for the JSD, 12 for cross-entropy."""
    options = {"actor_model_name_or_path": "Qwen/Qwen3-0.6B", "teacher_system_prompt": "x"}

    def logits(loss):
        planned = plan_stage("distill", {**options, "distill_loss": loss}, home, card=None)
        return planned.plan.roles["actor"].logits

    plain = logits("sampled_reverse_kl")
    assert [logits(loss) - plain for loss in ("reverse_kl", "forward_kl", "jsd")] == [
        2**25 * (36 - 12),
        2**25 * (36 - 12),
        2**25 * (52 - 12),
    ]


@pytest.mark.parametrize(("name", "options", "processes", "share"), SEARCHES)
def test_the_command_that_is_printed_fits_and_takes_the_same_step(
    tiny, name, options, processes, share
):
    options = {"model_name_or_path": tiny, "max_seq_len": 512, **options}
    with planning(processes) as home:
        most = plan_stage(name, options, home, card=card(10**12), processes=processes)
        assert most.fits
        assert most.changes is None
        usable = int(share * most.plan.peak)
        planned = plan_stage(name, options, home, card=card(usable), processes=processes)
    assert planned.plan.peak > usable or planned.fits
    again = replanned(planned, usable)
    assert again.fits
    batch = again.plan.config.batch
    assert batch.per_device_train_batch_size * batch.gradient_accumulation_steps == 16


@pytest.mark.parametrize(("processes", "wanted"), [(4, {"zero_stage": 2}), (1, {"offload": True})])
def test_weights_that_train_are_shared_over_processes_or_moved_to_the_host(tiny, processes, wanted):
    """A row, recomputed, does not fit: moments have to go, to other processes if there are any."""
    options = {"model_name_or_path": tiny, "per_device_train_batch_size": 1, "max_seq_len": 32}
    options["gradient_checkpointing"] = True
    with planning(processes) as home:
        least = plan_stage("sft", options, home, card=None, processes=processes).plan.peak
        planned = plan_stage("sft", options, home, card=card(0.87 * least), processes=processes)
        assert planned.fits is False
        assert planned.changes.items() >= wanted.items()


def test_recomputation_that_was_left_open_comes_before_tiny_micro_batches(tiny, home):
    options = {"model_name_or_path": tiny, "lora_dim": 4, "max_seq_len": 512}
    kept = plan_stage("sft", options, home, card=card(10**12)).plan
    planned = plan_stage("sft", options, home, card=card(kept.peak // 5))
    assert planned.fits
    assert planned.plan.config.model.gradient_checkpointing is True
    assert planned.plan.config.batch.per_device_train_batch_size > 1
    typed = options | {"gradient_checkpointing": False}
    planned = plan_stage("sft", typed, home, card=card(kept.peak // 5))
    assert planned.better is None or not planned.better.config.model.gradient_checkpointing


@pytest.mark.smoke
def test_the_largest_micro_batch_fits_and_one_row_more_does_not(tiny, home):
    options = {"model_name_or_path": tiny, "lora_dim": 4, "max_seq_len": 512}
    usable = plan_stage("sft", options, home, card=card(10**12)).plan.peak
    options["gradient_checkpointing"] = False
    planned = plan_stage("sft", options, home, card=card(usable))
    rows = planned.largest["per_device_train_batch_size"]
    assert rows == 16
    name = "per_device_train_batch_size"
    assert plan_stage("sft", options | {name: rows}, home, card=card(usable)).fits
    assert not plan_stage("sft", options | {name: rows + 1}, home, card=card(usable)).fits


@pytest.mark.parametrize(
    "size", ["24GB", "24 GB", "24gb", "22.351741790771484GiB", "RTX 4090", "4090"]
)
def test_devices_are_named_by_size_or_card(size):
    assert find_card(size).memory_bytes == pytest.approx(24e9, rel=1e-6)
    # A tenth, the context, and what a card of that size may lack of it.
    assert find_card(size).usable_bytes < 0.9 * 24e9


def run(capsys, line):
    """Exit code and standard output of ``dschat-lora plan``."""
    code = 0
    try:
        verbs.plan(shlex.split(line))
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr().out


@pytest.mark.smoke
def test_a_plan_is_one_screen_or_one_json_object(tiny, capsys):
    line = f"sft --model_name_or_path {tiny} --lora_dim 4 --for 24GB"
    code, text = run(capsys, line)
    assert code == 0
    assert len(text.splitlines()) <= 24
    assert "--data_path" not in text  # of a directory, which may be of the bundled model
    assert max(map(len, text.split("$ ")[0].splitlines())) <= 80
    code, text = run(capsys, f"{line} --json")
    facts = json.loads(text)
    assert facts["fits"] is True
    assert facts["peak"] == max(facts["phases"].values())
    assert facts["recomputation"]["peak_with"] < facts["recomputation"]["peak_without"]


def test_time_is_work_or_launching_and_that_of_each_kernel_of_decoding():
    time = StepTime(
        tokens=1000,
        flops=0.4 * 989.4e12,
        launches={True: 12_000, False: 24_000},
        generated=500,
        decode_bytes=2 * 0.6 * 3350e9,
        decode_launches={True: 250_000, False: 1_000_000},
    )
    h100 = find_card("H100")
    assert time.on(card(10**9)) is None  # of which the peak is not known
    quick, slow = time.on(h100), time.on(h100, fused=False)
    times = {"work": 1.0, "launching": 0.72, "replaying": 0, "blocks": 0, "decoding": 2.0 + 1.0}
    assert vars(quick) == pytest.approx(times)
    assert (quick.training, quick.total) == pytest.approx((1.0, 4.0))
    assert vars(slow) == pytest.approx(times | {"launching": 1.44, "decoding": 2.0 + 4.0})
    assert slow.training == pytest.approx(1.44)
    eager = time.on(h100, fused=False, graphs=False)
    assert eager.decoding == pytest.approx(120.0)
    assert replace(time, fused=False).on(h100) == slow
    (first, *others) = expected_speeds(time, h100)
    assert [each.device for each in others] == ["H200", "A100", "RTX 4090", "T4"]
    assert first.training == pytest.approx(1000)
    assert first.training_unfused == pytest.approx(1000 / 1.44)
    assert first.decoding == pytest.approx(500 / 3)
    assert first.decoding_without_graphs == pytest.approx(500 / 30)
    assert len(expected_speeds(time, find_card("t4"))) == 4


def test_expected_speeds_lie_about_what_an_h200_measured(home):
    results = json.loads((ROOT / "benchmarks/results/nvidia-h200.json").read_text())
    options = {"model_name_or_path": "facebook/opt-1.3b", "max_seq_len": 512}
    options |= {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1}
    h200, shares = find_card("H200"), {}
    for each in results["throughput-1.3b"]["cases"]:
        if each["case"] == "ours" and each["workload"] == "full":
            plan = plan_stage("sft", {**options, "lora_dim": each["lora_dim"]}, home, card=h200)
            (speed, *_) = expected_speeds(plan.plan.time, h200)
            shares[each["lora_dim"]] = speed.training / each["tokens_per_second"]
    assert shares == {16: pytest.approx(1, abs=0.1), 128: pytest.approx(1, abs=0.1)}
    step = {True: 24 * 16 + 20, False: 24 * 16 + 20}
    for each in results["decode"]["cases"]:
        if "step_milliseconds" in each:
            time = StepTime(0, 0.0, step, decode_bytes=each["gigabytes_per_step"] * 1e9)
            expected = replace(time, decode_launches=step).on(h200).decoding
            assert 0.6 < 1e3 * expected / each["step_milliseconds"] < 1.6


def test_a_small_model_is_planned_with_graphs_and_told_without(capsys):
    """As fast as an H200 works and its host launches what graphs do not hold."""
    line = "sft --model_name_or_path Qwen/Qwen3-0.6B --lora_dim 16 --for H200"
    _, text = run(capsys, line)
    plan = json.loads(run(capsys, f"{line} --json")[1])
    kernels, tokens = plan["kernels_per_step"], 16 * 512
    outside, work = 80, plan["flops_per_step"] / (0.4 * 989.4e12)
    slow = outside * 60e-6 + (kernels - outside) * 4e-6
    assert plan["seconds_per_step"] == pytest.approx(work + slow)
    words = " ".join(text.split())
    assert "passes of training run as CUDA graphs, which keep" in words
    assert f"{tokens / (kernels * 60e-6):,.0f} tokens/s" in words
    assert f"{tokens / (work + slow):,.0f} tokens/s" in words


@pytest.mark.thorough
def test_launches_are_of_every_micro_batch_and_role(tiny, home):
    def launches(stage, **options):
        options = {"lora_dim": RANK, "max_seq_len": 64, **options}
        if stage == "rlhf":
            options = {
                "actor_model_name_or_path": tiny,
                "actor_lora_dim": RANK,
                "reward_function": "builtin:length=12",
                "algorithm": "grpo",
                "num_generations": 4,
                "generation_batches": 1,
                "per_device_generation_batch_size": 16,
                "per_device_training_batch_size": 8,
                **{n: v for n, v in options.items() if n not in ("lora_dim", "max_seq_len")},
            }
        else:
            options["model_name_or_path"] = tiny
        time = plan_stage(stage, options, home, card=None).plan.time
        return time.launches[True], time.decode_launches[True]

    one, _ = launches("sft", gradient_accumulation_steps=1)
    assert launches("sft", gradient_accumulation_steps=3) == (3 * one, 0)
    # Three blocks of OPT: 6 adapted layers of 3 and 8 kernels, of which 3 share their first, its
    # gradient and a sum; 2 norms, and the rest.
    forward, reference = 3 * (6 * 3 - 2 + 2 + 6) + 40, 3 * (6 + 2 + 6) + 40
    assert one == 3 * (6 * 8 - 2 * 3 + 2 * 2 + 12) + 80
    # Two steps of a micro-batch; of the first the old log-probabilities are the update's.
    once, decoding = launches("rlhf")
    assert once == 2 * (one + reference) + forward
    assert launches("rlhf", ppo_epochs=2)[0] - once == 2 * one
    assert launches("rlhf", use_rollout_logprobs=True)[0] == 2 * (one + reference)
    assert launches("rlhf", gradient_accumulation_steps=2)[0] == 2 * (one + reference)
    assert launches("rlhf", kl_in="reward")[0] == 2 * (one + reference + forward)
    # A response is as long as it may be.
    assert launches("rlhf", max_answer_seq_len=512)[1] == 2 * decoding
    assert decoding % 256 == 0


def test_a_step_that_waits_for_launches_is_said_to(capsys):
    line = "sft --model_name_or_path opt-125m --lora_dim 16 --max_seq_len 64 --for H100"
    eager = f"{line} --per_device_train_batch_size 1 --training_graphs off"
    _, text = run(capsys, eager)
    words = " ".join(text.split())
    assert "launches launching kernels takes about 47 ms and their work 0 ms" in words
    assert "limited by kernel launches" in words
    _, text = run(capsys, f"{line} --per_device_train_batch_size 1024 --compile")
    assert "launching" not in text


@pytest.mark.parametrize(
    ("device", "names"),
    [
        ("", ["H200", "A100", "RTX 4090", "T4"]),
        ("--for H100", None),  # whose speed is on the line of time
        ("--for 24GB", ["L4", "A10", "RTX 3090", "RTX 4090"]),
        ("--for 24GiB", ["L4", "A10", "RTX 3090", "RTX 4090"]),
        ("--for 23GB", None),
    ],
)
def test_speeds_are_of_cards_that_could_be_meant(device, names, capsys):
    _, text = run(capsys, f"sft --model_name_or_path opt-125m --lora_dim 16 {device}")
    rows = text.partition("tokens/s, estimated")[2].split("\n\n")[0].splitlines()[2:]
    assert [row.rsplit(None, 1)[0] for row in rows] == (names or [])
    assert ("tokens/s, estimated" in text) is (names is not None)


def test_rows_that_would_be_dropped_are_counted_where_data_is_named(tmp_path, capsys):
    """Of six rows, one a word of 40 tokens; none is held out."""
    rows = [{"prompt": f"{n} plus 1 is", "completion": f" {n + 1}"} for n in range(5)]
    rows.append({"prompt": "Hi" * 40, "completion": " Hello"})
    path, cache = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "cache"
    line = f"sft --data_path {path} --max_seq_len 32 --eval_ratio 0 --data_output_path {cache}"
    _, text = run(capsys, f"{line} --lora_dim 4 --for T4")
    assert "too long     1 dropped, 0 truncated (16.7% of the rows)" in text
    audit = json.loads(run(capsys, f"{line} --json")[1])["data"]
    assert (audit["train_samples"], audit["dropped_rows"]) == (5, 1)
    assert f"the data's {audit['tokens']} tokens" in " ".join(text.split())


def test_data_of_a_model_without_files_is_said_to_be_not_counted(tmp_path, capsys):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    code, text = run(capsys, f"sft --model_name_or_path opt-125m --data_path {path}")
    assert code == 0
    words = "not counted: the tokenizer of opt-125m is not in a directory here"
    assert words in " ".join(text.split())


def test_the_largest_micro_batch_stands_below_the_settings_that_it_belongs_to(capsys):
    line = "sft --model_name_or_path opt-1.3b --lora_dim 4 --for 8GB"
    _, text = run(capsys, f"{line} --per_device_train_batch_size 64")
    names = [each.split()[0] for each in text.splitlines() if each[:2] == "  " and each[2] != " "]
    assert names[-4:] == ["device", "that", "largest", "time"]
    # In the batches that fit, and not on the bundled data, as a model is named.
    assert "--per_device_train_batch_size 64" not in text.splitlines()[-1]
    assert text.splitlines()[-1].startswith("$ dschat-lora sft ")
    assert text.splitlines()[-1].endswith(" --data_path FILE")


def test_inputs_on_the_host_are_planned_as_on_a_gpu(tiny, home):
    options = {"model_name_or_path": tiny, "lora_dim": RANK, "max_seq_len": 128}
    options |= {"gradient_checkpointing": True}
    kept, moved = (
        plan_stage("sft", {**options, **more}, home, card=None).plan.peak
        for more in ({}, {"offload_activations": True})
    )
    rows, inputs = 16, LAYERS - 2  # two of the blocks' inputs stay
    assert kept - moved == inputs * rows * 128 * HIDDEN * 2


def test_a_mask_is_planned_where_no_kernel_attends_to_sequences_one_by_one(tiny, home):
    """A number of 16 bits for each of T x T pairs; 18.5 GiB and 11.5 for it are 30."""
    length = 78_475
    options = {"lora_dim": 32, "base_bits": 4, "max_seq_len": length, "offload_activations": True}
    options |= {"gradient_checkpointing": True, "per_device_train_batch_size": 1}
    llama = {"model_name_or_path": "Llama-3.1-8B"}
    long = plan_stage("sft", llama | options, home / "llama", card=None).plan
    assert long.peak / 2**30 == pytest.approx(18.5, abs=0.1)
    rewarded = {"actor_model_name_or_path": tiny, "reward_function": ("builtin:regex=a",)}
    ppo = plan_stage("rlhf", rewarded | {"per_device_training_batch_size": 3}, home, card=None).plan
    of_pair = plan_stage("dpo", {"model_name_or_path": tiny, "max_seq_len": 32}, home, card=None)

    def phase(plan):
        return replace(plan, known={}).phases[TRAINING]

    for plan, rows, row in ((long, 1, length), (ppo, 2 * 3, 512), (of_pair.plan, 16, 2 * 32)):
        without = phase(plan)
        with planning(1, find_card("T4")):
            assert phase(plan) - without == rows * row**2 * 2


def test_nothing_that_fits_is_exit_code_1(tiny, capsys):
    code, text = run(capsys, f"sft --model_name_or_path {tiny} --for 0.1GB")
    assert code == 1
    assert "does not fit, and no settings were found" in " ".join(text.split())


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("line", "stage", "model"),
    [
        ("", "sft", None),
        ("--for 24GB --lora_dim 4 my/model", "sft", "my/model"),
        ("Qwen3-8B --for H100", "sft", "Qwen3-8B"),
        ("TINY", "sft", "TINY"),
        ("TINY/config.json --lora_dim 4", "sft", "TINY/config.json"),
        ("dpo my/model", "dpo", "my/model"),
        ("rlhf my/model", "rlhf", "my/model"),
        ("distill my/model", "distill", "my/model"),
        ("opt-1.3b", "opt-1.3b", None),
        ("mine.yaml", "mine.yaml", None),
        ("configs/mine.yml", "configs/mine.yml", None),
    ],
)
def test_a_model_may_stand_without_a_stage_or_option(tiny, monkeypatch, line, stage, model):
    shown = []
    show = lambda what, options, **_: shown.append((what, options)) or True  # noqa: E731
    monkeypatch.setattr(verbs, "late", lambda _: show)
    verbs.plan(shlex.split(line.replace("TINY", tiny)))
    ((named, options),) = shown
    assert named == stage
    names = [value for name, value in (options or {}).items() if name in MODEL_OPTIONS]
    assert names == ([model.replace("TINY", tiny)] if model else [])


def test_four_bits_are_planned_without_their_package(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # an import of it fails
    monkeypatch.setattr(option_checks.importlib.util, "find_spec", lambda _: None)
    code, text = run(capsys, f"{tiny} --base_bits 4 --lora_dim 4 --for 24GB --json")
    assert code == 0
    assert json.loads(text)["fits"]
    with pytest.raises(ValueError, match="--base_bits 4 needs a package"):
        option_checks.check_installed()  # of a run


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("sft --model_name_or_path ./nowhere", ["./nowhere", "does not exist"]),
        ("nobody/nothing", ["nobody/nothing", "no directory of this name, and "]),
        ("rlhf --actor_model_name_or_path opt-125m", ["--critic_model_name_or_path"]),
        ("sft --tensor_parallel_size 3 --num_gpus 3 --lora_dim 4", ["--tensor_parallel_size 3"]),
    ],
)
def test_mistakes_that_a_model_shows_are_named(line, parts):
    with pytest.raises(ValueError, match=r".") as error:
        verbs.plan(shlex.split(line))
    assert not [part for part in parts if part not in str(error.value)], error.value


@pytest.mark.parametrize(("model", "stage"), [(None, None)] if ALL else [("OPT-1.3B", "SFT")])
def test_tables_of_the_documentation_are_what_the_planner_says(model, stage):
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import memory_table
    finally:
        sys.path.pop(0)
    chosen = {} if model is None else {"models": [model], "stages": [stage]}
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").splitlines()
    text = (ROOT / "benchmarks" / "speed.md").read_text(encoding="utf-8").splitlines()
    for row in memory_table.rows(**chosen):
        assert row in text
        assert (row in page) is ("| SFT |" in row)
    for row in memory_table.recipe_rows() if model is None else ():
        assert row in text
        assert "| - |" not in row  # it fits a card of 12 GB, and so the others


def test_the_plan_as_json_has_no_paths_of_placeholders(home):
    planned = plan_stage("sft", {"model_name_or_path": "opt-125m"}, home, card=None)
    assert str(home) not in json.dumps(to_dict(planned))
    assert "--model_name_or_path facebook/opt-125m" in planned.command


def test_plans_are_of_what_would_train():
    def command(*given, **options):
        return dl.plan(*given, **options).command

    assert command("sft", "Qwen/Qwen3-0.6B").endswith("--lora_dim 16")
    assert "--lora_dim 0" in command("sft", "Qwen/Qwen3-0.6B", lora_dim=0)


def test_a_plan_of_rows_is_that_of_the_command(tmp_path, capsys):
    rows = [{"prompt": f"{n} plus 1 is", "completion": f" {n + 1}"} for n in range(16)]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    plan = dl.plan("sft", data=rows, lora_dim=8, device="24GB")
    verbs.plan(["sft", "--data_path", path, *"--lora_dim 8 --for 24GB --json".split()])
    facts = json.loads(capsys.readouterr().out)
    for name in ("peak", "roles", "largest", "parameters"):
        assert plan.facts[name] == facts[name], name
    assert plan.fits is True
    assert (plan.peak, str(plan)[:11]) == (facts["peak"], "plan of sft")
