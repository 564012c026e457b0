"""The structure of the package in figures: sizes, rooms, imports, fields, features, style.

``python scripts/structure.py [--commit COMMIT] [--json]`` measures the working tree or a commit.

``python scripts/structure.py --imports sft --max_steps 1`` runs a command, and says how many files
and lines of the package and of its trunk it has imported when it ends; files without a line are not
counted.

Code lines are those without blank lines, comments and docstrings. A function's length is from its
``def`` to its end, and functions within functions count too. Rooms are those of ``FLOORS`` in
tests/test_layering.py, and folders that it does not name. For arrows and circles all of ``addons/``
is one room, and so is one that the table divides, as ``rl``. An arrow is a pair of rooms of which
the first imports from the second, at the top of a module or in a function, by ``import`` or
``late("module:name")``, but not under ``TYPE_CHECKING``. A circle is two rooms that import each
other. The package's own ``__init__``, with the version, is no room.

Parts of a room are its sub-folders and the files directly in it. The depth of imports is the number
of modules on the longest chain in which each imports the next, all of the room; the modules of a
circle all count. Siblings are the other modules of the room that a module imports.

Fields are those in a dataclass's own body; arguments are without ``self``. A file mentions a
feature, or names an engine, if any of its text does, comments and docstrings included. A plain
``Any`` is a whole annotation; a message of no effect is a string, other than a docstring, that
contains "no effect".
"""

import ast
import atexit
import io
import json
import math
import re
import runpy
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import tokenize
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dschat_lora"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = dict[str, set[str]]
# What mentions a feature, and the files, by their paths in the package, that are its own room.
FEATURES = {
    "4-bit": (r"quanti[sz]|4.?bit|four.?bit|nf4|bitsandbytes|qlora", r"nf4|four_bit"),
    "tensor parallel": (r"tensor.?parallel|lora\.parallel|tp_size", r"tensor_parallel|lora/paral"),
    "experts": (r"expert", r"expert"),
    "environments, turns": (  # not Jinja's class, nor a role of chat templates
        r"(?<!jinja2\.)(?<!\"ipython\", \")environment(?!s? variable)|max_turns",
        r"^addons/",
    ),
    "teachers": (r"teacher", r"teacher|distil"),
    "streaming": (r"streaming|streamed|stream_?loader|prompt_?stream|tar_rows", r"stream|tar_rows"),
    "agents": (r"agent(?!_store)", r"^addons/"),  # not torchrun's store
    "context parallel": (r"(context|sequence).?parallel", r"context_parallel"),
    "rollout servers": (r"vllm|sglang|rollout.?server|[._]servers\b", r"^addons/"),
}
FOLDERS = ("training", "tests", "benchmarks", "scripts")
COUNTED = ("RlhfSetup", "Generator", "Generator.__init__", "Response", "iterate")
# What names engines that draw responses beside the run, and the room in which it may.
ENGINES = (r"vllm|sglang|rollout_?server|by_servers", "addons")
LOOP = {"RlhfTrainer", "set_up"}  # their modules' siblings are counted by default
SILENT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}


class Module(NamedTuple):
    """A file of Python with its syntax tree."""

    name: str  # rl.trainer of dschat_lora/rl/trainer.py
    path: str  # below the folder that is measured
    source: str
    nodes: list[ast.AST]  # of the whole tree, the module itself first

    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    def definitions(self) -> Iterator[tuple[str, Any]]:
        """Classes and functions of the module and its classes, by their names from the package."""
        ahead = [(self.name, self.nodes[0])]
        for name, node in ahead:  # which grows
            for child in node.body:
                if isinstance(child, Function | ast.ClassDef):
                    yield f"{name}.{child.name}", child
                if isinstance(child, ast.ClassDef):
                    ahead.append((f"{name}.{child.name}", child))


def modules_below(top: Path) -> list[Module]:
    modules = []
    for path in sorted(top.rglob("*.py")):
        place, source = path.relative_to(top), path.read_text(encoding="utf-8")
        name = ".".join(part for part in place.with_suffix("").parts if part != "__init__")
        modules.append(Module(name, str(place), source, [*ast.walk(ast.parse(source))]))
    return modules


def is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def docstrings(module: Module) -> list[ast.AST]:
    """Strings that stand alone."""
    alone = [node.value for node in module.nodes if isinstance(node, ast.Expr)]
    return list(filter(is_text, alone))


