"""Each thing that keeps a machine from training is found, with what to do about it."""

import json
import shutil
import socket
import subprocess
from collections import namedtuple

import pytest
import torch
from packaging.requirements import Requirement

from dschat_lora.addons.planning import doctor, verbs
from dschat_lora.models.blocks import compiler_for

Usage = namedtuple("Usage", "total used free")


def states(findings):
    return [finding.state for finding in findings]


def test_versions_outside_the_declared_bounds_are_errors_with_the_command_that_mends_them(
    monkeypatch,
):
    declared = ["torch>=99", "no-such-package-at-all>=1", 'pytest<1; extra == "test"', "numpy>=1"]
    monkeypatch.setattr(doctor, "requires", lambda name: declared)
    old, missing = doctor.versions()
    assert states([old, missing]) == ["error", "error"]
    assert torch.__version__.split("+")[0] in old.found
    assert old.remedy == "pip install 'torch>=99'"
    assert "no-such-package-at-all is not installed" in missing.found


def test_a_local_build_counts_as_its_version():
    assert doctor._version(Requirement(f"torch=={torch.__version__.split('+')[0]}")) is None


@pytest.mark.parametrize(
    ("kind", "variable", "words"),
    [("cpu", "CXX", "no C++ compiler"), ("cuda", "CC", "no C compiler")],
)
def test_no_compiler_is_a_warning_for_the_options_that_need_one(monkeypatch, kind, variable, words):
    monkeypatch.setenv(variable, "no-such-compiler")
    finding = doctor.compiler(torch.device(kind))
    assert finding.state == "warning"
    assert f"{words} (no-such-compiler); --compile" in finding.found
    assert ("flex_attention" in finding.found) == (kind == "cuda")
    assert "--offload" not in finding.found + finding.remedy
    assert variable in finding.remedy


@pytest.mark.skipif(not all(map(shutil.which, ("gcc", "g++"))), reason="no compilers")
@pytest.mark.parametrize(("kind", "variable"), [("cpu", "CXX"), ("cuda", "CC")])
def test_a_compiler_without_pythons_headers_is_a_warning(monkeypatch, tmp_path, kind, variable):
    monkeypatch.delenv(variable, raising=False)
    assert doctor.compiler(torch.device(kind)).state == "ok"
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    finding = doctor.compiler(torch.device(kind))
    assert finding.state == "warning"
    assert "Python.h" in finding.found
    monkeypatch.setenv(variable, "false")
    assert "no reason given" in doctor.compiler(torch.device(kind)).found


def test_a_gpu_takes_clang_where_there_is_no_gcc(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name if name == "clang" else None)
    assert compiler_for(torch.device("cuda")) == ("C", "clang", "CC")


@pytest.mark.parametrize(("free", "state"), [(2**28, "error"), (2**30, "warning"), (2**40, "ok")])
def test_a_full_disk_keeps_a_run_from_training_and_a_small_one_does_not(monkeypatch, free, state):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(free, 0, free))
    findings = list(doctor.disks())
    assert set(states(findings)) == {state}
    assert any("--output_dir" in each.remedy for each in findings) == (state != "ok")


def test_a_device_that_cannot_compute_is_an_error_with_what_to_do(monkeypatch):
    monkeypatch.setattr(doctor.gpu, "problem", lambda device: (f"{device} is old", "update"))
    for name, subject in (("cpu", "device"), ("cuda:0", "cuda:0")):
        finding = doctor.describe_device(torch.device(name))
        assert finding == doctor.Finding(subject, "error", f"{name} is old", "update")


def test_a_name_that_does_not_resolve_is_a_warning(monkeypatch):
    def refuse(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(doctor.socket, "gethostbyname", refuse)
    loopback, name = doctor.network()
    assert states([loopback, name]) == ["ok", "warning"]
    assert "/etc/hosts" in name.remedy


def test_a_loopback_that_refuses_is_an_error(monkeypatch):
    def refuse(*_, **__):
        raise OSError("not permitted")

    monkeypatch.setattr(doctor.socket, "create_connection", refuse)
    assert states(doctor.network())[0] == "error"


def test_a_run_that_fails_is_an_error_with_its_last_line(monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", "noise\nerror: the disk is full\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
    finding = doctor.training_step(torch.device("cpu"))
    assert finding.state == "error"
    assert "error: the disk is full" in finding.found


@pytest.mark.parametrize(("load", "state"), [(0.5, "error"), (1000.0, "warning")])
def test_a_step_that_does_not_end_is_given_up_and_a_busy_machine_is_no_error(
    monkeypatch, load, state
):
    def wait(*_, timeout, **__):
        assert timeout <= 60
        raise subprocess.TimeoutExpired("", timeout)

    monkeypatch.setattr(doctor.subprocess, "run", wait)
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (load, 0.0, 0.0))
    finding = doctor.training_step(torch.device("cpu"))
    assert finding.state == state
    assert "no step in 60 s" in finding.found


def test_json_says_whether_a_run_can_train_and_the_exit_code_too(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    verbs.doctor(["--json", "--no_training"])
    said = json.loads(capsys.readouterr().out)
    assert said["can_train"] is True  # warnings do not keep it from that
    subjects = {each["subject"] for each in said["findings"]}
    assert subjects == {"versions", "device", "attention", "compiler", "memory", "disk", "network"}
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(1, 0, 1))
    with pytest.raises(SystemExit, match="1"):
        verbs.doctor(["--json", "--no_training"])
    assert json.loads(capsys.readouterr().out)["can_train"] is False


@pytest.mark.stage
@pytest.mark.thorough
def test_the_bundled_model_trains_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finding = doctor.training_step(torch.device("cpu"))
    assert finding.state == "ok", finding
    assert "2 steps" in finding.found
    assert not list(tmp_path.iterdir())
