"""``dschat-lora doctor``: whether this machine can train, and what to do where it cannot."""

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Literal

import psutil
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dschat_lora.addons.report.run_data import read_metrics
from dschat_lora.commands.launch import PACKAGE
from dschat_lora.config.data import DataConfig
from dschat_lora.config.plurals import counted
from dschat_lora.engine import gpu
from dschat_lora.engine.build import DTYPES
from dschat_lora.engine.children import variables_of_no_launch
from dschat_lora.models.attention import has_varlen
from dschat_lora.models.blocks import compiler_for
from dschat_lora.report.terminal import log_once, print_json, wrapped
from dschat_lora.runtime.checks import cache_directory

GIB = 2**30
SMALL_DISK = 5 * GIB  # below, a checkpoint of a large adapter may not fit
NO_DISK = GIB // 2
SMALL_MEMORY = 4 * GIB
STEP_SECONDS = 60  # after which a step of the bundled model is given up
_MARKS = {"ok": "  ", "warning": "! ", "error": "X "}


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what to do if it is not well."""

    subject: str
    state: Literal["ok", "warning", "error"]  # errors keep a run from training
    found: str
    remedy: str = ""


def examine(*, trains: bool) -> Iterator[Finding]:
    """The findings, one after another; with ``trains`` a step on each device comes last."""
    yield from versions()
    here = devices()
    for device in here:
        yield describe_device(device)
    yield attention(here[0])
    yield compiler(here[0])
    yield memory()
    yield from disks()
    yield from network()
    if trains:
        yield from map(training_step, here)


def diagnose(*, as_json: bool, trains: bool) -> bool:
    """Print the findings; returns whether a run can train here."""
    findings = []
    for each in examine(trains=trains):
        findings.append(each)
        if not as_json:
            log_once(_MARKS[each.state] + wrapped(f"  {each.subject:<13}{each.found}")[2:])
            if each.remedy:
                log_once(wrapped(f"  {'':<13}{each.remedy}"))
    errors = sum(each.state == "error" for each in findings)
    if as_json:
        can_train = {"can_train": errors == 0}
        print_json(can_train | {"findings": [asdict(each) for each in findings]})
    elif errors:
        log_once(f"training is not possible here: {errors} problems, marked X")
    else:
        log_once("a run can train here" + ("" if trains else "; the training step was skipped"))
    return errors == 0


def versions() -> Iterator[Finding]:
    """Python and the required packages against the bounds that the package declares."""
    try:
        declared, python = requires(PACKAGE) or [], metadata(PACKAGE)["Requires-Python"]
    except PackageNotFoundError:
        remedy = "install it: pip install -e . in the checkout, or pip install dschat_lora"
        yield Finding("versions", "warning", "dschat_lora is not installed as a package", remedy)
        return
    own = ".".join(map(str, sys.version_info[:3]))
    if not SpecifierSet(python).contains(own):
        remedy = "create an environment with another Python"
        yield Finding("versions", "error", f"Python {own}, which is not {python}", remedy)
    wanted = [Requirement(text) for text in declared]
    needed = [each for each in wanted if each.marker is None or each.marker.evaluate()]
    wrong = [finding for each in needed if (finding := _version(each)) is not None]
    yield from wrong
    if not wrong:
        main = ("torch", "deepspeed", "transformers", "datasets")
        listed = ", ".join(f"{name} {version(name)}" for name in main)
        words = f"Python {own}, {listed}; all {len(needed)} required packages as declared"
        yield Finding("versions", "ok", words)


def _version(wanted: Requirement) -> Finding | None:
    remedy = f"pip install '{wanted.name}{wanted.specifier}'"
    try:
        installed = version(wanted.name)
    except PackageNotFoundError:
        return Finding("versions", "error", f"{wanted.name} is not installed", remedy)
    if wanted.specifier.contains(installed, prereleases=True):
        return None
    words = f"{wanted.name} {installed} is outside the declared {wanted.specifier}"
    return Finding("versions", "error", words, remedy)


def devices() -> list[torch.device]:
    """The GPUs, or the CPU where there are none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", n) for n in range(count)] or [torch.device("cpu")]


def describe_device(device: torch.device) -> Finding:
    """A device with its memory and the types that it computes in."""
    subject = "device" if device.type == "cpu" else str(device)
    if problem := gpu.problem(device):
        return Finding(subject, "error", *problem)
    if device.type == "cpu":
        words = f"{torch.get_num_threads()} CPU threads, no GPU: fp32 by default, bf16 by --dtype"
        return Finding(subject, "ok", words)
    free, total = torch.cuda.mem_get_info(device)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    types = "bf16, fp16, fp32" if has_bf16 else "fp16, fp32 (no bf16)"
    words = (
        f"{torch.cuda.get_device_name(device)}, {free / GIB:.3g} of {total / GIB:.3g} GiB free; "
        f"{types}"
    )
    if free < total / 2:
        remedy = (
            "another program uses it (see nvidia-smi); stop it, or choose other GPUs with --include"
        )
        return Finding(subject, "warning", words, remedy)
    return Finding(subject, "ok", words)


def attention(device: torch.device) -> Finding:
    """The attention kernels that training takes on this device."""
    if device.type == "cpu":
        return Finding("attention", "ok", "sdpa of the CPU")
    if has_varlen(device, DTYPES["bf16"]):
        return Finding("attention", "ok", "flash attention, packed rows in one call")
    kind = "flash" if torch.backends.cuda.is_flash_attention_available() else "no flash"
    remedy = "training works, but packed rows take more memory and time; --no-packing helps"
    words = f"{kind} attention, no variable-length kernel"
    return Finding("attention", "warning", words, remedy)


