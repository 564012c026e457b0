"""Who may import whom, and who may speak. The tables are the architecture; this keeps them true."""

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dschat_lora"
SCRIPTS = sorted((ROOT / "training").glob("*/main.py"))
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.stat().st_size)

# layer -> (our layers and modules it may import besides itself, third parties it may import).
# The longest name that fits a module is its layer.
LAYERS = {
    "": (set(), set()),
    "__main__": ({"cli.main"}, set()),
    "algos": (set(), {"torch"}),
    "assets": (set(), set()),
    "attention": (set(), {"torch"}),
    "checkpoint": ({"lora", "config"}, {"torch", "safetensors"}),
    "checkpoint.adapter_config": ({"checkpoint.manifest"}, set()),
    "checkpoint.export": (
        {"checkpoint", "lora", "config", "engine"},
        {"torch", "transformers"},
    ),
    "checkpoint.extract": (
        {"checkpoint", "lora", "config"},
        {"torch", "transformers", "safetensors"},
    ),
    "checkpoint.history": ({"checkpoint.manifest"}, set()),
    "checkpoint.manifest": (set(), set()),
    "cli.options": (set(), {"yaml"}),
    "cli.main": (
        {
            *("", "checkpoint.adapter_config", "checkpoint.extract", "cli.options", "config"),
            *("demo", "preflight", "pipeline", "report.terminal", "score"),
        },
        set(),
    ),
    "config": ({"cli.options"}, set()),
    "course": (
        {
            *("checkpoint", "config", "data", "engine", "evaluation", "keeper", "layout", "models"),
            *("objective", "perf", "report", "run", "schedule", "stage", "trainer"),
        },
        {"torch"},
    ),
    "data": (
        {"algos", "attention", "config", "randomness"},
        {"torch", "numpy", "datasets", "pyarrow", "jinja2"},
    ),
    "demo": ({"assets", "cli.options", "judging", "report"}, set()),
    "engine": (set(), {"torch", "deepspeed", "psutil"}),
    "engine.ds_config": ({"config"}, set()),
    # GLUE: the loop is that of transformers' Trainer, around it is what the package has.
    "glue": (
        {
            *("checkpoint", "cli.options", "config", "data.rows", "engine", "lora"),
            *("models.source", "preflight", "report"),
        },
        {"torch", "transformers", "numpy", "scipy", "sklearn"},
    ),
    "glue.check": (
        {
            *("checkpoint.adapter_config", "cli.options", "data.rows", "glue.config", "glue.data"),
            *("glue.resume", "models.source", "preflight", "report"),
        },
        set(),
    ),
    "glue.config": ({"cli.options", "config", "glue.tasks"}, set()),
    "glue.data": ({"data.rows", "glue.config", "glue.tasks"}, {"datasets"}),
    "glue.resume": (
        {"checkpoint.manifest", "cli.options", "glue.config", "report.directory"},
        set(),
    ),
    "glue.tasks": (set(), set()),
    "evaluation": (
        {"config", "data", "engine", "models", "objective", "perf", "report", "run", "trainer"},
        set(),
    ),
    "interrupt": ({"engine"}, set()),
    "judging": (
        {
            *("assets", "config", "data", "engine", "lora", "models", "randomness", "score"),
            "world",
        },
        {"torch"},
    ),
    "keeper": (
        {"checkpoint", "cli.options", "config", "engine", "interrupt", "report", "resume", "run"},
        {"torch"},
    ),
    "layout": ({"config", "data", "engine", "models", "run", "stage"}, set()),
    "lora": ({"config"}, {"torch"}),
    "memory": (
        {"checkpoint.history", "config", "engine", "models", "perf", "resume"},
        {"psutil", "torch"},
    ),
    "models": (
        {"algos", "attention", "checkpoint", "config", "lora"},
        {"torch", "transformers"},
    ),
    "models.division": ({"config"}, set()),
    "models.errors": (set(), {"safetensors"}),
    "models.shard_loading": ({"lora"}, {"safetensors", "torch", "transformers"}),
    "models.source": ({"assets", "checkpoint.adapter_config"}, set()),
    # Training and judging GPT-2 that puts data into words.
    "nlg": (
        {
            *("algos", "checkpoint", "cli.options", "config", "course", "data", "engine", "layout"),
            *("lora", "models", "objective", "preflight", "report", "run", "stage"),
        },
        {"torch", "nltk", "sacrebleu", "pycocoevalcap"},
    ),
    "nlg.config": ({"algos.schedules", "cli.options", "config"}, set()),
    "nlg.preflight": ({"config", "data.rows", "models.source", "nlg.config", "preflight"}, set()),
    "nlg.plan": (
        {"algos.schedules", "config", "models.source", "nlg.config", "preflight", "resume"},
        set(),
    ),
    "objective": ({"algos", "config", "data"}, {"torch"}),
    "perf": ({"lora"}, {"torch"}),
    "pipeline": (
        {
            *("checkpoint.adapter_config", "checkpoint.history", "cli.options", "config"),
            *("models.source", "preflight", "report", "rlhf.config", "rlhf.preflight"),
        },
        {"psutil", "yaml"},
    ),
    "preflight": (
        {
            *("assets", "checkpoint.adapter_config", "checkpoint.history", "checkpoint.manifest"),
            *("config", "data.rows", "engine.ds_config", "models.division", "models.source"),
            *("report", "resume"),
        },
        set(),
    ),
    "randomness": (set(), set()),
    "reference": (
        {"config", "data", "engine", "layout", "objective", "perf", "stage"},
        {"numpy", "torch"},
    ),
    "report": ({""}, {"torch", "tqdm"}),
    "resume": (
        {
            *("checkpoint.history", "checkpoint.manifest", "cli.options", "config"),
            *("models.division", "report"),
        },
        set(),
    ),
    # What step 3 has of its own; it uses the rooms of the other stages, and none uses it.
    "rlhf": (
        {
            *("algos", "attention", "checkpoint", "cli.options", "config", "data", "engine"),
            *("interrupt", "keeper", "lora", "memory", "models", "perf", "randomness", "report"),
            *("run", "schedule", "stage", "trainer"),
        },
        {"torch", "numpy"},
    ),
    "rlhf.config": ({"cli.options", "config"}, set()),
    "rlhf.functions": (set(), set()),
    "rlhf.preflight": (
        {
            *("assets", "checkpoint.adapter_config", "config", "data.rows", "engine.ds_config"),
            *("models.division", "models.source", "preflight", "report", "resume"),
            *("rlhf.config", "rlhf.functions"),
        },
        set(),
    ),
    "rlhf.watch": (set(), set()),
    "run": (
        {
            *("checkpoint", "cli.options", "config", "engine", "interrupt", "randomness"),
            *("report", "resume"),
        },
        {"torch", "safetensors"},
    ),
    "schedule": ({"config"}, {"torch", "transformers"}),
    "score": ({"config", "data", "engine", "models", "report"}, {"torch"}),
    "stage": (
        {
            *("algos", "cli.options", "config", "data", "engine", "lora", "memory", "models"),
            *("report", "run"),
        },
        {"torch"},
    ),
    "trainer": (
        {"config", "data", "engine", "interrupt", "objective", "perf", "randomness", "report"},
        {"torch"},
    ),
    "world": (set(), set()),
}
# Loaded by every start-up check, so that a wrong option is reported at once.
LIGHT = """
    assets checkpoint.adapter_config checkpoint.history checkpoint.manifest cli.main cli.options
    config data.nlg data.rows data.sources engine.ds_config glue.check glue.config glue.data
    glue.resume glue.tasks models.division models.source nlg.config nlg.plan nlg.preflight
    pipeline.course preflight randomness report.directory report.terminal resume rlhf.config
    rlhf.functions rlhf.preflight world
""".split()
HEAVY = ("torch", "transformers", "deepspeed", "datasets", "numpy", "pyarrow", "peft")
# Modules that may write to a standard stream.
SPEAKERS = {"report.log", "report.terminal", "cli.options", "score"}


