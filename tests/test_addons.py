"""Add-ons of other packages: what an installed one adds, and what a broken one costs."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from dschat_lora.config.addons import SEAMS
from helpers.addons import of_addon
from helpers.launcher import ROOT
from helpers.step1 import write_jsonl

pytestmark = pytest.mark.stage

ADDON = """
from dschat_lora import Addon

ADDON = Addon(
    "counting",
    verbs={"count": "counting.parts:count"},
    summaries={"count": "count the rows of a file"},
    options={"sft": "counting.parts:Options", "rlhf": "counting.parts:Options"},
    provides={
        "rollout_engine": {"likeliest": "counting.parts:Engine"},
        "environment": {"asks_back": "counting.parts:answer"},
        "reward_function": {"brevity": "counting.parts:brevity"},
        "algorithm": {"centred": "counting.parts:centred"},
        "row_format": {"pipes": "counting.parts:Pipes"},
    },
)
"""
PARTS = """
from dataclasses import dataclass

from dschat_lora.config.options import option


@dataclass(frozen=True)
class Options:
    every: int = option(10, help="count so often")

    def __post_init__(self):
        if self.every < 1:
            raise ValueError(f"--counting_every must be >= 1, got {self.every}")

    def check(self, config):
        if self.every == 13:
            raise ValueError(f"--counting_every 13 is refused with {config.run.output_dir}")


def count(argv):
    print(sum(1 for _ in open(argv[0])), "rows")


class Engine:
    def draw(self, asked, sampling):
        return [([7] * min(4, each.limit), None) for each in asked]


def answer(responses):
    return [None for _ in responses]


def brevity(responses, **columns):
    return [float(-len(each)) for each in responses]


def centred(outcome):
    total = outcome.total
    return total - total.mean()


class Pipes:
    @staticmethod
    def claims(value, path):
        return isinstance(value, str) and value.count("|") == 1

    @staticmethod
    def rows(value):
        prompt, completion = value.split("|")
        return [{"prompt": prompt, "completion": completion}]
"""
# What is wrong with an add-on, its module's line, and what is said of it.
BROKEN = {
    "raises": ("raise RuntimeError('no such luck')", "no such luck"),
    "exits": ("raise SystemExit", "SystemExit"),
    "none": ("ADDON = 3", "its entry point is a int, not an Addon"),
    "verb": ("ADDON = Addon('mine', verbs={'sft': 'a:b'})", "the package has the verb sft, too"),
    "verb_of_an_addon": (
        "ADDON = Addon('mine', verbs={'serve': 'a:b'})",
        "the package has the verb serve, too",
    ),
    "addon": ("ADDON = Addon('tinker')", "the package has the name tinker, too"),
    "seam": (
        "ADDON = Addon('mine', provides={'sampler': {'a': 'b:c'}})",
        f"it provides 'sampler', which is not one of {', '.join(SEAMS)}",
    ),
    "command": (
        "ADDON = Addon('mine', options={'sfft': 'a:b'})",
        "it has options of 'sfft', none of sft, reward, dpo, rlhf, generate or an add-on's verbs",
    ),
    "verbs": (
        "ADDON = Addon('mine', verbs=['count'])",
        "its verbs has ['count'], which is not a Mapping",
    ),
    "function": (
        "ADDON = Addon('mine', verbs={'count': print})",
        "<built-in function print> is not of the form module:object",
    ),
    "needs": (
        "ADDON = Addon('mine', needs=['yours'])",
        "it needs the add-on yours, which is not installed",
    ),
}
PLAYED = bool(of_addon("environments.addon"))
ASKED = "['rlhf', '--environment', 'nobody']," * PLAYED
SHORT = (
    "--max_steps 1 --max_answer_seq_len 16 --num_generations 2 --eval_prompts 0 --eval_ratio 0 "
    "--per_device_generation_batch_size 4 --per_device_training_batch_size 4 "
).split()


def install(site, package, files, name="counting", value=None):
    """A package with an entry point, as an installer leaves it."""
    for file, text in files.items():
        (site / package).mkdir(parents=True, exist_ok=True)
        (site / package / file).write_text(text)
    about = site / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[dschat_lora.addons]\n{name} = {value or f'{package}.addon:ADDON'}\n"
    )


def run(site, *command, cwd, **env):
    where = os.pathsep.join([str(site), str(ROOT)])
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": where, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of packages with an add-on, and one whose module raises."""
    path = tmp_path_factory.mktemp("site")
    install(path, "counting", {"__init__.py": "", "addon.py": ADDON, "parts.py": PARTS})
    install(path, "spoilt", {"__init__.py": "", "addon.py": BROKEN["raises"][0]}, name="spoilt")
    return path