def code_lines(module: Module) -> int:
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if tokenize.tok_name[token.type] not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in docstrings(module):
        lines.difference_update(range(node.lineno, node.end_lineno + 1))
    texts = module.source.splitlines()
    return sum(bool(texts[line - 1].strip()) for line in lines)


def length(node: Function) -> int:
    return node.end_lineno - node.lineno + 1


def size(modules: list[Module]) -> dict[str, float]:
    lengths = [length(node) for module in modules for node in module.functions()]
    return {
        "files": len(modules),
        "lines": sum(len(module.source.splitlines()) for module in modules),
        "code lines": sum(map(code_lines, modules)),
        "functions": len(lengths),
        "median": median(lengths or [0]),
    }


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, without what is for type checkers alone."""
    is_typing = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for child in node.orelse if is_typing else ast.iter_child_nodes(node):
        yield child
        yield from run_time_nodes(child)


def imports(module: Module, names: set[str]) -> set[str]:
    """The other modules of the package that one imports."""
    found = set()
    for node in run_time_nodes(module.nodes[0]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full.removeprefix(f"{PACKAGE}.") in names else node.module)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "late"
            and is_text(node.args[0])
        ):
            found.add(f"{PACKAGE}.{ast.literal_eval(node.args[0]).partition(':')[0]}")
    own = {each.partition(".")[2] for each in found if f"{each}.".startswith(f"{PACKAGE}.")}
    return own & names - {module.name}


def arrows(graph: Graph, part_of: Mapping[str, str]) -> Graph:
    """The graph of the parts to which modules belong; modules without a part are left out."""
    between: Graph = {part: set() for part in part_of.values()}
    for name, part in part_of.items():
        between[part] |= {part_of[each] for each in graph[name] if each in part_of} - {part}
    return between


def figures_of(graph: Graph, between: str) -> dict[str, Any]:
    pairs = {(a, b) for a in graph for b in graph[a]}
    mutual = sorted(f"{a} <-> {b}" for a, b in pairs if a < b and (b, a) in pairs)
    groups = {" ".join(sorted(group)) for group in components(graph).values() if len(group) > 1}
    return {
        f"arrows between {between}": len(pairs),
        f"circles between {between}": mutual,
        f"strongly connected {between}": sorted(groups),
    }


def components(graph: Graph) -> dict[str, frozenset[str]]:
    """For each node those that reach it and that it reaches, itself among them."""
    reached = {}
    for start in graph:
        reached[start], ahead = {start}, [start]
        while ahead:
            new = graph[ahead.pop()] - reached[start]
            reached[start] |= new
            ahead += new
    return {a: frozenset(b for b in reached[a] if a in reached[b]) for a in graph}


def longest_chain(graph: Graph) -> list[str]:
    component, chains = components(graph), {}

    def chain(node: str) -> list[str]:
        group = component[node]
        if group not in chains:
            below = sorted(set().union(*(graph[each] for each in group)) - group)
            chains[group] = sorted(group) + max(map(chain, below), key=len, default=[])
        return chains[group]

    return max(map(chain, sorted(graph)), key=len, default=[])


def floors(root: Path) -> dict[str, int]:
    """The floor of each room in the layering test's table, from the ground up."""
    tree = ast.parse((root / "tests" / "test_layering.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    tables = [node.value for node in assigned if ast.unparse(node.targets[0]) == "FLOORS"]
    rows = [floor.keys for table in tables for floor in table.elts]
    return {ast.literal_eval(key): number for number, row in enumerate(rows) for key in row}


def belongs(name: str, room: str) -> bool:
    return f"{name}.".startswith(f"{room}.")


def rooms(graph: Graph, floor_of: Mapping[str, int]) -> tuple[dict[str, str], dict[str, Any]]:
    """The room of each module, and the arrows between rooms."""
    fine = {}
    for name in graph:
        named = [room for room in floor_of if belongs(name, room)]
        fine[name] = max(named, key=len, default=name.partition(".")[0])
    addons = {name: ".".join(name.split(".")[:2]) for name in graph if belongs(name, "addons")}
    room_of = fine | dict.fromkeys(addons, "addons")
    upwards = [
        f"{a} -> {b}"
        for a, others in arrows(graph, fine).items()
        for b in others
        if floor_of.get(a, math.inf) < floor_of.get(b, 0)
    ]
    trunk = graph.keys() - addons.keys()
    whole = {name: room.partition(".")[0] for name, room in room_of.items()}
    return room_of, figures_of(arrows(graph, whole), "rooms") | {
        "arrows to a higher floor": sorted(upwards),
        "arrows among add-ons": sum(map(len, arrows(graph, addons).values())),
        "modules of the trunk that import add-ons": sorted(
            name for name in trunk if graph[name] & addons.keys()
        ),
    }


def inside(graph: Graph, room: str, folders: set[str]) -> dict[str, Any]:
    """The parts of a room, and the imports between its modules."""
    own = {name for name in graph if name.startswith(f"{room}.")}
    part_of = {name: ".".join(name.split(".")[: room.count(".") + 2]) for name in own}
    chain = longest_chain({name: graph[name] & own for name in own})
    return {
        "flat files": len(set(part_of.values()) - folders),
        "sub-folders": len(set(part_of.values()) & folders),
        **figures_of(arrows(graph, part_of), "parts"),
        "import depth": len(chain),
        "longest chain": [" > ".join(name.removeprefix(f"{room}.") for name in chain)],
    }


def fields_and_arguments(modules: list[Module]) -> tuple[Counter[str], Counter[str]]:
    fields, arguments = Counter(), Counter()
    for name, node in (each for module in modules for each in module.definitions()):
        if isinstance(node, Function):
            given = node.args
            names = [arg.arg for arg in given.posonlyargs + given.args + given.kwonlyargs]
            variable = [each for each in (given.vararg, given.kwarg) if each]
            arguments[name] = len({*names} - {"self", "cls"}) + len(variable)
        elif any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            annotated = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            fields[name] = sum("ClassVar" not in ast.unparse(each) for each in annotated)
    return fields, arguments


def mentions(modules: list[Module]) -> dict[str, str]:
    figures = {}
    for feature, (pattern, room) in FEATURES.items():
        paths = [m.path for m in modules if re.search(pattern, m.source, re.IGNORECASE)]
        outside = [path for path in paths if not re.search(room, path)]
        figures[feature] = f"{len(outside)} / {len(paths)}"
    return figures


def assigns_found(node: ast.AST) -> bool:
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    return any(each.id == "found" and isinstance(each.ctx, ast.Store) for each in names)


def style(modules: list[Module]) -> dict[str, Any]:
    nodes = [node for module in modules for node in module.nodes]
    functions = [(m.name, node) for m in modules for node in m.functions()]
    spoken = {*filter(is_text, nodes)} - {text for m in modules for text in docstrings(m)}
    calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
    annotations = [getattr(node, "annotation", None) for node in nodes]
    annotations += [node.returns for _, node in functions]
    names = [(n.removeprefix(f"{m.name}."), node) for m in modules for n, node in m.definitions()]
    public = [(name, node) for name, node in names if not re.search(r"(^|\.)_", name)]
    documented = sum(ast.get_docstring(node) is not None for _, node in public)
    classes = Counter(name for name, node in public if isinstance(node, ast.ClassDef))
    return {
        "isinstance(config, ...)": sum(call.startswith("isinstance(config,") for call in calls),
        'messages of "no effect"': sum("no effect" in node.value for node in spoken),
        "plain Any": sum(isinstance(a, ast.Name) and a.id == "Any" for a in annotations),
        "public classes of one name": sorted(name for name, num in classes.items() if num > 1),
        "lines of the largest function": most({f"{m}.{f.name}": length(f) for m, f in functions}),
        "lines of the largest file": most({m.path: len(m.source.splitlines()) for m in modules}),
        "functions that assign found": sum(assigns_found(node) for _, node in functions),
        "public docstrings": documented,
        "public definitions without": len(public) - documented,
    }


def most(counts: Mapping[str, int], num: int = 1) -> dict[str, int]:
    return dict(Counter(counts).most_common(num))


def measure(
    root: Path, room: str = "rl", siblings: Sequence[str] = (), count: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Every figure of the checkout at ``root``, by heading and name; see ``--help``."""
    modules = modules_below(root / PACKAGE)
    named = {module.name for module in modules}
    graph = {module.name: imports(module, named) for module in modules if module.name}
    room_of, between = rooms(graph, floors(root))
    divided = {f"{PACKAGE}/{each}": [] for each in sorted({*room_of.values()})}
    for module in modules:
        if module.name:
            divided[f"{PACKAGE}/{room_of[module.name]}"].append(module)
    divided = {each: its for each, its in divided.items() if any(m.source for m in its)}
    addons = divided.get(f"{PACKAGE}/addons", [])
    trunk = [module for module in modules if module not in addons]
    looked_at = [module for module in modules if belongs(module.name, room)]
    sizes = {PACKAGE: modules, "- trunk": trunk, "- add-ons": addons, f"- {room}": looked_at}
    sizes |= {each: modules_below(root / each) for each in FOLDERS} | divided
    own = {name for name in graph if name.startswith(f"{room}.")}
    names = [each.removeprefix(f"{PACKAGE}.") for each in siblings]
    names = names or sorted(
        module.name
        for module in modules
        if module.name in own
        and LOOP & {getattr(node, "name", "") for node in module.nodes[0].body}
    )
    fields, arguments = fields_and_arguments(modules)
    folders = {m.name for m in modules if m.path.endswith("__init__.py")}
    ends = tuple(f".{each}" for each in count)
    naming = [
        module
        for module in modules
        if re.search(ENGINES[0], module.source, re.IGNORECASE)
        and not belongs(module.name, ENGINES[1])
    ]
    return {
        "sizes": {each: size(its) for each, its in sizes.items()},
        "rooms": {"rooms": len(divided), **between},
        f"inside {room}": inside(graph, room, folders),
        "siblings": {each: len(graph[each] & own) for each in names},
        "fields and arguments": {
            each: num for each, num in (fields | arguments).items() if each.endswith(ends)
        },
        "most fields": most(fields, 5),
        "most arguments": most(arguments, 5),
        "lines of functions": {
            name: length(node)
            for module in modules
            for name, node in module.definitions()
            if isinstance(node, Function) and name.endswith(ends)
        },
        f"files outside {ENGINES[1]} that name engines": {
            f"in {room}": [each.path for each in naming if each in looked_at],
            "elsewhere": [each.path for each in naming if each not in looked_at],
        },
        "files that mention a feature outside its room / all": mentions(modules),
        "style": style(modules),
    }


def show(figures: dict[str, dict[str, Any]]) -> None:
    print(f"{'':34}{'files':>8}{'lines':>10}{'code lines':>12}{'functions':>12}{'median':>8}")
    for name, row in figures["sizes"].items():
        files, lines, code, functions, middle = row.values()
        print(f"{name:34}{files:8}{lines:10,}{code:12,}{functions:12,}{middle:8g}")
    for heading in list(figures)[1:]:
        print(f"\n{heading}")
        for name, value in figures[heading].items():
            if isinstance(value, dict):
                value = ", ".join(f"{num} {each}" for each, num in value.items())
            elif isinstance(value, list):
                value = f"{len(value)}  " + ", ".join(value)
            print(textwrap.fill(f"  {name:52} {value}", 100, subsequent_indent=" " * 57))


def show_imports() -> None:
    """Print the files of the package that this process has imported, and their lines."""
    names = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
    files = {getattr(sys.modules[name], "__file__", None): name for name in names}
    sizes = {
        name: Path(file).read_text(encoding="utf-8").count("\n")
        for file, name in files.items()
        if file
    }
    trunk = [size for name, size in sizes.items() if not belongs(name, f"{PACKAGE}.addons")]
    for label, own in (("imports", [*sizes.values()]), ("of the trunk", trunk)):
        print(f"{label}: {sum(map(bool, own))} files, {sum(own):,} lines")


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--commit", help="measure this commit in the place of the working tree")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--room", default="rl", help="the room to look at from inside")
    parser.add_argument("--siblings", nargs="*", default=[], help="modules of the room")
    parser.add_argument("--count", nargs="*", default=COUNTED, help="dataclasses and functions")
    parser.add_argument(
        "--imports",
        nargs="...",
        metavar="VERB ...",
        help="run dschat-lora, and count what it has imported of the package at its end",
    )
    options = vars(parser.parse_args())
    if argv := options.pop("imports"):
        atexit.register(show_imports)
        sys.argv = ["dschat-lora", *argv]
        runpy.run_module(PACKAGE, run_name="__main__")
        return
    commit, as_json = options.pop("commit"), options.pop("json")
    with tempfile.TemporaryDirectory() as directory:
        if commit:
            command = ["git", "-C", str(ROOT), "archive", commit]
            archive = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(directory, filter="data")
        figures = measure(Path(directory) if commit else ROOT, **options)
    print(json.dumps(figures, indent=2)) if as_json else show(figures)


if __name__ == "__main__":
    main()