def name_of(path):
    """``data.rows`` of ``dschat_lora/data/rows.py``; the package itself is empty."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def layer_of(name):
    fitting = [each for each in LAYERS if name == each or (each and name.startswith(f"{each}."))]
    return max(fitting, key=len, default=None)


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path):
    """Full dotted names imported anywhere in a file, at the top or inside a function."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (m if module_exists(m) else node.module for m in modules)


def module_exists(name):
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def allowed(name, layers):
    """Whether the module ``name`` (without the package's) belongs to one of ``layers``."""
    return any(name == each or (each and name.startswith(f"{each}.")) for each in layers)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_imports_only_what_its_layer_may(path):
    layer = layer_of(name_of(path))
    assert layer is not None, f"{path} has no layer; add it to the table, and say why"
    ours, theirs = LAYERS[layer]
    for imported in imports(path):
        root, _, rest = imported.partition(".")
        if root == "dschat_lora":
            assert allowed(rest, {layer} | ours), f"{layer} may not import {imported}"
        else:
            fine = root in sys.stdlib_module_names or root in theirs
            assert fine, f"{layer} may not import {imported}"


def test_every_layer_of_the_table_exists():
    names = {name_of(path) for path in PACKAGE.rglob("*.py")}
    gone = [each for each in LAYERS if not any(allowed(name, {each}) for name in names)]
    assert not gone