LINE = "the add-on spoilt of the package spoilt cannot be loaded and is skipped: no such luck"


def test_its_row_format_and_its_options_serve_a_stage_script_beside_a_broken_one(site, tmp_path):
    (tmp_path / "rows.txt").write_text("".join(f"{n} and 1?|{n + 1}\n" for n in range(8)))
    main = str(ROOT / "training" / "step1_sft" / "main.py")
    options = (
        "--data_path rows.txt --counting_every 3 --max_steps 1 --eval_ratio 0 --output_dir out "
        "--save_interval 1"
    )
    ended = run(site, main, *options.split(), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (line,) = [each for each in ended.stderr.splitlines() if "add-on" in each]
    assert line.endswith(LINE)
    assert "8 prompt" in ended.stdout
    options = json.loads((tmp_path / "out" / "run.json").read_text())["config"]
    assert options["counting_every"] == 3
    again = ("sft", "--output_dir", "out", "--resume_from_checkpoint", "latest")
    shutil.rmtree(site / "counting-1.0.dist-info")
    try:
        ended = run(site, "-m", "dschat_lora", *again, cwd=tmp_path)
    finally:
        install(site, "counting", {})
    assert ended.returncode == 2
    (line,) = [each for each in ended.stderr.splitlines() if "error: " in each]
    assert line.endswith(
        "was made with --counting_every 3 of the add-on counting, which is not installed or has no "
        "such option"
    )


def test_what_it_provides_is_chosen_by_name_and_recorded(site, tmp_path):
    write_jsonl(tmp_path / "sums.jsonl", [{"prompt": f"{n} and 1?"} for n in range(8)])
    names = {
        "rollout_engine": "likeliest",
        **({"environment": "asks_back"} if PLAYED else {}),
        "reward_function": "brevity",
        "algorithm": "centred",
    }
    argv = [word for option, name in names.items() for word in (f"--{option}", name)]
    argv += ["--data_path", "sums.jsonl", "--output_dir", "out", *SHORT]
    ended = run(site, "-m", "dschat_lora", "rlhf", *argv, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    home = tmp_path / "out"
    options = json.loads((home / "run.json").read_text())["config"]
    assert {name: options[name] for name in names} == {**names, "reward_function": ["brevity"]}
    lines = map(json.loads, (home / "metrics.jsonl").read_text().splitlines())
    (line,) = [each for each in lines if each["kind"] == "train"]
    assert line["reward/brevity"] < 0


def test_verbs_help_and_errors_name_what_it_adds(site, tmp_path):
    code = (
        "import sys, dschat_lora.__main__ as program\n"
        "for argv in (['--help'], ['count', 'rows.txt'], ['sft', '--counting_every', '0'],\n"
        "    *([v, '--counting_every', '13', '--output_dir', 'here'] for v in ('sft', 'rlhf')),\n"
        f"    ['rlhf', '--rollout_engine', 'nobody'], {ASKED}\n"
        "    ['rlhf', '--algorithm', 'centered', '--reward_function', 'brevity'],\n"
        "    ['rlhf', '--reward_function', 'nobody'], ['sft', '--help', 'all']):\n"
        "    sys.argv = ['dschat-lora', *argv]\n"
        "    try: program.main()\n"
        "    except SystemExit as end: print('exit', end.code, flush=True)\n"
    )
    (tmp_path / "rows.txt").write_text("1|2\n")
    ended = run(site, "-c", code, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "  count     count the rows of a file" in ended.stdout
    assert "\n1 rows\n" in ended.stdout
    assert "\nadd-on counting:\n  --counting_every" in ended.stdout
    note, *errors = ended.stderr.splitlines()
    assert note == f"note: {LINE}"
    assert errors[0] == "error: --counting_every must be >= 1, got 0"
    said = "error: --counting_every 13 is refused with here"
    assert errors[1:3] == [said, said]
    names = ("likeliest", *(["asks_back"] * PLAYED), "centred", "brevity")
    for error, name in zip(errors[3:], names, strict=True):
        assert name in error


def test_each_broken_one_is_one_line_that_names_it(tmp_path):
    for name, (line, _) in BROKEN.items():
        addon = f"from dschat_lora import Addon\n{line}\n"
        install(tmp_path, name, {"__init__.py": "", "addon.py": addon}, name=name)
    code = (
        "from dschat_lora.config.addons import addon_options, installed\n"
        "from dschat_lora.config.addon_names import ADDONS\n"
        "import dschat_lora.commands.stages as stages, os, subprocess, sys\n"
        "[each.config for each in stages.STAGES.values()]\n"
        "print(*installed())\n"
        "assert {*installed()} <= {*ADDONS}\n"
        "if '0' == os.environ.get('RANK', '0'):\n"
        "    subprocess.run([sys.executable, '-m', 'dschat_lora', '--version'], check=True)\n"
    )
    ended = run(tmp_path, "-c", code, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    begun = "the add-on {0} of the package {0} cannot be loaded and is skipped: "
    said = [begun.format(name) + words for name, (_, words) in BROKEN.items()]
    lines = ended.stderr.splitlines()
    assert sorted(line[line.index("the add-on ") :] for line in lines) == sorted(said)
    assert run(tmp_path, "-c", code, cwd=tmp_path, RANK="1").stderr == ""


DATACLASS = (
    "from dataclasses import dataclass\nfrom dschat_lora.config.options import option\n"
    "@dataclass(frozen=True)\nclass Options:\n    "
)
OPTIONS = {
    "no_class": ("Options = 3", "its options are a int, not a dataclass"),
    "no_module": ("raise ImportError('no')", "no"),
    "no_option": (DATACLASS + "size: int = 3", "its Options.size is not an option(...)"),
    "lora": (
        DATACLASS + "dim: int = option(3, help='size')",
        "the package has the option lora_dim, too",
    ),
    "required": (DATACLASS + "size: int = option(help='size')", "--size is required"),
}


def test_options_that_no_command_can_have_are_left_out_in_one_line(tmp_path):
    for name, (parts, _) in OPTIONS.items():
        package = f"spoilt_{name}"
        options = f"options=dict.fromkeys(('sft', 'reward', 'dpo'), '{package}.parts:Options')"
        addon = f"from dschat_lora import Addon\nADDON = Addon('{name}', {options})\n"
        files = {"__init__.py": "", "addon.py": addon, "parts.py": parts + "\n"}
        install(tmp_path, package, files, name=name)
    ended = run(tmp_path, "-m", "dschat_lora", "sft", "--lora_dmi", "3", cwd=tmp_path)
    *notes, error = ended.stderr.splitlines()
    begun = "note: the add-on {} cannot be loaded and is skipped: {}"
    assert sorted(notes) == sorted(begun.format(name, says) for name, (_, says) in OPTIONS.items())
    assert error == "error: unknown option --lora_dmi; did you mean --lora_dim?"
