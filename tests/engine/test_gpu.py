"""A GPU that torch cannot use ends a command in one line; refused segments are done without."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.engine import gpu
from dschat_lora.engine.rendezvous import check_launch_variables
from helpers.addons import has_verb

ROOT = Path(__file__).resolve().parents[2]
MAIN = ROOT / "dschat_lora" / "__main__.py"
CPU = torch.device("cpu")


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """``smi(text, code)``: an ``nvidia-smi`` that prints the text; no device is chosen by name.

    The driver's files are those below ``tmp_path``.
    """
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    gpu._unseen_gpu.cache_clear()

    def write(text, code=0):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
        path.chmod(0o755)

    yield write
    gpu._unseen_gpu.cache_clear()


def wheel(monkeypatch, version, cuda):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)


INSTALL = "pip install torch=={0} --index-url https://download.pytorch.org/whl/{1}"
OLDER = INSTALL.format("2.13.0+cu126", "cu126")
NEWER = INSTALL.format("2.13.0+cu130", "cu130")
UPDATE = "update the driver to"
FROM_SITE = "install a CUDA build from pytorch.org"
NO_ONE = (
    "no single build of torch supports compute capabilities 7.0 and 10.0: name cards of one of "
    f"them in CUDA_VISIBLE_DEVICES, and for those up to 9.0 {OLDER}, for newer ones {UPDATE} 580 "
    f"or newer and {NEWER}"
)


NEEDS = "it is built for CUDA {}, which needs driver {} or newer"


# What runs what: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
@pytest.mark.parametrize(
    ("cards", "version", "cuda", "needs", "remedy"),
    [
        ("535.104.05", "2.13.0+cu130", "13.0", 580, f"{UPDATE} 580 or newer or {OLDER}"),
        ("570.86.15", "2.13.0+cu132", "13.2", 580, f"{UPDATE} 580 or newer or {OLDER}"),
        ("470.82.01", "2.13.0+cu130", "13.0", 580, f"{UPDATE} 580 or newer"),
        ("470.82.01", "2.13.0+cu126", "12.6", 525, f"{UPDATE} 525 or newer"),
        ("440.33.01", "2.6.0+cu118", "11.8", 450, f"{UPDATE} 450 or newer"),
        ("535.104.05", "2.13.0+cpu", None, None, OLDER),
        ("470.82.01", "2.13.0+cpu", None, None, f"{UPDATE} 525 or newer and {OLDER}"),
        ("570.86.15, 12.0", "2.13.0+cu130", "13.0", 580, f"{UPDATE} 580 or newer"),  # an RTX 5090
        ("570.86.15, 9.0", "2.13.0+cu130", "13.0", 580, f"{UPDATE} 580 or newer or {OLDER}"),
        ("570.86.15, [N/A]", "2.13.0+cu130", "13.0", 580, f"{UPDATE} 580 or newer or {OLDER}"),
        ("535.104.05, 7.0", "2.13.0+cu130", "13.0", 580, OLDER),  # a V100, of which cu130 has none
        ("470.82.01, 7.0", "2.13.0+cu130", "13.0", 580, f"{UPDATE} 525 or newer and {OLDER}"),
        ("580.65.06, 7.0", "2.13.0+cpu", None, None, OLDER),
        ("580.65.06, [N/A]", "2.13.0+cpu", None, None, NEWER),
        ("580.65.06, 12.1", "2.13.0+cpu", None, None, NEWER),
        ("570.86.15, 12.0", "2.13.0+cpu", None, None, f"{UPDATE} 580 or newer and {NEWER}"),
        ("580.65.06, 8.0", "2.6.0+cpu", None, None, INSTALL.format("2.6.0+cu126", "cu126")),
        ("580.65.06, 8.0", "2.9.0+cpu", None, None, INSTALL.format("2.9.0+cu130", "cu130")),
        ("580.65.06, 10.0", "2.8.0+cpu", None, None, INSTALL.format(0, "cu130")),
        ("580.65.06, 8.0", "2.14.0.dev20261101+cpu", None, None, f"{FROM_SITE} (cu130)"),
        ("580.65.06, 8.0", "2.9.0a0+git1", None, None, f"{FROM_SITE} (cu130)"),
        (
            *("470.82.01, 3.5", "2.13.0+cpu", None, None),
            "use a GPU of compute capability 5.0 or above, which 3.5 is not",
        ),
        ("580.65.06, 7.0\n580.65.06, 10.0", "2.13.0+cpu", None, None, NO_ONE),  # V100 beside B200
        ("570.86.15, 10.0\n570.86.15, 7.0", "2.13.0+cu130", "13.0", 580, NO_ONE),
    ],
)
def test_a_driver_and_a_wheel_that_do_not_fit_are_named_with_the_remedy_for_the_cards(
    smi, monkeypatch, cards, version, cuda, needs, remedy
):
    wheel(monkeypatch, version, cuda)
    smi(cards if "\n" in cards else f"{cards}\n{cards}")  # two cards
    why = "it is built without CUDA" if cuda is None else NEEDS.format(cuda, needs)
    driver = cards.split(",")[0]
    remedy = remedy.replace("torch==0", "'torch>=2.9'")  # the first that has the build
    with pytest.raises(ValueError, match="sees no GPU") as caught:
        gpu.usable(CPU)
    assert str(caught.value) == (
        f"torch {version} sees no GPU, though NVIDIA driver {driver} is here: {why}; {remedy}, or "
        "use the CPU with DS_ACCELERATOR=cpu"
    )


def test_a_driver_that_knows_no_compute_capability_is_asked_without(smi, monkeypatch, tmp_path):
    wheel(monkeypatch, "2.13.0+cu130", "13.0")
    smi("")
    script = '#!/bin/sh\ncase "$1" in *compute_cap*) echo Field is not valid; exit 2;; esac\n'
    (tmp_path / "nvidia-smi").write_text(f"{script}echo 470.82.01\n")
    reason, _ = gpu.problem(CPU)
    assert "NVIDIA driver 470.82.01 is here" in reason


@pytest.mark.parametrize(("driver", "cuda"), [("525.60.13", "12.9"), ("580.65.06", "13.0")])
def test_a_driver_that_is_new_enough_is_not_blamed(smi, monkeypatch, driver, cuda):
    wheel(monkeypatch, "2.13.0+cu130", cuda)

    def fail():
        raise RuntimeError("CUDA unknown error - this may be due to\nmany things")

    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    smi(driver)
    reason, remedy = gpu.problem(CPU)
    assert "needs driver" not in reason
    assert reason.endswith("(CUDA unknown error - this may be due to; CUDA_VISIBLE_DEVICES=7)")
    assert "nvidia-smi" in remedy


def test_a_driver_in_the_kernel_that_shows_no_card_asks_for_one(smi, monkeypatch, tmp_path):
    wheel(monkeypatch, "2.13.0+cu130", "13.0")
    smi("NVIDIA-SMI has failed because it could not communicate with the driver 999.1", code=9)
    module = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(f"{module}GCC version:  gcc version 13.3.0\n")
    reason, remedy = gpu.problem(CPU)
    assert "NVIDIA driver 580.65.06 is here: it is built for CUDA 13.0, and no GPU" in reason
    assert "--gpus all" in remedy
    assert "restart" not in remedy


def test_files_of_cards_that_nvidia_smi_does_not_show_ask_for_one_too(smi, monkeypatch, tmp_path):
    """A Slurm job without --gres, or a pod that sees the host's files."""
    wheel(monkeypatch, "2.13.0+cu130", "13.0")
    smi("No devices were found", code=6)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    init = mock.Mock(side_effect=RuntimeError("no CUDA-capable device is detected"))
    monkeypatch.setattr(torch.cuda, "init", init)
    reason, remedy = gpu.problem(CPU)
    assert "no GPU is visible (no CUDA-capable device is detected)" in reason
    assert "--gpus all" in remedy
    assert "--gres=gpu:1" in remedy
    assert "check nvidia-smi" in remedy


