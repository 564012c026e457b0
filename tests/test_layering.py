"""The architecture: which room imports what, which modules start fast, and which ones print.

``FLOORS`` is the table; CONTRIBUTING.md has a copy, which a test compares. Each test lists all
offenders at once.
"""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from dschat_lora.config.addon_names import ADDONS
from dschat_lora.config.addons import installed
from helpers.addons import of_the_whole

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dschat_lora"
SCRIPTS = sorted((ROOT / "training").glob("*/main.py"))
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.stat().st_size)


class Room(NamedTuple):
    """What the modules of a room may import besides each other and the standard library."""

    rooms: str = ""
    libraries: str = ""
    # Modules of the room that import no heavy library and, even in functions, light modules alone.
    light: str = ""


# From the ground up: a room imports lower floors only. The longest name that fits is a module's.
FLOORS = [
    {
        "algos": Room(libraries="numpy torch", light="schedules"),
        "kernels": Room(libraries="torch triton"),
        "config": Room(
            libraries="yaml",
            light="addon_names addons bundled classic data files groups held options other_names"
            " parser plurals prompts roles staging stages values verb_names verbs when",
        ),
    },
    {
        "assets": Room("config", light="__init__ toy_world"),
        "report": Room("config", "tqdm", "appended_file directory log rollout_file terminal texts"),
        "data": Room(
            "algos config",
            "datasets jinja2 numpy pyarrow tokenizers torch transformers",
            "arrow_rows digests json_stream layouts media message_layouts messages readers "
            "row_formats rows sources templates thoughts tool_calls",
        ),
        "engine": Room(
            "algos config",
            "deepspeed psutil torch",
            "children ds_config failure_detection rendezvous",
        ),
        "lora": Room("config kernels", "bitsandbytes regex torch", "names"),
    },
    {
        "checkpoint": Room(
            "algos config engine lora",
            "safetensors torch transformers",
            "adapter_config history manifest quantization",
        ),
        "perf": Room("kernels lora", "torch", "cards"),
    },
    {
        "models": Room(
            "algos checkpoint config data engine kernels lora",
            "safetensors torch transformers",
            "option_checks source",
        )
    },
    {
        "generation": Room("algos kernels lora models", "psutil torch transformers"),
        "runtime": Room(
            "algos checkpoint config data engine lora models perf report",
            "packaging psutil torch",
            "caller checks directory resume stage_main validation",
        ),
    },
    {
        "rl.response": Room("algos data engine perf", "numpy torch", light="coroutines"),
        "rl.options": Room(
            "config models report runtime",
            light="algorithms config engines inputs names role_config",
        ),
    },
    {
        "rl.draw": Room(
            "algos data engine generation models rl.options rl.response runtime", "torch"
        ),
        "rl.score": Room("algos config data engine models report rl.options rl.response", "torch"),
    },
    {
        "rl.learn": Room(
            "algos config data engine lora models perf rl.draw rl.options rl.response rl.score"
            " runtime",
            "torch",
        )
    },
    {
        "rl.watch": Room(
            "algos engine lora models perf rl.learn rl.options rl.response rl.score runtime",
            "torch",
        )
    },
    {
        "rl.loop": Room(
            "algos config data engine generation kernels lora models perf report rl.draw rl.learn"
            " rl.options rl.response rl.score rl.watch runtime",
            "numpy torch",
            light="validation",
        ),
        "supervised": Room(
            "algos config data engine generation lora models perf report runtime",
            "numpy torch",
            light="validation",
        ),
    },
    {
        "commands": Room(
            "checkpoint config models runtime supervised", "psutil", "launch stages train verbs"
        )
    },
    {
        "api": Room(
            "commands config data engine models report rl.options runtime supervised",
            light="options process stages tracebacks verbs",
        ),
        "__main__": Room("commands config report runtime", light="__main__"),
        "old_names": Room(light="old_names"),
    },
    {
        "addons.environments": Room(
            "algos assets config data engine models rl.draw rl.options rl.response rl.score"
            " runtime",
            "gymnasium mcp numpy openenv reasoning_gym verifiers",
            "addon libraries options",
        ),
        "addons.evaluation": Room(
            "algos api config data engine generation models report"
            " rl.options rl.response rl.score runtime supervised",
            "lm_eval numpy",
            "addon config options python validation verbs",
        ),
        "addons.loralib": Room(
            "algos checkpoint commands config lora report runtime",
            "safetensors torch transformers",
            "addon seeds verbs",
        ),
        "addons.bases": Room(
            "checkpoint config engine lora models runtime", "torch transformers", "addon forms"
        ),
        "addons.publish": Room(
            "checkpoint commands config report runtime", "huggingface_hub", "addon config verbs"
        ),
        "addons.images": Room(
            "checkpoint config data engine lora models runtime",
            "PIL httpx huggingface_hub jinja2 safetensors tokenizers torch transformers",
            "addon families media options",
        ),
        "addons.engines": Room(
            "algos checkpoint config data engine generation lora models rl.draw rl.loop"
            " rl.options rl.response runtime",
            "torch transformers",
            "addon checks completions facts options",
        ),
        "addons.inspect": Room(
            "checkpoint config data report runtime", light="addon describe verbs"
        ),
        "addons.parts": Room(
            "config engine models report rl.learn rl.loop rl.options rl.response runtime",
            light="addon options",
        ),
        "addons.report": Room(
            "api config report runtime",
            "IPython jinja2",
            "addon curves html markup notebook rollouts run_data sections verbs verdict",
        ),
        "addons.trackers": Room("config report", "torch trackio wandb", "addon options trackers"),
        "addons.trainer": Room(
            "algos api checkpoint config data engine generation lora models report rl.draw"
            " rl.options runtime",
            "numpy torch",
            "addon",
        ),
        "addons.diagnostics": Room(
            "config engine rl.options rl.watch rl.loop", light="addon options"
        ),
        "addons.rewards": Room(
            "config models report rl.score runtime",
            "jsonschema lm_eval math_verify torch",
            "addon builtin external",
        ),
        "addons.serving": Room(
            "algos checkpoint config data engine generation lora models report runtime supervised",
            "h11 llguidance starlette torch transformers uvicorn",
            "addon config verbs endpoint.sockets",
        ),
        "addons.kto": Room(
            "algos config data engine models supervised", "numpy torch", "addon options"
        ),
        "addons.streaming": Room(
            "algos config data engine report rl.draw rl.loop runtime supervised",
            "datasets huggingface_hub numpy pyarrow",
            "addon options tar_rows",
        ),
    },
    {
        "addons.audit": Room(
            "addons.report api config data models report runtime",
            "datasketch numpy py3langid regex",
            "addon config python verbs",
        ),
        "addons.demo": Room(
            "addons.report algos api assets config data engine generation lora models report"
            " runtime supervised",
            light="addon demo",
        ),
        "addons.pipeline": Room(
            "addons.report checkpoint commands config models report rl.options runtime",
            light="addon placeholders recipe run verbs",
        ),
        "addons.agents": Room(
            "addons.environments addons.serving algos config data engine generation models report"
            " rl.draw rl.options rl.response rl.score runtime",
            "httpx openai starlette",
            "addon options",
        ),
        "addons.distill": Room(
            "addons.engines algos api commands config data engine lora models rl.draw rl.learn"
            " rl.options rl.response rl.score runtime",
            "numpy torch transformers",
            "addon algorithm config options python stage verbs",
        ),
        "addons.glue": Room(
            "addons.loralib algos checkpoint config data engine lora models report runtime",
            "datasets numpy scipy sklearn torch transformers",
            "addon config data validation verbs",
        ),
        "addons.nlg": Room(
            "addons.loralib algos checkpoint config data engine generation lora models report"
            " runtime supervised",
            "nltk pycocoevalcap sacrebleu tokenizers torch transformers",
            "addon config formats predictions validation verbs",
        ),
        "addons.tinker": Room(
            "addons.serving algos checkpoint commands config data engine generation lora models"
            " report runtime",
            "numpy safetensors starlette tinker torch",
            "addon config verbs",
        ),
    },
    {
        "addons.planning": Room(
            "addons.pipeline addons.report algos api commands config data engine generation lora"
            " models perf report rl.learn rl.loop rl.options rl.response rl.watch runtime",
            "optuna packaging psutil torch",
            "addon cards config families published python verbs",
        ),
        "addons": Room(light="old_names"),
    },
]
# The package itself holds the version, which every module may read.
ROOMS = {"": Room("config old_names", light="__init__")} | {
    name: room for floor in FLOORS for name, room in floor.items()
}
# Light modules whose functions load the heavy parts of an option when it is used.
LOADERS = set(
    """
    addons.agents.options addons.audit.config addons.demo.demo addons.diagnostics.options
    addons.distill.options addons.engines.options addons.environments.options
    addons.evaluation.options addons.images.media addons.parts.options addons.streaming.options
    api.options
    """.split()
)
# What runs before a mistake in an option is reported loads none of these.
HEAVY = ("torch", "transformers", "deepspeed", "datasets", "numpy", "pyarrow", "peft")
# Modules that may write to a standard stream.
SPEAKERS = {"report.log", "report.terminal", "runtime.stage_main", "supervised.inference"}
# Other packages' chatter is turned off where they are imported, and old names are found.
ACTIONS = {
    *("deepspeed_logger.setLevel", "warnings.filterwarnings", "disable_progress_bar"),
    "sys.meta_path.append",
}


