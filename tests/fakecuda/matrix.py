"""Stages of tiny models on the fake device: families x types x ZeRO x stages x cards.

``PYTHONPATH=.:tests python -m fakecuda.matrix FILE.json`` runs all rows and prints a table of them,
which the file gets too; families that are named behind it are run alone.
"""

import json
import random
import sys
import tempfile
from itertools import islice, product
from pathlib import Path

from dschat_lora.assets import BUNDLED_DATA
from dschat_lora.models.option_checks import KINDS
from fakecuda import shim
from fakecuda.conftest import FakeDevice
from helpers.spread import pairs

_MIXED = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_PARTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def _stretched(kind, **parameters):
    """Llama with rotary embeddings that reach further than those it was trained with."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **parameters}
    return "llama", {"rope_parameters": rope}


# name -> (type, what differs from the sizes above)
FAMILIES = {
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gpt_neox": ("gpt_neox", {}),
    "llama": ("llama", {}),
    "llama linear": _stretched("linear"),
    "llama dynamic": _stretched("dynamic"),
    "llama yarn": _stretched("yarn", original_max_position_embeddings=128),
    "llama longrope": _stretched("longrope", original_max_position_embeddings=128, **_PARTS),
    "mistral": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma3_text": ("gemma3_text", {"head_dim": 16, "sliding_window": 16, "layer_types": _MIXED}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "olmo3": ("olmo3", {"sliding_window": 16, "layer_types": _MIXED}),
    "phi3": ("phi3", {"original_max_position_embeddings": 512}),
    "granite": ("granite", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 16, **_EXPERTS}),
    "olmoe": ("olmoe", _EXPERTS),
}
# Families whose steps of decoding are no graph, and why.
UNCAPTURED = {"llama dynamic": "waits for the device", "lfm2": "has a cache of its own"}
# Families of which transformers has no classifier, and so we no reward model.
UNSCORED = {"granite", "lfm2", "olmoe"}
# Families with routed experts, which cannot be packed into 4 bits as they are loaded.
ROUTED = {"mixtral", "qwen3_moe", "olmoe"}
DIVIDED = {"llama linear", "llama yarn", *KINDS}
SETTINGS = {
    "dtype": ["bf16", "fp16", "fp32"],
    "zero": [0, 1, 2, 3],
    "memory": ["", "offload", "recompute", "offload, recompute"],
    "processes": ["1", "2", "2 to a model"],
    "card": ["h200", "4090", "t4"],
    "base_bits": [16, 4],
}
_SFT = ("--lora_dim", "8", "--sample_generations", "0")
_RL = ("--actor_lora_dim", "8", "--generation_batches", "1", "--max_answer_seq_len", "20")
_RL += ("--reward_function", "fakecuda.programs:no_reward", "--eval_prompts", "4")
_GROUPS = (*_RL, "--num_generations", "4", "--algorithm")
STAGES = {
    "sft": ("step1_sft", _SFT),
    "reward": ("step2_reward", ("--lora_dim", "8")),
    "dpo": ("step2_dpo", ("--lora_dim", "8")),
    "ppo": ("step3_rlhf", (*_RL, "--critic_lora_dim", "8")),
    "grpo": ("step3_rlhf", (*_GROUPS, "grpo")),
    "rloo": ("step3_rlhf", (*_GROUPS, "rloo")),
}


def allowed(row):
    """Whether a run with these settings is not refused."""
    if "offload" in row["memory"] and row["zero"] == 0:
        return False
    if row["base_bits"] == 4 and row["family"] in ROUTED:
        return False
    if row["processes"] == "2 to a model":
        return row["base_bits"] == 16 and row["family"] in DIVIDED
    return row["stage"] not in ("reward", "ppo") or row["family"] not in UNSCORED


def rows():
    """Each family with each stage; settings are drawn, of which those with new pairs are taken."""
    chosen = [
        _row("llama", "grpo", "bf16", 3, "offload, recompute", "2", "h200", 16),
        _row("qwen3_moe", "grpo", "fp16", 0, "", "1", "t4", 16),
        _row("mixtral", "grpo", "bf16", 1, "", "2", "h200", 16),
        _row("llama dynamic", "rloo", "bf16", 2, "offload", "1", "4090", 16),
        _row("mistral", "sft", "fp32", 1, "", "2 to a model", "h200", 16),
    ]
    taken = {(row["family"], row["stage"]) for row in chosen}
    seen, drawn = set().union(*map(pairs, chosen)), random.Random(0)
    settings = list(product(*SETTINGS.values()))
    for family, stage in product(FAMILIES, STAGES):
        fitting = [_row(family, stage, *each) for each in drawn.sample(settings, 60)]
        fitting = [row for row in fitting if allowed(row)]
        if (family, stage) not in taken and fitting:
            chosen.append(max(fitting, key=lambda row: len(pairs(row) - seen)))
            seen |= pairs(chosen[-1])
    return chosen


def _row(family, stage, *settings):
    return {"family": family, "stage": stage, **dict(zip(SETTINGS, settings, strict=True))}


def name_of(row):
    return ", ".join(str(value) for value in row.values() if value != "")


def options_of(row):
    """The options of a row's settings."""
    options = ["--dtype", row["dtype"], "--zero_stage", str(row["zero"])]
    options += ["--base_bits", str(row["base_bits"])]
    options += ["--offload"] * ("offload" in row["memory"])
    if row["processes"] == "2 to a model":
        options += ["--tensor_parallel_size", "2"]
    if "recompute" in row["memory"]:
        roles = {"ppo": ["actor_", "critic_"], "grpo": ["actor_"], "rloo": ["actor_"]}
        options += [f"--{role}gradient_checkpointing" for role in roles.get(row["stage"], [""])]
    return options