def test_machines_without_a_driver_and_hidden_gpus_compute_on_the_cpu(smi, monkeypatch):
    smi("NVIDIA-SMI has failed because it could not communicate with the driver 999.1", code=9)
    assert gpu.usable(CPU) == CPU
    gpu._unseen_gpu.cache_clear()
    smi("535.104.05")
    for hidden in ("", "-1", "NoDevFiles", " "):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        assert gpu.usable(CPU) == CPU
        gpu._unseen_gpu.cache_clear()
        check_launch_variables()
        assert os.environ["DS_ACCELERATOR"] == "cpu"
    for shown in ("0", "GPU-3a2b", "MIG-3a2b", "2,3"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        check_launch_variables()
        gpu._unseen_gpu.cache_clear()
        with pytest.raises(ValueError, match="sees no GPU"):
            gpu.usable(CPU)


@pytest.mark.parametrize(
    ("cuda", "other", "chosen"),
    [(None, True, None), (None, False, "cpu"), ("13.0", True, "cpu")],
    ids=["XPU", "CPU build", "CUDA build"],
)
def test_hidden_gpus_of_nvidia_leave_other_accelerators(monkeypatch, cuda, other, chosen):
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: other)
    check_launch_variables()
    assert os.environ.get("DS_ACCELERATOR") == chosen