def name_of(path):
    """``data.rows`` of ``dschat_lora/data/rows.py``; the package itself is empty."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def belongs(name, room):
    return name == room or bool(room and name.startswith(f"{room}."))


def room_of(name):
    return max((each for each in ROOMS if belongs(name, each)), key=len, default="")


def light_modules():
    for name, room in ROOMS.items():
        for module in room.light.split():
            inner = "" if module in ("__init__", name) else module
            yield ".".join(part for part in (name, inner) if part)


LIGHT = set(light_modules())


@cache
def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def module_exists(name):
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@cache
def imports(path):
    """``(line, full dotted name)`` of each import, at the top or inside a function."""
    named = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            named += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
            named += [(node.lineno, m if module_exists(m) else node.module) for m in modules]
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "late"
            and isinstance(node.args[0], ast.Constant)
        ):
            # late("room.module:function") imports when it is called
            named += [(node.lineno, f"dschat_lora.{node.args[0].value.partition(':')[0]}")]
    return sorted(set(named))


def own_imports(path):
    """``(line, name without the package's)`` of each import from the package."""
    for line, name in imports(path):
        root, _, rest = name.partition(".")
        if root == "dschat_lora":
            yield line, rest


def foreign_imports(path):
    """``(line, library)`` of each import from beyond the package, the standard library too."""
    for line, name in imports(path):
        root = name.partition(".")[0]
        if root != "dschat_lora":
            yield line, root


def listed(offenders):
    return "".join(f"\n{each}" for each in offenders)


def test_each_module_has_a_room_of_the_table():
    # Only the package itself belongs to the room without a name.
    lost = [name_of(path) for path in MODULES if name_of(path) and not room_of(name_of(path))]
    assert not lost, listed(lost)


@of_the_whole
def test_each_room_and_light_module_of_the_table_exists():
    names = {name_of(path) for path in PACKAGE.rglob("*.py")}
    gone = (set(ROOMS) | LIGHT) - names
    assert not gone, listed(sorted(gone))


def test_the_table_lets_a_room_import_lower_floors_only():
    below, offenders = set(), []
    for floor in FLOORS:
        for name, room in floor.items():
            offenders += [f"{name} -> {each}" for each in room.rooms.split() if each not in below]
        below |= set(floor)
    assert not offenders, listed(offenders)


def other_rooms(path):
    """Modules import only the rooms that theirs may."""
    room = room_of(name_of(path))
    allowed = {"", room, *ROOMS[room].rooms.split()}
    for line, name in own_imports(path):
        if room_of(name) not in allowed:
            yield line, f"{room} may not import {name}"


def other_libraries(path):
    """Modules import only the libraries that their room may."""
    room = room_of(name_of(path))
    # _typeshed is there for type checkers alone.
    allowed = {*sys.stdlib_module_names, "_typeshed", *ROOMS[room].libraries.split()}
    for line, library in foreign_imports(path):
        if library not in allowed:
            yield line, f"{room} may not import {library}"


def parsers(path):
    """The parser of options alone knows argparse."""
    for line, library in foreign_imports(path):
        if library == "argparse" and room_of(name_of(path)) != "config":
            yield line, "imports argparse"


def heavy_in_light(path):
    """Light modules import light modules alone, in functions too, but by ``late``."""
    left_out = {
        inner.lineno
        for node in nodes_of(path)
        if (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "late")
        for inner in ast.walk(node)
        if hasattr(inner, "lineno")
    }
    for line, name in own_imports(path):
        if name not in LIGHT and line not in left_out:
            yield line, f"{name_of(path)} is light, {name} is not"


def foreign_to_scripts(path):
    """Stage scripts import the package alone and no other stage."""
    for line, library in foreign_imports(path):
        if library not in sys.stdlib_module_names:
            yield line, library


def heavy_in_scripts(path):
    """Stage scripts check their options before anything heavy."""
    for line, module in own_imports(path):
        if module not in LIGHT:
            yield line, f"{module} is not light"


def speech(path):
    """Reports alone speak."""
    for node in nodes_of(path):
        if isinstance(node, ast.Name) and node.id == "print":
            yield node.lineno, "prints"
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout", "sys.stderr"):
            yield node.lineno, "uses a standard stream"


def namespaces(path):
    """No namespace of arguments travels."""
    nodes = nodes_of(path)
    varargs = [node.vararg for node in nodes if isinstance(node, ast.arguments)]
    for node in nodes:
        is_namespace = isinstance(node, ast.arg) and node.arg in ("args", "arguments")
        if is_namespace and node not in varargs:
            yield node.lineno, f"takes {node.arg}; take the values used"
        if isinstance(node, ast.Attribute) and node.attr == "Namespace":
            yield node.lineno, "names argparse.Namespace"


def acts(path):
    """No module acts when it is imported."""
    quiet = (
        *(ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef),
        *(ast.AsyncFunctionDef, ast.If),
    )
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        value = node.value if isinstance(node, ast.Expr) else None
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if not (isinstance(value, ast.Constant) or isinstance(node, quiet) or called in ACTIONS):
            yield node.lineno, "does something at import"


PROMPT = [path for path in MODULES if name_of(path) in LIGHT - LOADERS]
SILENT = [path for path in MODULES if name_of(path) not in SPEAKERS]


@pytest.mark.parametrize(
    ("offences", "paths"),
    [
        (other_rooms, MODULES),
        (other_libraries, MODULES),
        (parsers, MODULES),
        (heavy_in_light, PROMPT),
        (foreign_to_scripts, SCRIPTS),
        (heavy_in_scripts, SCRIPTS),
        (speech, [*SILENT, *SCRIPTS]),
        (namespaces, [*MODULES, *SCRIPTS]),
        (acts, MODULES),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_no_module_breaks_the_rule(offences, paths):
    broken = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in paths
        for line, what in offences(path)
    ]
    assert not broken, f"{offences.__doc__}{listed(broken)}"


def test_light_modules_load_nothing_heavy():
    """In one fresh interpreter, which names each module that brings something heavy."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    before = set(sys.modules)\n"
        "    importlib.import_module(name)\n"
        f"    new = [each for each in {HEAVY!r} if each in set(sys.modules) - before]\n"
        "    if new: print(name, 'loads', *new)\n"
        "print('imported', len(sys.argv) - 1)"
    )
    there = LIGHT & {name_of(path) for path in MODULES}
    names = sorted(f"dschat_lora.{name}".rstrip(".") for name in there)
    ended = subprocess.run(
        [sys.executable, "-c", code, *names],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stderr == ""
    assert ended.stdout == f"imported {len(names)}\n"


@of_the_whole
def test_one_module_names_the_add_ons_and_no_other_of_the_trunk_does():
    # Of these the first is the registry, and old names are read where there are add-ons.
    may = {"config.addons", "config.addon_names", "old_names"}

    def named(path):
        for node in nodes_of(path):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.search(r"\baddons[./]\w", text):
                yield node.lineno, text.split("\n")[0]
        for line, name in own_imports(path):
            if belongs(name, "addons"):
                yield line, name

    trunk = [path for path in MODULES if not belongs(name_of(path), "addons")]
    assert not [(path, *said) for path in trunk if name_of(path) not in may for said in named(path)]
    needs = {
        f"addons.{each.name}": [f"addons.{n}" for n in each.needs] for each in installed().values()
    }
    arrows = {
        name: [each for each in room.rooms.split() if each.startswith("addons.")]
        for name, room in ROOMS.items()
        if name.startswith("addons.")
    }
    needs["addons.distill"].append("addons.engines")  # for a teacher behind a server alone
    assert arrows == needs
    folders = {each.parent.name for each in PACKAGE.glob("addons/*/addon.py")}
    assert folders <= set(ADDONS)


def test_packages_are_empty_but_for_their_names():
    spoken = [path for path in PACKAGE.rglob("__init__.py") if path.stat().st_size]
    assert {name_of(path) for path in spoken} <= {"", "assets"}


def table():
    """The rows of ``FLOORS`` as CONTRIBUTING.md shows them, the top floor first."""

    def named(words):
        return ", ".join(f"`{word}`" for word in words.split() if word != "__init__")

    yield "| layer | package | packages it may import | libraries | modules that start fast |"
    yield "|---|---|---|---|---|"
    for number, floor in reversed([*enumerate(FLOORS, start=1)]):
        for name, room in floor.items():
            cells = (str(number), f"`{name}`", *map(named, room))
            yield "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def test_contributing_has_this_table():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in text, "the table should be" + listed(table())
