"""The package without its add-ons, and without any one of them."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from dschat_lora.config.addon_names import ADDONS
from dschat_lora.config.addons import installed
from dschat_lora.config.bundled import BUNDLED_DATA
from helpers.launcher import ROOT

pytestmark = pytest.mark.stage

VERBS = [verb for names in ADDONS.values() for verb in names.verbs.split()]
FUNCTIONS = [name for names in ADDONS.values() for name in names.functions.split()]
# Runs commands one after another, and prints how each ended. Where modules are to be imported
# first, each command gets a process of its own that has them.
PROGRAM = """
import importlib, io, json, os, runpy, sys
from contextlib import redirect_stderr, redirect_stdout
import dschat_lora.__main__ as program

def ended(argv):
    said, code = io.StringIO(), 0
    with redirect_stdout(said), redirect_stderr(said):
        try:
            if argv[0].endswith(".py"):
                sys.argv = argv
                runpy.run_path(argv[0], run_name="__main__")
            else:
                sys.argv = ["dschat-lora", *argv]
                program.main()
        except SystemExit as end:
            code = end.code or 0
    return json.dumps([code, said.getvalue()])

def ended_in_a_fork(argv):
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as file:
            file.write(ended(argv))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said

assert program.__file__.startswith(os.getcwd()), program.__file__
lists, modules = json.load(sys.stdin)
for name in modules:
    importlib.import_module(name)
for argv in lists:
    print((ended_in_a_fork if modules else ended)(argv))
"""


def copy(home, *left_out):
    """The package and its scripts in ``home`` without the add-ons ``left_out``, "" for all."""
    for name in ("dschat_lora", "training"):
        # Without compiled modules, which other tests write meanwhile.
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, home / name, ignore=ignored)
    for name in left_out:
        shutil.rmtree(home / "dschat_lora" / "addons" / name)
    return home


def run(home, *command, **more):
    # Without the finder of an editable installation, which has the modules of another checkout.
    start = (
        "import sys; sys.meta_path[:] = [each for each in sys.meta_path "
        "if not each.__module__.startswith('__editable__')]; import runpy; "
        "sys.argv = sys.argv[1:]; first = sys.argv[0]; "
        "runpy.run_path(first, run_name='__main__') if first.endswith('.py') "
        "else runpy.run_module(first, run_name='__main__', alter_sys=True)"
    )
    return subprocess.run(
        [sys.executable, "-c", start, *command],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        timeout=600,
        **more,
    )


def commands(home, *lists, modules=()):
    """How commands ended: the exit code and what was said."""
    (home / "program.py").write_text(PROGRAM)
    ended = run(home, "program.py", input=json.dumps([lists, modules]))
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A copy without add-ons."""
    return copy(tmp_path_factory.mktemp("alone"), "")


def test_a_verb_that_is_gone_and_a_function_say_so_in_a_line(alone):
    for verb, (code, said) in zip(VERBS, commands(alone, *([v] for v in VERBS)), strict=True):
        assert code == 2
        assert said == f"error: dschat-lora {verb} is an add-on that is not installed\n"
    (code, said), (_, page) = commands(alone, ["srve"], ["--help"])
    assert (code, said) == (2, "error: unknown command srve; did you mean serve?\n")
    assert "generate" in page
    (alone / "functions.py").write_text(
        f"import dschat_lora as dl\nfor name in {FUNCTIONS}:\n"
        "    try: getattr(dl, name)\n    except AttributeError as error: print(error)\n"
    )
    said = run(alone, "functions.py").stdout.splitlines()
    assert said == [f"dschat_lora.{each} is an add-on that is not installed" for each in FUNCTIONS]


def test_every_module_imports_and_the_stages_generate_and_merge_run(alone):
    paths = (path.relative_to(alone) for path in sorted((alone / "dschat_lora").rglob("*.py")))
    names = (".".join(path.with_suffix("").parts) for path in paths)
    modules = [each.removesuffix(".__init__") for each in names]
    rows = BUNDLED_DATA["train"].read_text(encoding="utf-8").splitlines(keepends=True)
    (alone / "rows.jsonl").write_text("".join(rows[:64]), encoding="utf-8")
    short = "--data_path rows.jsonl --max_steps 1 --eval_ratio 0 --num_warmup_steps 0".split()
    sft, pairs, dpo, rlhf = (
        ["training/step1_sft/main.py", "--lora_dim", "4", "--output_dir", "sft"],
        ["training/step2_reward/main.py", "--lora_dim", "4", "--output_dir", "reward"],
        [*"training/step2_dpo/main.py --model_name_or_path sft --output_dir dpo".split()],
        [
            *"training/step3_rlhf/main.py --actor_model_name_or_path sft --output_dir rlhf".split(),
            *"--critic_model_name_or_path reward --max_answer_seq_len 16".split(),
            *"--per_device_generation_batch_size 8 --per_device_training_batch_size 4".split(),
        ],
    )
    asked = ["generate", "sft", "--chat", "What is 2 plus 3?", "--max_new_tokens", "4"]
    lists = [*([*each, *short] for each in (sft, pairs, dpo, rlhf)), asked, ["merge", "sft"]]
    for code, said in commands(alone, *lists, modules=modules):
        assert code == 0, said
    assert (alone / "sft" / "model" / "config.json").is_file()


@pytest.mark.parametrize("name", sorted(installed()))
def test_without_one_add_on_the_others_have_their_verbs(tmp_path, name):
    home = copy(tmp_path, name)
    addons = [each for each in installed().values() if name not in (each.name, *each.needs)]
    verbs = [verb for each in addons for verb in each.verbs]
    helps = [["--help"], *([verb, "--help"] for verb in verbs), ["sft", "--help"]]
    needed = [[v] for each in installed().values() if name in each.needs for v in each.verbs]
    ended = commands(home, *helps, *needed)
    for argv, (code, said) in zip(helps, ended[: len(helps)], strict=True):
        assert (argv, code, said[:6]) == (argv, 0, "usage:")
    for (verb,), (code, said) in zip(needed, ended[len(helps) :], strict=True):
        line = f"dschat-lora {verb} needs the add-on {name}, which is not installed"
        assert (code, said) == (2, f"error: {line}\n")
