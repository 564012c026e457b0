"""What the first hour asks of a card that no verb does: ``python -m`` this, the name, its words."""

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from dschat_lora.addons.planning.published import PUBLISHED, write_config
from dschat_lora.config.bundled import BUNDLED_MODEL
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.engine.gpu import shown_cards
from dschat_lora.generation.generate import Decoder
from dschat_lora.generation.sampling import Sampling
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.cuda_graphs import Step, cuda_graphs
from dschat_lora.models.loading import load_causal_lm, load_config, load_tokenizer
from dschat_lora.models.source import find_model
from dschat_lora.report.record import package_versions

NO_ROOM = 3  # exit code
SEED, ROWS, NEW_TOKENS = 1234, 16, 40


def main() -> None:
    """Run the probe that the command line names."""
    probe, *words = sys.argv[1:]
    probes: dict[str, Callable[..., None]] = {
        "machine": machine,
        "graphs": graphs,
        "weights": weights,
    }
    probes[probe](*words)


def machine(file: str) -> None:
    """Write what the card and its software are, and nothing that names a host or its user."""
    facts: dict[str, Any] = {}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "card": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "architectures": torch.cuda.get_arch_list(),
            "driver": next((driver for driver, _ in shown_cards()), None),
            "cuda": torch.version.cuda,
            "versions": package_versions(),
            "dtype": resolve_dtype("auto"),
            "host_memory_bytes": psutil.virtual_memory().total,
        }
    Path(file).write_text(json.dumps(facts), encoding="utf-8")


def graphs(dtype: str, file: str) -> None:
    """Write how many tokens are drawn otherwise with CUDA graphs than without them."""
    config, lora = ModelConfig(), LoraConfig(lora_dim=8)
    source = find_model(None)
    tokenizer = load_tokenizer(source.base, config)
    model = build_causal_lm(
        source, tokenizer, config, lora, dtype=DTYPES[dtype], seed=SEED, meta=False
    ).model
    torch.manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.02)
    model.to(device()).eval()
    prompts = [[4 + (7 * n + k) % 90 for k in range(12 + n)] for n in range(ROWS)]
    captured: list[Step] = []
    capture = cuda_graphs() if device().type == "cuda" else None

    def record(step: Step) -> Step:
        captured.append(step if capture is None else capture(step))
        return captured[-1]

    texts = []
    for each in (record, lambda step: step):
        decoder = Decoder(
            model,
            eos_ids=[int(tokenizer.eos_token_id)],
            pad_id=int(tokenizer.pad_token_id),
            device=device(),
            record=each,
        )
        with warnings.catch_warnings():
            # Where a capture fails, decoding goes on without.
            warnings.filterwarnings("error", message=".*without CUDA graphs")
            decoded = decoder(prompts, Sampling(NEW_TOKENS), seeds=[[n] for n in range(ROWS)])
        texts.append(decoded.tokens())
    if not captured:
        raise SystemExit("no step of decoding was captured as a graph")
    other = sum(a != b for a, b in zip(*texts, strict=True)) / ROWS
    rows = [("responses with another token", other, 0.0)]
    Path(file).write_text(json.dumps(rows), encoding="utf-8")


@torch.no_grad()
def weights(name: str, directory: str) -> None:
    """Write a model of a published shape with random 16-bit weights, and the bundled tokenizer."""
    path = Path(directory)
    write_config(path, PUBLISHED[name])
    config = ModelConfig()
    model = load_causal_lm(
        str(path), load_config(str(path), config), config, dtype=torch.bfloat16, meta=True
    )
    parameters = list(model.parameters())
    size = sum(2 * parameter.numel() for parameter in parameters)
    room = psutil.virtual_memory().available, shutil.disk_usage(path).free
    if 1.2 * size > min(room):
        raise SystemExit(NO_ROOM)
    model.to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(SEED)
    # One draw for all: what they are changes no time, if they are not all 0.
    drawn = torch.randn(max(each.numel() for each in parameters), dtype=torch.bfloat16).mul_(0.02)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.copy_(drawn[: parameter.numel()].view_as(parameter))
        else:
            parameter.fill_(0.0 if key.endswith("bias") else 1.0)
    model.save_pretrained(path)
    for each in BUNDLED_MODEL.glob("tokenizer*"):
        shutil.copy(each, path)


if __name__ == "__main__":
    main()
