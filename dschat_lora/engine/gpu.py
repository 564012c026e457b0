"""The NVIDIA GPU of this machine: whether torch can use it, and how it allocates memory there."""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from dschat_lora.engine.rendezvous import hides_gpus

Capability = tuple[int, int]

# It says in many lines, at every look for a GPU, what :func:`problem` says in one.
warnings.filterwarnings("ignore", message="CUDA initialization")
# CUDA's major version -> the oldest driver that runs it: table 1 of
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}


class _Build(NamedTuple):
    """Of torch: the first release that has it, its oldest driver, and its cards by capability."""

    first: tuple[int, int]
    driver: int
    lowest: Capability
    highest: Capability


_BUILDS = {
    "cu130": _Build((2, 9), 580, (7, 5), (99, 0)),
    "cu126": _Build((2, 6), 525, (5, 0), (9, 0)),
}
ROOT = Path("/")  # of the files by which the driver shows itself
_OR_THE_CPU = "or use the CPU with DS_ACCELERATOR=cpu"
_TRIAL_SECONDS = 120
TRIAL = """
import sys, torch
try:
    torch.zeros(2**26, dtype=torch.uint8, device=sys.argv[1]).cpu()
except RuntimeError as error:
    sys.exit(str(error).splitlines()[0])
"""


def usable(device: torch.device) -> torch.device:
    """``device`` itself.

    Raises:
        ValueError: if it cannot compute, or is a CPU beside a GPU that torch cannot use.
    """
    if (reason_and_remedy := problem(device)) is not None:
        raise ValueError("; ".join(reason_and_remedy))
    return device


def problem(device: torch.device) -> tuple[str, str] | None:
    """Why torch cannot use the GPU ``device``, or one beside a CPU, and what to do; else None."""
    if device.type == "cuda":
        return _lacking_kernels(device)
    return _unseen_gpu() if device.type == "cpu" else None


@cache
def _unseen_gpu() -> tuple[str, str] | None:
    """That torch sees no GPU although an NVIDIA driver is here, and what to do."""
    if "DS_ACCELERATOR" in os.environ or hides_gpus() or torch.cuda.is_available():
        return None
    cards, files = shown_cards(), list((ROOT / "dev").glob("nvidia[0-9]*"))
    versions = [version for version, _ in cards]
    with suppress(OSError):  # of the driver in the kernel, which containers see, too
        text = (ROOT / "proc/driver/nvidia/version").read_text(encoding="utf-8")
        versions += [match[0] for match in re.finditer(r"\d{3,}(\.\d+)+", text)]
    driver = versions[0] if versions else None
    if driver is None and not files:
        return None
    reason = f"torch {torch.__version__} sees no GPU, though NVIDIA driver"
    reason = f"{reason} {driver or 'of an unknown version'} is here"
    version = _major(driver) if driver else OLDEST_DRIVERS[13]
    capabilities = [capability for _, capability in cards if capability is not None]
    cuda = torch.version.cuda
    if cuda is None:
        install = _install(version, capabilities)
        return f"{reason}: it is built without CUDA", f"{install}, {_OR_THE_CPU}"
    reason = f"{reason}: it is built for CUDA {cuda}"
    oldest = OLDEST_DRIVERS.get(_major(cuda), 0)
    if version < oldest:
        reason = f"{reason}, which needs driver {oldest} or newer"
        builds = _builds_for(capabilities)
        remedy = _update(oldest)
        if _major(cuda) == 13 and "cu130" not in builds:
            remedy = _install(version, capabilities)
        elif version >= OLDEST_DRIVERS[12] and "cu126" in builds:
            remedy = f"{remedy} or {_install(version, capabilities)}"
        return reason, f"{remedy}, {_OR_THE_CPU}"
    remedies = ["check nvidia-smi; after a driver update restart the machine"]
    if not cards:
        reason = f"{reason}, and no GPU is visible"
        ask = "start a container with docker run --gpus all, a Slurm job with --gres=gpu:1"
        remedies = [ask, *(remedies if files else [])]
    if cards or files:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        setting = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}"
        words = "no reason given"
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            words = str(error).splitlines()[0]
        reason = f"{reason} ({words}{setting})"
    return reason, ", or ".join([*remedies, _OR_THE_CPU.removeprefix("or ")])


