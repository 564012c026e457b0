"""The NVIDIA GPU of this machine: whether torch can use it, and how it allocates memory there."""

import os
import re
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import torch

from dschat_lora.engine.meeting import hides_gpus

# It says in many lines, at every look for a GPU, what :func:`problem` says in one.
warnings.filterwarnings("ignore", message="CUDA initialization")
# CUDA's major version -> the oldest driver that runs it: table 1 of
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
# torch's build for CUDA 12.6, which has kernels for cards of compute capability 5.0 to 9.0.
_OLDER_BUILD = "cu126"
_OR_THE_CPU = "or compute on the CPU by DS_ACCELERATOR=cpu"
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
    if (found := problem(device)) is not None:
        raise ValueError("; ".join(found))
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
    shown, files = driver_of_cards(), list(Path("/dev").glob("nvidia[0-9]*"))
    driver = shown or _loaded_driver()
    if driver is None and not files:
        return None
    words = f"torch {torch.__version__} sees no GPU, though NVIDIA driver"
    found = f"{words} {driver or 'of an unknown version'} is here"
    version = int(driver.split(".")[0]) if driver else OLDEST_DRIVERS[13]
    cuda = torch.version.cuda
    if cuda is None:
        return f"{found}: it is built without CUDA", f"{_install(version)}, {_OR_THE_CPU}"
    found = f"{found}: it is built for CUDA {cuda}"
    oldest = OLDEST_DRIVERS.get(int(cuda.split(".")[0]), 0)
    if version < oldest:
        found = f"{found}, which needs driver {oldest} or newer"
        remedy = "update the driver"
        if version >= OLDEST_DRIVERS[12]:
            remedy = f"{remedy} or {_install(version)}"
    elif not (shown or files):
        found = f"{found}, and no card is shown here"
        remedy = "start a container with docker run --gpus all, a Slurm job with --gres=gpu:1"
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        setting = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}"
        found = f"{found} ({_reason()}{setting})"
        remedy = "see what nvidia-smi shows; after an update of the driver restart the machine"
    return found, f"{remedy}, {_OR_THE_CPU}"


def driver_of_cards() -> str | None:
    """The driver's version as nvidia-smi gives it for a card; None where it shows no card."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"\d+(\.\d+)+", done.stdout.strip())
    return found and found[0]


def _loaded_driver(path: str = "/proc/driver/nvidia/version") -> str | None:
    """The version of the driver in the kernel, which containers see, too."""
    try:
        found = re.search(r"\d{3,}(\.\d+)+", Path(path).read_text(encoding="utf-8"))
    except OSError:
        return None
    return found and found[0]


def _install(driver: int) -> str:
    """The command for torch's build that a driver of this major version runs."""
    build = _OLDER_BUILD if driver < OLDEST_DRIVERS[13] else "cu130"
    version = torch.__version__.split("+")[0]
    # With the build's name, or pip takes the version for installed.
    index = f"https://download.pytorch.org/whl/{build}"
    command = f"pip install torch=={version}+{build} --index-url {index}"
    return command if driver >= OLDEST_DRIVERS[12] else f"update the driver and {command}"


def _reason() -> str:
    """Why CUDA does not start, in torch's words."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "no reason given"


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
    found = (
        f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)}, of "
        f"compute capability {capability[0]}.{capability[1]}: it is built for {for_cards}"
    )
    remedy = "install a newer torch from pytorch.org"
    if (5, 0) <= capability < (7, 5):
        remedy = _install(OLDEST_DRIVERS[12])
    return found, f"{remedy}, {_OR_THE_CPU}"


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
        return f"{refused}: {said[-1]}"
    os.environ.update(chosen)
    return None