# No machine has that card.
BROKEN = {"DS_ACCELERATOR": None, "CUDA_VISIBLE_DEVICES": "999"}
SFT = ("sft", "--lora_dim", "4", "--max_steps", "1", "--output_dir", "out")


@pytest.mark.stage
@pytest.mark.parametrize(
    ("argv", "ranks"),
    [
        (SFT, 2),
        (("generate", "model", "--prompts", "a", "--dtype", "fp32"), 1),
        *[(("chat", "model", "--dtype", "fp32"), 1)] * has_verb("chat"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_what_computes_ends_early_in_one_line(smi, launcher, tmp_path, argv, ranks):
    smi("535.104.05")
    shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not to be read")
    env = BROKEN | {"PATH": os.environ["PATH"]}
    running = launcher.start(argv, tmp_path, script=MAIN, ranks=ranks, env=env)
    assert running.wait() == [2] * ranks
    said = "".join(running.err(rank) for rank in range(ranks)).splitlines()
    lines = [line for line in said if "real_accelerator" not in line]
    assert len(lines) == 1, said
    assert lines[0].startswith("error: torch ")
    assert "NVIDIA driver 535.104.05 is here" in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.stage
def test_what_only_looks_and_a_run_with_hidden_gpus_go_on(smi, launcher, tmp_path):
    smi("535.104.05")
    env = BROKEN | {"PATH": os.environ["PATH"]}
    plan = (["plan", "sft", "--for", "24GB"], env)
    dry = ([*SFT, "--dry_run"], env | {"CUDA_VISIBLE_DEVICES": ""})
    lines = [*[plan] * has_verb("plan"), dry]
    for each in [launcher.start(argv, tmp_path, script=MAIN, env=own) for argv, own in lines]:
        assert each.wait() == [0], each.output()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("answer", "code", "wheel"),
    [
        ("535.104.05, 8.0", 0, OLDER.removeprefix("pip install ")),  # an A100 with an old driver
        ("580.65.06, 7.0", 0, OLDER.removeprefix("pip install ")),  # a V100
        ("580.65.06, 7.5", 0, "torch==2.13.0"),
        ("580.65.06, 12.0\n580.65.06, 12.0", 0, "torch==2.13.0"),
        ("570.86.15, 9.0", 0, OLDER.removeprefix("pip install ")),
        ("570.86.15, 12.0", 0, "torch==2.13.0"),  # which needs a newer driver
        ("580.65.06, 7.0\n580.65.06, 10.0", 0, "torch==2.13.0"),
        ("470.82.01, 3.5", 0, "torch==2.13.0"),
        ("580.65.06, [N/A]", 0, "torch==2.13.0"),
        ("535.104.05, [N/A]", 0, OLDER.removeprefix("pip install ")),
        ("NVIDIA-SMI has failed because", 9, "torch==2.13.0"),
        ("535.104.05, 8.0", 0, "torch==2.13.0+cpu"),  # as asked for
    ],
)
def test_make_installs_a_wheel_that_the_driver_and_the_card_run(smi, tmp_path, answer, code, wheel):
    smi(answer, code)
    asked = [f"TORCH_WHEEL={wheel}"] if wheel.endswith("cpu") else []
    command = ["make", "--dry-run", f"VENV={tmp_path}/venv", f"{tmp_path}/venv/.run", *asked]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in said.splitlines() if "torch==" in line]
    assert line.endswith(f"--constraint constraints.txt {wheel}")


CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((7, 0), CU130, False),  # V100
        ((7, 0), CU126, True),
        ((7, 5), CU130, True),  # T4
        ((8, 6), ["sm_80"], True),  # code of the same major version
        ((8, 0), ["sm_86"], False),  # but of no later minor one
        ((8, 9), CU130, True),
        ((9, 0), ["sm_80"], False),
        ((12, 0), CU126, False),
        ((12, 0), ["sm_80", "compute_90"], True),  # portable code, compiled at the start
        ((8, 9), ["sm_80", "compute_90"], True),
        ((7, 5), ["compute_80"], False),
        ((12, 1), ["sm_120a"], True),
        ((9, 4), ["gfx90a", "gfx942"], True),  # another vendor's
        ((9, 0), [], True),
    ],
)
def test_a_card_runs_code_for_it_or_portable_code(monkeypatch, capability, built, runs):
    gpu._lacking_kernels.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    card = torch.device("cuda", 0)
    if runs:
        assert gpu.usable(card) == card
        return
    with pytest.raises(ValueError, match="has no kernels for Some Card") as caught:
        gpu.usable(card)
    words = str(caught.value)
    assert "compute capability {}.{}".format(*capability) in words
    assert (OLDER in words) == (capability == (7, 0))