def shown_cards() -> list[tuple[str, Capability | None]]:
    """Driver's version and compute capability, if known, of each card that nvidia-smi shows."""
    for fields in ("driver_version,compute_cap", "driver_version"):  # old ones refuse the first
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        cards = re.findall(r"^(\d+(?:\.\d+)+)(?:, *(\d+)\.(\d+))?", done.stdout, re.MULTILINE)
        if cards:
            return [(d, (int(major), int(minor)) if major else None) for d, major, minor in cards]
    return []


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _builds_for(capabilities: Collection[Capability]) -> list[str]:
    """Builds of torch that have kernels for all these cards, the newest first."""
    return [
        name
        for name, build in _BUILDS.items()
        if all(build.lowest <= each <= build.highest for each in capabilities)
    ]


def _install(driver: int, capabilities: Collection[Capability]) -> str:
    """How to get the newest build that the cards and this major version of the driver run."""
    builds, release = _builds_for(capabilities), _release()
    if not builds:
        lowest, highest = (".".join(map(str, end(capabilities))) for end in (min, max))
        if min(capabilities) < _BUILDS["cu126"].lowest:
            return f"use a GPU of compute capability 5.0 or above, which {lowest} is not"
        return (
            f"no single build of torch supports compute capabilities {lowest} and {highest}: name "
            "cards of one of them in CUDA_VISIBLE_DEVICES, and for those up to 9.0 "
            f"{_command('cu126')}, for newer ones {_update(580)} and {_command('cu130')}"
        )
    if release is not None:
        builds = [name for name in builds if release >= _BUILDS[name].first] or builds
    build = next((name for name in builds if driver >= _BUILDS[name].driver), builds[-1])
    oldest, command = _BUILDS[build].driver, _command(build)
    return command if driver >= oldest else f"{_update(oldest)} and {command}"


def _update(oldest: int) -> str:
    return f"update the driver to {oldest} or newer"


def _command(build: str) -> str:
    """The command for this torch's build of that name, or for the first torch that has one."""
    release = _release()
    if release is None:
        return f"install a CUDA build from pytorch.org ({build})"
    # With the build's name, or pip takes the version for installed.
    wanted = f"torch=={torch.__version__.split('+')[0]}+{build}"
    first = _BUILDS[build].first
    if release < first:
        wanted = "'torch>={}.{}'".format(*first)
    return f"pip install {wanted} --index-url https://download.pytorch.org/whl/{build}"


def _release() -> tuple[int, int] | None:
    """Of this torch; None for one between releases, which no index keeps."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)\.\d+", torch.__version__.split("+")[0])
    return numbers and (int(numbers[1]), int(numbers[2]))


@cache
def _lacking_kernels(device: torch.device) -> tuple[str, str] | None:
    """That torch has no kernels for this GPU, and what to do.

    Code ``sm_XY`` runs on cards of capability X.Y and later ones of the same X, the portable
    ``compute_XY`` on all later ones (CUDA C++ Programming Guide, "binary" and "PTX compatibility").
    """
    built = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    if not built:  # a build for another vendor's cards
        return None
    capability = torch.cuda.get_device_capability(device)
    for kind, major, minor in built:
        code = (int(major), int(minor))
        if code <= capability and (kind == "compute" or code[0] == capability[0]):
            return None
    for_cards = ", ".join(f"{major}.{minor}" for _, major, minor in built)
    reason = (
        f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)}, of "
        f"compute capability {capability[0]}.{capability[1]}: it is built for {for_cards}"
    )
    remedy = "install a newer torch from pytorch.org"
    cuda = torch.version.cuda
    if capability < (7, 5) or (capability > (9, 0) and cuda is not None and _major(cuda) < 13):
        cards = shown_cards()
        seen = [torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count())]
        driver = _major(cards[0][0]) if cards else OLDEST_DRIVERS.get(_major(cuda or "13"), 0)
        remedy = _install(driver, {capability, *seen})
    return reason, f"{remedy}, {_OR_THE_CPU}"


def allow_expandable_segments(number: int) -> str | None:
    """Have torch's allocator extend its segments, where the GPU can; else a note for the log.

    Rows of ever other lengths would leave holes between segments of a fixed size. Virtual GPUs,
    WSL 2 and Jetson may refuse what the driver is asked for it, which damages a process; so another
    one tries it. Call it before CUDA starts in this one. A setting of the user's stays.

    Args:
        number: of the GPU, among those that are visible.
    """
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if any(name in os.environ for name in names):
        return None
    chosen = {names[0]: "expandable_segments:True"}
    command = [sys.executable, "-c", TRIAL, f"cuda:{number}"]
    refused = "the GPU refuses expandable segments, without which memory may be fragmented"
    full = "another program uses all GPU memory, so expandable segments cannot be tested"
    try:
        done = subprocess.run(
            command,
            env=os.environ | chosen,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{refused}: no answer in {_TRIAL_SECONDS} s"
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"{full if 'out of memory' in said[-1] else refused}: {said[-1]}"
    os.environ.update(chosen)
    return None
