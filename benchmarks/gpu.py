"""What is measured: a part in this process, or parts in processes of their own with limits of time.

A part prints its table and stores its JSON. ``gpu.sh`` runs them with limits, by default all that
have a group.
"""

import argparse
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Part(NamedTuple):
    """What measures, and for how long.

    Attributes:
        module: under ``benchmarks.parts``; its ``run`` measures.
        seconds: it may take, five more to be killed in not included.
        group: of parts that take 10 minutes at most together; None: run by its name alone.
        name: of the shape or setting that ``run`` is told.
        large: environment variable that has it take, on a CPU, a size that means something, and
            ``large_seconds``: a run to keep, in a file of its own.
    """

    module: str
    seconds: int
    group: int | None
    name: str | None = None
    large: str | None = None
    large_seconds: int | None = None

    def limit(self) -> int | None:
        """Seconds it may take as it is asked for here; None: any."""
        return self.large_seconds if self.is_large() else self.seconds

    def is_large(self) -> bool:
        """Whether its variable is set."""
        return bool(os.environ.get(self.large or ""))


PARTS = {
    "pairs": Part("supervised", 70, 1, "pairs", "BENCH_PAIRS"),
    "sft": Part("supervised", 90, 1, "sft", "BENCH_SFT", 595),
    "decode": Part("decode", 150, 1, None, "BENCH_DECODE"),
    "ppo": Part("ppo", 240, 2, None, "BENCH_PPO"),
    "throughput-1.3b": Part("throughput", 165, 2, "opt-1.3b"),
    "throughput-6.7b": Part("throughput", 240, 3, "opt-6.7b"),
    "user-sft-1.3b": Part("user_case", 60, 5, "sft-1.3b"),
    "user-ppo-1.3b": Part("user_case", 120, 5, "ppo-1.3b"),
    "user-sft-6.7b": Part("user_case", 120, 5, "sft-6.7b"),
    "user-ppo-6.7b": Part("user_case", 120, 5, "ppo-6.7b"),
    "sft-llama-3.1-8b": Part("published", 120, 6, "sft-llama-3.1-8b"),
    "sft-qwen2.5-7b": Part("published", 120, 6, "sft-qwen2.5-7b"),
    "decode-qwen3-4b": Part("published", 90, 6, "decode-qwen3-4b"),
    "grpo-qwen2.5-1.5b": Part("published", 120, 6, "grpo-qwen2.5-1.5b"),
    "rows": Part("published", 120, 7, "rows"),
    "grpo-llama-3.1-8b": Part("published", 120, 7, "grpo-llama-3.1-8b"),
    "sft-qwen3-30b-a3b": Part("published", 120, 7, "sft-qwen3-30b-a3b"),
    "decode-qwen3-30b-a3b": Part("published", 120, 7, "decode-qwen3-30b-a3b"),
    "grpo": Part("published", 120, None, "grpo", "BENCH_GRPO"),
}


def main() -> int:
    """Run the parts named on the command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="names, or numbers of groups")
    parser.add_argument("--output", type=Path, required=True, help="directory of the results")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; always so on a CPU")
    parser.add_argument("--limited", action="store_true", help="each in a process, for a time")
    given = parser.parse_args()
    chosen = []
    for asked in given.parts or [str(part.group) for part in PARTS.values() if part.group]:
        named = [name for name, part in PARTS.items() if asked in (name, str(part.group))]
        if not named:
            parser.error(f"unknown part {asked!r}; parts are: {' '.join(PARTS)}")
        chosen += [name for name in named if name not in chosen]
    if not given.limited:
        return max(run(name, given.output, tiny=given.tiny) for name in chosen)
    failed = [name for name in chosen if not passes(name, given.output, tiny=given.tiny)]
    print(f"\nfailed: {' '.join(failed)}" if failed else f"\nall parts passed: {' '.join(chosen)}")
    return 1 if failed else 0


def passes(name: str, output: Path, *, tiny: bool) -> bool:
    """Whether a part does in a process of its own, which is ended when its time is up."""
    limit = PARTS[name].limit()
    print(f"\n== {name} (at most {limit or 'any'} s)", flush=True)
    command = [sys.executable, __file__, name, "--output", str(output), *["--tiny"] * tiny]
    process = subprocess.Popen(command)
    try:
        return process.wait(limit) == 0
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {limit} s; what it had measured is kept", file=sys.stderr)
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return False


def run(name: str, output: Path, *, tiny: bool) -> int:
    """Run a part in this process; the exit status."""
    # A part that takes too long gets this signal; its processes then end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # Contenders of a part wait for each other: threads that have nothing to do must sleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Imported here: a wrong argument is reported without waiting for torch.
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
    part = PARTS[name]
    tiny = (tiny or not on_gpu) and not part.is_large()
    report = PartReport(output, name, tiny=tiny, file=name if part.is_large() else None)
    options = {"name": part.name} if part.name else {}
    try:
        init_distributed()
        importlib.import_module(f"benchmarks.parts.{part.module}").run(report, tiny=tiny, **options)
    except Exception as error:
        report.fail(error)
        raise
    finally:
        shutdown()
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