@pytest.mark.parametrize("root", ["deepspeed", "transformers", "datasets", "argparse"])
def test_each_big_library_is_known_to_its_layers_alone(root):
    owners = {
        "deepspeed": {"engine"},
        "transformers": {"models", "checkpoint", "schedule", "glue"},
        "datasets": {"data", "glue"},
        "argparse": {"cli"},
    }[root]
    users = {
        name_of(path).split(".")[0]
        for path in MODULES
        if any(each.split(".")[0] == root for each in imports(path))
    }
    assert users <= owners


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.parent.name)
def test_stage_script_imports_the_package_alone_and_no_other_stage(path):
    for imported in imports(path):
        root = imported.split(".")[0]
        assert root == "dschat_lora" or root in sys.stdlib_module_names, imported


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.parent.name)
def test_stage_script_checks_its_options_before_anything_heavy(path):
    at_top = [node for node in tree_of(path).body if isinstance(node, ast.ImportFrom)]
    ours = [node.module for node in at_top if node.module.startswith("dschat_lora")]
    heavy = [name for name in ours if name.removeprefix("dschat_lora.") not in LIGHT]
    assert not heavy


@pytest.fixture(scope="module")
def loaded_with():
    """Light module -> heavy packages it loads, each in a fresh interpreter."""
    code = (
        "import importlib, sys\n"
        "importlib.import_module('dschat_lora.' + sys.argv[1])\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", code, name],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in LIGHT
    }
    ended = {name: process.communicate(timeout=60) for name, process in running.items()}
    assert not {name: err for name, (_, err) in ended.items() if err}
    return {name: out.split() for name, (out, _) in ended.items()}


@pytest.mark.parametrize("name", LIGHT)
def test_start_up_loads_nothing_heavy(loaded_with, name):
    assert loaded_with[name] == []


@pytest.mark.parametrize("path", [*MODULES, *SCRIPTS], ids=str)
def test_reports_alone_speak(path):
    if path in MODULES and name_of(path) in SPEAKERS:
        return
    for node in ast.walk(tree_of(path)):
        is_print = isinstance(node, ast.Name) and node.id == "print"
        is_stream = (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr) in {("sys", "stdout"), ("sys", "stderr")}
        )
        assert not is_print, f"{path}:{node.lineno} prints"
        assert not is_stream, f"{path}:{node.lineno} uses a standard stream"


def test_options_write_one_line_in_fail_alone():
    tree = tree_of(PACKAGE / "cli" / "options.py")
    (fail,) = [node for node in tree.body if getattr(node, "name", "") == "fail"]
    streams = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr")
    }
    assert streams <= set(range(fail.lineno, fail.end_lineno + 1))


@pytest.mark.parametrize("path", [*MODULES, *SCRIPTS], ids=str)
def test_no_namespace_of_arguments_travels(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.arg):
            assert node.arg not in ("args", "arguments") or node in varargs(path), (
                f"{path}:{node.lineno} takes {node.arg}; take the values used"
            )
        if isinstance(node, ast.Attribute) and node.attr == "Namespace":
            raise AssertionError(f"{path}:{node.lineno} names argparse.Namespace")


def varargs(path):
    return [node.vararg for node in ast.walk(tree_of(path)) if isinstance(node, ast.arguments)]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_acts_when_imported(path):
    quiet = (
        *(ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef),
        ast.If,
    )
    for node in tree_of(path).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or isinstance(node, quiet) or node_text(path, node) in QUIETENERS:
            continue
        raise AssertionError(f"{path}:{node.lineno} does something at import")


# Other packages' chatter is turned off where they are imported.
QUIETENERS = {
    "deepspeed_logger.setLevel",
    "warnings.filterwarnings",
    "disable_progress_bar",
}


def node_text(path, node):
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return ast.unparse(node.value.func) if is_call else ""


def test_packages_are_empty_but_for_their_names():
    spoken = [path for path in PACKAGE.rglob("__init__.py") if path.stat().st_size]
    assert {name_of(path) for path in spoken} <= {"", "assets"}