def captures(row):
    """Whether rollouts of a row replay graphs."""
    if STAGES[row["stage"]][0] != "step3_rlhf" or row["processes"] == "2 to a model":
        return False
    if row["family"] in ROUTED:  # other kernels for experts wait
        return (row["dtype"], row["card"]) == ("bf16", "h200")
    return row["family"] not in UNCAPTURED


def run(fake_device, row, directory, *, steps=2, layers=2, more=()):
    """What was noted of a run, with its ``status``, ``skipped`` steps and what is ``said``."""
    lines = islice(BUNDLED_DATA["train"].open(encoding="utf-8"), 36)
    for name, count in (("train", 32), ("eval", 4)):
        (directory / f"{name}.jsonl").write_text("".join(islice(lines, count)), encoding="utf-8")
    script, options = STAGES[row["stage"]]
    actor = "actor_" if script == "step3_rlhf" else ""
    base, out = directory / "base", directory / "out"
    noted = fake_device.run(
        "fakecuda.families:stage_of",
        family=row["family"],
        layers=layers,
        directory=str(base),
        script=f"training/{script}/main.py",
        options=[
            *(f"--{actor}model_name_or_path", str(base), *options, *options_of(row), *more),
            *("--data_path", str(directory / "train.jsonl"), "--max_steps", str(steps)),
            *("--eval_data_path", str(directory / "eval.jsonl"), "--output_dir", str(out)),
        ],
        card=row["card"],
        world_size=int(row["processes"][0]),
    )
    record = out / "run.json"
    status = json.loads(record.read_text())["status"] if record.exists() else noted["error"]
    metrics = map(json.loads, (out / "metrics.jsonl").open()) if record.exists() else ()
    skipped = [row for row in metrics if row.get("skipped")]
    return noted | {"status": status, "skipped": skipped}


def graphs_of(row, found):
    """What became of CUDA graphs, in words."""
    if found["replays"]:
        return f"{found['graphs']}, replayed {found['replays']} times"
    if STAGES[row["stage"]][0] != "step3_rlhf":
        return "no rollouts"
    reasons = [UNCAPTURED[row["family"]]] if row["family"] in UNCAPTURED else found["said"][:1]
    reasons += ["a model on 2 GPUs"] * (row["processes"] == "2 to a model")
    return f"none: {'; '.join(reasons)}"


def result_of(row, found):
    """A row of the table."""
    ended = found["status"] if found["error"] is None else found["error"].splitlines()[-1]
    ended += f", {len(found['skipped'])} steps skipped" if found["skipped"] else ""
    peak = f"{found['peak'] / 2**20:.1f} MiB"
    return row | {"graphs": graphs_of(row, found), "peak": peak, "ended": ended}


def main(path, *families):
    table, chosen = [], families or FAMILIES
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        device = FakeDevice(shim.build(directory), directory)
        for number, row in enumerate(row for row in rows() if row["family"] in chosen):
            (directory / str(number)).mkdir()
            table.append(result_of(row, run(device, row, directory / str(number))))
            sys.stdout.write(f"| {' | '.join(map(str, table[-1].values()))} |\n")
            sys.stdout.flush()
        device.stop()
    Path(path).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
