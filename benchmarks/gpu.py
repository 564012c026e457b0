"""One part of ``gpu.sh`` in one process: runs it, prints its table, stores its JSON."""

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

USER_CASES = ("sft-1.3b", "ppo-1.3b", "sft-6.7b", "ppo-6.7b")
PUBLISHED = (
    *("sft-llama-3.1-8b", "sft-qwen2.5-7b", "decode-qwen3-4b", "grpo-qwen2.5-1.5b"),
    *("rows", "grpo-llama-3.1-8b", "sft-qwen3-30b-a3b", "decode-qwen3-30b-a3b"),
)
# Part -> its module under benchmarks.parts, and what else its run() takes.
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "env": ("environment", {}),
    "trajectories": ("trajectories", {}),
    "scaling": ("scaling", {}),
    "reload": ("reload", {}),
    "saving": ("saving", {}),
    "commands": ("commands", {}),
    "pairs": ("pairs", {}),
    "sft": ("sft", {}),
    "decode": ("decode", {}),
    "ppo": ("ppo", {}),
    "attention": ("attention", {}),
    "lora": ("lora", {}),
    "optimizer": ("optimizer", {}),
    "throughput-1.3b": ("throughput", {"name": "opt-1.3b"}),
    "throughput-6.7b": ("throughput", {"name": "opt-6.7b"}),
    "tensor-parallel": ("tensor_parallel", {}),
    "ragged": ("ragged", {}),
    **{f"user-{name}": ("user_case", {"name": name}) for name in USER_CASES},
    **{name: ("published", {"name": name}) for name in PUBLISHED},
}
# Parts that take a larger size where these are set: a run to keep, in a file of its own.
LARGE = {"sft": "BENCH_SFT", "tensor-parallel": "BENCH_TENSOR"}


def main() -> int:
    """Run the part named on the command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--output", type=Path, required=True, help="directory of the results")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; always so on a CPU")
    arguments = parser.parse_args()
    # Imported here: a wrong argument is reported without waiting for torch.
    # Contenders of a part wait for each other: threads that have nothing to do must sleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    from dschat_lora.engine import gpu

    on_gpu = torch.cuda.is_available()
    gpu.usable(torch.device("cuda" if on_gpu else "cpu"))
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    from benchmarks.common.report import PartReport
    from dschat_lora.engine.process_group import init_distributed, shutdown

    if not on_gpu:
        # Tiny shapes gain nothing from threads, which wait for each other on a busy machine.
        torch.set_num_threads(1)
    tiny = arguments.tiny or not on_gpu
    report = PartReport(arguments.output, arguments.part, tiny=tiny, file=_file(arguments.part))
    name, options = PARTS[arguments.part]
    try:
        init_distributed()
        importlib.import_module(f"benchmarks.parts.{name}").run(report, tiny=tiny, **options)
    except BaseException as error:
        report.fail(error)
        raise
    finally:
        shutdown()
    return 0 if report.finish() else 1


def _file(part: str) -> str | None:
    return part if os.environ.get(LARGE.get(part, "")) else None


if __name__ == "__main__":
    sys.exit(main())