@pytest.mark.parametrize(
    ("capability", "cuda", "cards", "remedy"),
    [
        ((12, 0), "12.6", "570.86.15, 12.0", f"{UPDATE} 580 or newer and {NEWER}"),
        ((12, 0), "12.6", "no driver", f"{UPDATE} 580 or newer and {NEWER}"),
        ((12, 0), "12.6", "580.65.06, 12.0", NEWER),
        ((13, 0), "13.0", "580.65.06, 13.0", "install a newer torch from pytorch.org"),
        ((7, 0), "13.0", "no driver", OLDER),
    ],
)
def test_lacking_kernels_are_in_the_build_for_the_card(
    smi, monkeypatch, capability, cuda, cards, remedy
):
    gpu._lacking_kernels.cache_clear()
    wheel(monkeypatch, "2.13.0", cuda)
    smi(cards)
    built = CU130[:-1] if cuda == "13.0" else CU126
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")
    _, advice = gpu.problem(torch.device("cuda", 0))
    assert advice == f"{remedy}, or use the CPU with DS_ACCELERATOR=cpu"
    other = {0: capability, 1: (7, 0) if capability > (9, 0) else (10, 0)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda d: other[getattr(d, "index", d)]
    )
    gpu._lacking_kernels.cache_clear()
    _, advice = gpu.problem(torch.device("cuda", 0))
    assert ("no single build of torch supports" in advice) == ("newer torch" not in remedy)


ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
REFUSES = "import sys; sys.exit('CUDA driver error: operation not supported')"
WANTS = f"import os; assert os.environ['{ALLOCATOR}'] == 'expandable_segments:True'"


@pytest.fixture
def allocator(monkeypatch):
    """No setting of the user's."""
    for name in (ALLOCATOR, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


REFUSED = "the GPU refuses expandable segments, without which memory may be fragmented"
FULL = "CUDA out of memory. Tried to allocate 64.00 MiB"
FILLED = "another program uses all GPU memory, so expandable segments cannot be tested"


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (REFUSES, f"{REFUSED}: CUDA driver error: operation not supported"),
        ("import os, sys; sys.stderr.close(); os.abort()", f"{REFUSED}: exit code -6"),
        ("import time; time.sleep(60)", f"{REFUSED}: no answer in 0.5 s"),
        (f"import sys; sys.exit({FULL!r})", f"{FILLED}: {FULL}"),
        (f"import sys; assert sys.argv[1] == 'cuda:3'; {WANTS}", None),
    ],
    ids=["refused", "aborted", "hung", "full", "extended"],
)
def test_segments_are_extended_where_a_trial_with_them_on_this_gpu_succeeds(
    allocator, monkeypatch, trial, said
):
    monkeypatch.setattr(gpu, "TRIAL", trial)
    monkeypatch.setattr(gpu, "_TRIAL_SECONDS", 0.5 if "sleep" in trial else 60)
    assert gpu.allow_expandable_segments(3) == said
    assert os.environ.get(ALLOCATOR) == (None if said else "expandable_segments:True")


@pytest.mark.parametrize("name", [ALLOCATOR, "PYTORCH_ALLOC_CONF"])
def test_a_setting_of_the_users_is_left_alone(allocator, monkeypatch, name):
    monkeypatch.setattr(gpu, "TRIAL", REFUSES)
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert gpu.allow_expandable_segments(0) is None
    kept = [os.environ[each] for each in (ALLOCATOR, "PYTORCH_ALLOC_CONF") if each in os.environ]
    assert kept == ["max_split_size_mb:512"]


def test_the_trial_says_why_in_one_line():
    """The program itself, on a torch whose allocator refuses."""
    stub = "class torch:\n uint8 = 0\n def zeros(*_, **__): raise RuntimeError('no VMM\\nmore')\n"
    program = stub + gpu.TRIAL.replace("import sys, torch", "import sys")
    command = [sys.executable, "-c", program, "cuda:0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "no VMM\n")
