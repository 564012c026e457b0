"""The page, Makefile, image and Colab install by the same steps; what the image is, and is not."""

import json
import re
import shlex
import socket
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from glob import glob
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import SupervisedConfig
from helpers.addons import of_the_whole

ROOT = Path(__file__).resolve().parents[1]
# Ways to install that leave the same packages behind.
SILENT = {"--quiet", "--no-cache-dir", "--editable"}
INSTALL = (ROOT / "docs" / "install.md").read_text("utf-8")


def instructions():
    """(name, words) of each instruction of the Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line]


def given(name):
    """What instructions of this name say, by the defaults of arguments."""
    defaults = dict(words.split("=", 1) for each, words in instructions() if each == "ARG")
    filled = re.compile(r"\$\{(\w+)\}")
    return [
        filled.sub(lambda found: defaults[found[1]], words)
        for each, words in instructions()
        if each == name
    ]


def steps(text):
    """Arguments of each ``pip install`` of a text, in order."""
    found = re.findall(r"\bpip install ([^&\n]+)", text)
    return [[word for word in shlex.split(each) if word not in SILENT] for each in found]


def documented_steps():
    return steps(INSTALL.split("## In a con")[0])


def dockerfile_steps():
    return steps("\n".join(given("RUN")))


def makefile_steps():
    command = ["make", "--dry-run", "demo", "VENV=elsewhere"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return steps(done.stdout)


def test_the_page_installs_in_three_steps_by_the_tested_versions():
    assert len(documented_steps()) == 3
    assert all(each[:2] == ["--constraint", "constraints.txt"] for each in documented_steps())
    (pinned,) = re.findall(r"^torch==.*", (ROOT / "constraints.txt").read_text(), re.M)
    assert documented_steps()[1][2:] == [pinned]


@pytest.mark.parametrize("found", [makefile_steps, dockerfile_steps])
def test_the_same_steps_install_everywhere(found):
    assert found() == documented_steps()


def declared_python():
    """The lower bound of setup.py, such as 3.11."""
    return re.search(r'python_requires=">=([\d.]+)"', (ROOT / "setup.py").read_text())[1]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("pyproject.toml", r'target-version = "py3(\d+)"'),
        ("pyproject.toml", r'python_version = "3\.(\d+)"'),
        ("Makefile", r"^OLDEST = 3\.(\d+)$"),
        *((f"{name}.md", r"Python 3\.(\d+) or") for name in ("README", "docs/install")),
        *(
            (f"{name}.md", r"Python 3\.(\d+) or")
            for name in ("docs/quick_start", "benchmarks/README")
        ),
        ("CONTRIBUTING.md", r"^\| 3\.(\d+) \|"),
    ],
)
def test_the_oldest_python_is_the_same_everywhere(name, pattern):
    found = re.findall(pattern, (ROOT / name).read_text("utf-8"), re.M)
    assert {f"3.{each}" for each in found} == {declared_python()}


@pytest.mark.parametrize(
    ("line", "oldest", "found"),
    [
        ("from typing import override", None, "'typing.override' member requires !2, 3.12"),
        ("import itertools\nitertools.batched", None, "'itertools.batched' member"),
        ("from typing import Self", "3.10", "'typing.Self' member requires !2, 3.11"),
        ("from typing import Self", None, ""),
        ("from dataclasses import field\n(1 + 1).long", None, ""),
        ("from dataclasses import field\nimport md5", None, "File with incompatible versions"),
    ],
)
def test_make_lint_finds_what_the_oldest_python_lacks(line, oldest, found, tmp_path):
    pytest.importorskip("vermin")
    (tmp_path / "fits.py").write_text("from typing import Any\n")
    (tmp_path / "planted.py").write_text(line + "\n")
    command = ["make", "--silent", "--no-print-directory", "oldest", f"PACKAGES={tmp_path}"]
    command += [f"OLDEST={oldest}"] if oldest else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (2 if found else 0)
    assert found in done.stdout
    assert bool(done.stdout) == bool(found)


def test_an_older_python_is_told_in_one_line_before_anything_is_made(tmp_path):
    old = tmp_path / "python3"
    code = "import sys; sys.version_info, sys.version = (3, 10), '3.10.13 x'; exec(sys.argv[2])"
    old.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{code}" "$@"\n')
    old.chmod(0o755)
    command = ["make", "--no-print-directory", "demo", f"VENV={tmp_path}/made", f"PYTHON={old}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    first, *last = done.stderr.splitlines()
    assert first.startswith(f"error: Python 3.11 or later is needed, {old} is 3.10.13; PYTHON=")
    assert len(last) == 1  # make's own
    assert not (tmp_path / "made").exists()


@cache
def given_to_setuptools():
    """What setup.py gives setuptools."""
    source = (ROOT / "setup.py").read_text()
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr("setuptools.setup", found.update)
        exec(compile(source, "setup.py", "exec"), {"__file__": str(ROOT / "setup.py")})
    return found


def extras():
    """Requirements of each extra of setup.py, and of the package itself by the name core."""
    found = given_to_setuptools()
    needed = {"core": found["install_requires"], **found["extras_require"]}
    return {name: [*map(Requirement, needs)] for name, needs in needed.items()}


def test_a_wheel_has_every_file_of_the_package():
    package = ROOT / "dschat_lora"
    inside = {path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    inside |= {package / path.relative_to(ROOT) for path in ROOT.glob("configs/**/*.*")}
    listed = {
        package / name
        for pattern in given_to_setuptools()["package_data"]["dschat_lora"]
        for name in glob(pattern, root_dir=package, recursive=True)
    }
    code = {path for path in inside if path.suffix == ".py"}
    assert inside - code - listed == set()
    folders = {".".join(path.relative_to(ROOT).parent.parts) for path in code}
    assert folders == set(given_to_setuptools()["packages"])


def test_extras_that_errors_name_exist_and_old_names_install_at_least_what_they_did():
    found = {name: {need.name for need in needs} for name, needs in extras().items()}
    for name, packages in {
        "agents": "starlette uvicorn openai",
        "dedup": "datasketch py3langid",
        "eval": "lm-eval",
        "glue": "accelerate scikit-learn scipy",
        "meteor": "pycocoevalcap",
        "nlg": "nltk sacrebleu",
        "serve": "starlette uvicorn",
        "structured": "llguidance",
        "tinker": "starlette uvicorn tinker",
        "tune": "optuna",
    }.items():
        assert found[name] >= set(packages.split())
    text = "".join(path.read_text("utf-8") for path in (ROOT / "dschat_lora").rglob("*.py"))
    asked = set(re.findall(r"dschat_lora\[(\w+)\]|\bextra=\"(\w+)\"", text))
    old = {"dedup", "eval", "serve", "structured", "tune"}
    assert {a or b for a, b in asked} <= found.keys() - old


@of_the_whole
def test_versions_that_are_asked_for_are_the_lowest_that_setup_declares():
    text = "".join(path.read_text("utf-8") for path in (ROOT / "dschat_lora").rglob("*.py"))
    asked = {*map(Requirement, re.findall(r'"([a-z_]+>=[\d.]+)"', text))}
    assert {each.name for each in asked} >= {"mcp", "openai", "verifiers"}
    declared = {need.name: need for needs in extras().values() for need in needs}
    assert {str(each) for each in asked} == {
        f"{each.name}>={re.search('>=([^,]+)', str(declared[each.name]))[1]}" for each in asked
    }


def test_the_tested_versions_are_those_that_extras_allow():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    for extra, needs in extras().items():
        for need in needs:
            found = tested.get(need.name)
            assert found is None or found in need.specifier, (extra, need)


@pytest.mark.thorough
def test_extras_go_together_and_with_the_tested_versions(tmp_path):
    """What resolves for all extras at once resolves for every pair of them."""
    try:
        socket.create_connection(("pypi.org", 443), 10).close()
    except OSError as error:
        pytest.skip(f"the package index is not reached: {error}")
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--report", report, "--constraint", "constraints.txt"]
    command += {str(need) for needs in extras().values() for need in needs}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]}
    assert {"openai", "mcp", "verifiers", "openenv-core"} <= found


def test_colab_installs_the_wheel_and_keeps_its_torch():
    ((pattern,),) = steps(INSTALL.split("<!-- colab -->")[1].split("```")[1])
    name = given_to_setuptools()["name"]
    assert fnmatch(f"{name}-{given_to_setuptools()['version']}-py3-none-any.whl", pattern)


def test_the_torch_that_fits_on_colab_is_what_setup_declares():
    low, below = re.search(r"must be ([\d.]+) or later and\s+below ([\d.]+):", INSTALL).groups()
    declared = re.search(r'"(torch\W[^"]+)"', (ROOT / "setup.py").read_text())[1]
    assert Requirement(declared).specifier == SpecifierSet(f">={low},<{below}")


def test_the_image_has_no_compiler_and_a_user_without_rights():
    packages = re.findall(r"apt-get install (.*?)\s+(?:&&|$)", "\n".join(given("RUN")))
    assert [each.split()[-1] for each in packages] == ["python3-venv"]
    assert re.fullmatch(r"nvidia/cuda:[\d.]+-base-ubuntu[\d.]+", given("FROM")[0])
    last = given("USER")[-1].split(":")[0]
    assert last.isdecimal()
    assert int(last) > 0


def test_caches_and_outputs_of_the_image_lie_on_its_volumes():
    volumes = json.loads(given("VOLUME")[0])
    variables = dict(word.split("=") for each in given("ENV") for word in shlex.split(each))
    places = [variables[name] for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME")]
    for place in (*places, given("WORKDIR")[-1]):
        assert f"/{place.split('/')[1]}" in volumes
    made = next(each for each in given("RUN") if "install --directory --mode 1777" in each)
    assert made.split("1777")[1].split() == volumes


def test_the_image_for_older_drivers_takes_arguments_that_the_dockerfile_has():
    asked = re.findall(r"--build-arg ['\"]?(\w+)=", INSTALL)
    assert {"BASE", "TORCH_WHEEL"} <= set(asked)
    assert set(asked) <= {words.split("=")[0] for words in given("ARG")}


def test_the_image_says_whether_it_can_train_and_its_health_leaves_the_gpu_alone():
    assert json.loads(given("ENTRYPOINT")[0]) + json.loads(given("CMD")[0]) == [
        "dschat-lora",
        "doctor",
    ]
    health = json.loads(given("HEALTHCHECK")[0].split(" CMD ")[1])
    assert health[-3:] == ["dschat-lora", "doctor", "--no_training"]
    assert {"CUDA_VISIBLE_DEVICES=", "DS_ACCELERATOR=cpu"} <= set(health)


def test_what_is_copied_into_the_image_is_what_is_installed():
    """As the wheel of tests/stages/test_wheel_command.py is made, and the constraints."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    taken = {line.removeprefix("!") for line in rules if line.startswith("!")}
    sources = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "dschat_lora", "configs"}
    assert taken == sources | {"constraints.txt"}


def test_commands_for_containers_mount_both_volumes_and_take_options_that_exist():
    text = INSTALL.replace("\\\n", " ")
    found = re.findall(r"^((?:docker|podman) run .*) dschat_lora (sft .*)$", text, re.M)
    assert [each.split()[0] for each, _ in found] == ["docker", "docker", "podman"]
    for container, command in found:
        options = shlex.split(container)
        volumes = [after for word, after in pairwise(options) if word == "--volume"]
        assert [each.split(":")[1] for each in volumes] == ["/work", "/cache"]
        argv = shlex.split(re.sub(r"--num_gpus \d+", "", command))
        parse_config(SupervisedConfig, argv[1:])
