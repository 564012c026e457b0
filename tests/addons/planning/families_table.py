"""Writes dschat_lora/addons/planning/families.json from the cells that families.matrix found.

``PYTHONPATH=.:tests:tests/addons/planning python -m families_table MATRIX.json`` adds what the
matrix does not run: 4 bits, batches of ``serve``, tensor parallelism and, with ``--llama_cpp
CHECKOUT``, what llama.cpp's converter knows. Without it the cells of GGUF stay as they are. So do
the rows of types that the matrix lacks.
"""

import argparse
import json
import re
import tempfile
from pathlib import Path

import torch
import transformers

from dschat_lora.addons.planning.families import FAMILIES, NO_EXPERTS
from dschat_lora.addons.serving.mixed import AdapterRows, mix_adapters
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.generation.generate import check_cache
from dschat_lora.generation.kv_cache import TRIED
from dschat_lora.generation.slots import SlotRows
from dschat_lora.lora.layers import is_quantized
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.loading import share_parameters
from dschat_lora.models.option_checks import check_divides
from dschat_lora.models.source import find_model
from dschat_lora.perf.coverage import coverage
from families.checks import PAD, Family
from helpers.kinds import LEFT_OUT
from helpers.roles import Words

# Checks of the matrix by column; all must hold.
CHECKS = {
    "trains": ("sft",),
    "packed": ("packed",),
    "rollouts": ("greedy", "logprobs"),
    "ppo": ("ppo",),
    "grpo": ("grpo",),
    "merge": ("merge",),
    "peft": ("to_peft", "from_peft"),
}
UNPACKED = "rows hold one sample each, as this architecture mixes those of a packed row"
MOST_WHOLE = 0.1  # of the weights in blocks that may keep 16 bits beside a base in 4


def from_matrix(rows):
    """Columns of each type by the matrix's rows ``{"type", "check", "ok", "found"}``."""
    by_type = {}
    for row in rows:
        by_type.setdefault(row["type"], {})[row["check"]] = _cell(row)
    return {kind: _columns(cells) for kind, cells in by_type.items()}


def _cell(row):
    if not row["ok"]:
        return re.sub(r"^error: --\S+ \S+: (its model cannot be loaded: )?", "", row["found"])
    if row["check"] == "packed" and row["found"].startswith("unpacked"):
        return UNPACKED
    return True


def _columns(cells):
    columns = {}
    for column, checks in CHECKS.items():
        tried = [cells[check] for check in checks if check in cells]
        if tried:
            columns[column] = next((cell for cell in tried if cell is not True), True)
    return columns


def attempt(check, family, *arguments):
    """True, or in words why the check fails; the same for all types that fail alike."""
    try:
        return check(family, *arguments) or True
    except Exception as error:  # noqa: BLE001 - a cell says what failed
        kind = "" if isinstance(error, AssertionError | ValueError) else f"{type(error).__name__}: "
        text = kind + str(error).partition("\n")[0][:300]
        (name,) = _fields(family)["architectures"]
        for own, general in (
            (f"--model_name_or_path {family.base}: ", ""),
            ("--tensor_parallel_size 2: ", ""),
            (f"a {family.kind} model", "this type"),
            (name, "it"),
        ):
            text = text.replace(own, general)
        return text


def _fields(family):
    return json.loads((family.base / "config.json").read_text(encoding="utf-8"))


def experts(family):
    """Why experts do not learn, by the modules."""
    parts = [part for part in coverage(family.ours()).parts if part.kind.startswith("experts")]
    if not parts:
        return NO_EXPERTS
    frozen = dict.fromkeys(part.kind for part in parts if not part.learns)
    return f"frozen: {', '.join(frozen)}" if frozen else None


def four_bit(family):
    """A step on a base in 4 bits, of which few weights in blocks are whole."""
    model = build_causal_lm(
        find_model(str(family.base)),
        Words(),
        ModelConfig(attn_implementation=family.attention, base_bits=4),
        LoraConfig(lora_dim=4),
        dtype=torch.float32,
        seed=1,
        meta=False,
    ).model
    model(input_ids=torch.arange(3, 24)[None]).logits.logsumexp(-1).sum().backward()
    inside = [(n, p) for n, p in model.named_parameters() if re.search(r"\.\d+\.", n)]
    whole = sum(p.numel() for n, p in inside if not is_quantized(p) and "lora_" not in n)
    packed = sum(2 * p.numel() for _, p in inside if is_quantized(p))
    share = whole / (whole + packed)
    if share > MOST_WHOLE:
        return f"{share:.0%} of the weights in blocks keep 16 bits"
    return None


@torch.no_grad()
def serve(family):
    """Rows of two adapters have the logits that each model has alone, with a prefix and without."""
    base = family.stock().requires_grad_(False)
    adapted = build_causal_lm(
        find_model(str(family.base)),
        Words(),
        ModelConfig(attn_implementation=family.attention),
        LoraConfig(lora_dim=4),
        dtype=torch.float32,
        seed=1,
        meta=False,
        base=base,
    ).model.eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    first, second = [*range(3, 23)], [*range(24, 5, -1)]
    check_cache(base)
    mixed, rows = share_parameters(base), AdapterRows(base.device)
    TRIED[mixed] = TRIED.get(base, False)
    mix_adapters(mixed, [adapted], rows=rows)
    slots = SlotRows(mixed.eval(), rows, pad_id=PAD)
    for prompts in ([first, second], [[*first, 5, 6], [*second, 7, 8, 9]]):
        alone = [
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            for model, ids in zip((base, adapted), prompts, strict=True)
        ]
        with slots.kernels():
            together, _ = slots.join(prompts, [0, 1])
        slots.leave(1)
        slots.leave(0)
        error = max(float((a - b).abs().max()) for a, b in zip(alone, together, strict=True))
        assert error < 1e-4, f"logits differ by {error:.2g}"


def tensor_parallel(family):
    """Whether two processes can divide it, by its configuration."""
    check_divides(_fields(family), 2)


def known_classes(checkout):
    """Names of classes that the converters of a checkout of llama.cpp name."""
    files = [checkout / "convert_hf_to_gguf.py", *(checkout / "conversion").glob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files if path.is_file())
    return set(re.findall(r'"(\w+(?:For\w+|LMHeadModel|Model))"', text))


def gguf(family, known):
    """Whether the converter knows the class of the model."""
    (name,) = _fields(family)["architectures"]
    return None if name in known else "llama.cpp's converter does not know its class"


def main():
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("matrix", type=Path)
    parser.add_argument("--llama_cpp", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    types = from_matrix(json.loads(options.matrix.read_text(encoding="utf-8")))
    before = json.loads(FAMILIES.read_text(encoding="utf-8"))["types"] if FAMILIES.exists() else {}
    known = known_classes(options.llama_cpp) if options.llama_cpp else None
    for kind, columns in types.items():
        with tempfile.TemporaryDirectory() as directory:
            family = Family(kind, directory)
            for check in (experts, four_bit, serve, tensor_parallel):
                columns[check.__name__] = attempt(check, family)
            if known is not None:
                columns["gguf"] = attempt(gguf, family, known)
            elif "gguf" in before.get(kind, {}):
                columns["gguf"] = before[kind]["gguf"]
    table = {
        "transformers": transformers.__version__,
        "types": dict(sorted((before | types).items())),
        "left_out": {kind: LEFT_OUT[kind] for kind in sorted(LEFT_OUT)},
    }
    FAMILIES.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