def compiler(device: torch.device) -> Finding:
    """What torch.compile needs on this device; nothing else here compiles."""
    language, name, variable = compiler_for(device)
    needed_by = "--compile needs it"
    if device.type == "cuda":
        needed_by = "--compile and --attn_implementation flex_attention need it"
    remedy = f"nothing else needs it: install {name} and Python's headers, or set {variable}"
    if (path := shutil.which(name)) is None:
        words = f"no {language} compiler ({name}); {needed_by}"
        return Finding("compiler", "warning", words, remedy)
    source = "#include <Python.h>\nint main(void) { return 0; }\n"
    if language == "C++":
        source = f"#include <vector>\n{source}"
    headers = sysconfig.get_path("include")
    with tempfile.TemporaryDirectory() as directory:
        kind = ["-x", language.lower(), "-I", headers]
        command = [name, *kind, "-", "-o", f"{directory}/program"]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        errors = [line for line in said if "error" in line] or said or ["no reason given"]
        words = f"{name} cannot compile: {errors[0]}; {needed_by}"
        return Finding("compiler", "warning", words, remedy)
    return Finding("compiler", "ok", f"{path} works, for --compile")


def memory() -> Finding:
    """Free host memory."""
    free = psutil.virtual_memory().available
    words = f"{free / GIB:.3g} GiB of host memory free"
    if free < SMALL_MEMORY:
        remedy = "models are loaded into it first; close other programs, or use a smaller model"
        return Finding("memory", "warning", words, remedy)
    return Finding("memory", "ok", words)


def disks() -> Iterator[Finding]:
    """Room where runs write, where prepared data is kept, and where models are downloaded to."""
    hub = os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")
    places = {
        "output": Path.cwd(),
        "cache": cache_directory(DataConfig()),
        "hub cache": Path(hub),
        "temporary": Path(tempfile.gettempdir()),
    }
    options = {"output": "--output_dir", "cache": "--data_output_path or XDG_CACHE_HOME"}
    options |= {"hub cache": "HF_HOME", "temporary": "TMPDIR"}
    for name, path in places.items():
        nearest = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(nearest).free
        words = f"{name}: {free / GIB:.3g} GiB free for {path}"
        remedy = f"free space, or choose another location with {options[name]}"
        if not os.access(nearest, os.W_OK | os.X_OK):
            yield Finding("disk", "error", f"{name}: {path} is not writable", remedy)
        elif free < SMALL_DISK:
            yield Finding("disk", "error" if free < NO_DISK else "warning", words, remedy)
        else:
            yield Finding("disk", "ok", words)


def network() -> Iterator[Finding]:
    """What the processes of a run meet by: the loopback address, and this host's name."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                yield Finding("network", "ok", "processes of this host reach each other")
    except OSError as error:
        remedy = "allow connections to 127.0.0.1 in the firewall or the container"
        yield Finding("network", "error", f"no connection to 127.0.0.1: {error}", remedy)
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        remedy = (
            f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the "
            "interface that runs use, such as lo"
        )
        yield Finding("network", "warning", f"the host's name {name}: {error}", remedy)
    else:
        yield Finding("network", "ok", f"the host's name {name} is {address}")


def training_step(device: torch.device) -> Finding:
    """Two optimizer steps of the bundled model by ``dschat-lora sft``, on this device alone."""
    chosen = {"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {}
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        chosen["CUDA_VISIBLE_DEVICES"] = visible[device.index] if visible[0] else str(device.index)
    options = ["--lora_dim", "4", "--max_steps", "2", "--sample_generations", "0"]
    with tempfile.TemporaryDirectory() as directory:
        output, data = Path(directory) / "out", Path(directory) / "rows.jsonl"
        rows = ({"prompt": f"{n} plus 1 is", "completion": f" {n + 1}"} for n in range(64))
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        options += ["--no-packing", "--data_path", str(data), "--output_dir", str(output)]
        options += ["--data_output_path", f"{directory}/cache"]
        done, seconds = _timed(["sft", *options], chosen)
        if done is None:  # which on a busy machine says little
            load, cores = os.getloadavg()[0], os.cpu_count() or 1
            words = f"no step in {STEP_SECONDS} s"
            if load > cores:
                words += f", at a load average of {load:.0f} on {cores} cores"
                return Finding("training", "warning", words, "try again once the others have ended")
            remedy = "find where it waits with py-spy dump, or run dschat-lora sft --max_steps 2"
            return Finding("training", "error", words, remedy)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            remedy = "see the output above; docs/troubleshooting.md lists errors by text"
            return Finding("training", "error", f"{device}: {reason}", remedy)
        losses = [row["loss"] for row in read_metrics(output, "train")]
    words = (
        f"{device}: a run of {counted(len(losses), 'step')} in {seconds:.3g} s, "
        f"loss {losses[-1]:.4g}"
    )
    return Finding("training", "ok", words)


def _timed(
    words: list[str], environment: dict[str, str]
) -> tuple[subprocess.CompletedProcess[str] | None, float]:
    """A command of this package in a process of its own, None if it takes too long."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", PACKAGE, *words],
            env=variables_of_no_launch() | environment,
            capture_output=True,
            text=True,
            timeout=STEP_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, STEP_SECONDS
    return done, time.monotonic() - start
