"""Whether the tests see mistakes: each mutant of ``mutants.toml`` must fail the tests it names.

``python scripts/mutants.py`` copies the working tree into a temporary directory, runs all of the
named tests there once as they are, and then those of each mutant with its one change. A mutant is
the text ``old`` of a module, anywhere in the package, and the text ``new`` in its place: it is
found wherever its module is moved to. One line says of each what became of it and in how many
seconds; the exit code is 1 unless all were killed, which is that a test failed, not that it could
not be collected.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
PACKAGE = "dschat_lora"
MOST_SECONDS = 300  # of a mutant's tests; one that never ends is not known to fail
# A test that failed, or whose fixture did; a file that cannot be collected has no "::".
FAILED = re.compile(r"^(?:FAILED|ERROR) \S+::", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A change of one module, and the tests that must see it."""

    name: str
    old: str  # text that stands once in the package
    new: str
    tests: list[str]  # node ids of pytest


def read_mutants(path: Path) -> list[Mutant]:
    """The mutants of a file.

    Raises:
        ValueError: if two have one name, or one changes nothing or names no test.
    """
    found = [Mutant(**row) for row in tomllib.loads(path.read_text())["mutant"]]
    names = [each.name for each in found]
    for each in found:
        if names.count(each.name) > 1 or each.old == each.new or not each.tests:
            raise ValueError(f"{path.name}: {each.name!r} is there twice, or lacks change or tests")
    return found


def copy_tree(target: Path) -> None:
    """Copy what git tracks or would add, as it is in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def place_of(mutant: Mutant, tree: Path) -> Path | None:
    """The module that has the mutant's text; None unless it is in the package once."""
    paths = sorted((tree / PACKAGE).rglob("*.py"))
    found = [path for path in paths for _ in range(path.read_text().count(mutant.old))]
    return found[0] if len(found) == 1 else None


def run_tests(tree: Path, tests: Iterable[str], *options: str) -> tuple[int, str]:
    """The exit code of pytest in a copy of the tree, and what it printed.

    Raises:
        subprocess.TimeoutExpired: if a mutant's tests do not end.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    # What Python compiles of a mutant is not kept: it would be taken for the module.
    kept = {"PYTHONDONTWRITEBYTECODE": "1"} if "-x" in options else {}
    done = subprocess.run(
        [*command, *options, *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **kept},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MOST_SECONDS if "-x" in options else None,
    )
    return done.returncode, done.stdout


def outcome(mutant: Mutant, tree: Path) -> str:
    """``killed``, or what became of the mutant instead."""
    place = place_of(mutant, tree)
    if place is None:
        return "not applicable (its text is not in the package, or more than once)"
    text, times = place.read_text(), place.stat()
    Path(importlib.util.cache_from_source(str(place))).unlink(missing_ok=True)
    place.write_text(text.replace(mutant.old, mutant.new))
    try:
        code, printed = run_tests(tree, mutant.tests, "-x")
    except subprocess.TimeoutExpired:
        return f"NOT KILLED (its tests do not end within {MOST_SECONDS} seconds)"
    finally:
        place.write_text(text)
        os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))
    if code == 0:
        return "SURVIVED"
    if code != 1 or not FAILED.search(printed):
        return f"NOT KILLED (pytest ends with {code}, no test failed)\n{printed}"
    return "killed"


def main(argv: Sequence[str] | None = None) -> int:
    """Run mutants; 0 if all were killed."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants alone")
    parser.add_argument("--list", action="store_true", help="print names and tests, run nothing")
    options = parser.parse_args(argv)
    mutants = read_mutants(LIST)
    if unknown := set(options.only or ()) - {each.name for each in mutants}:
        parser.error(f"no mutant has the name {', '.join(sorted(unknown))}")
    mutants = [each for each in mutants if not options.only or each.name in options.only]
    if options.list:
        for each in mutants:
            print(each.name, *each.tests, sep="\n    ")
        return 0
    begun, left = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = Path(directory)
        copy_tree(tree)
        tests = dict.fromkeys(test for each in mutants for test in each.tests)
        code, printed = run_tests(tree, tests)
        if code:
            print(f"without any change the tests end with {code}:\n{printed}")
            return 1
        print(f"{len(tests)} tests pass as they are  {time.monotonic() - begun:.1f} s", flush=True)
        for each in mutants:
            start = time.monotonic()
            left += (found := outcome(each, tree)) != "killed"
            print(f"{each.name}: {found}  {time.monotonic() - start:.1f} s", flush=True)
    print(f"{len(mutants) - left} of {len(mutants)} killed in {time.monotonic() - begun:.0f} s")
    return int(left > 0)


if __name__ == "__main__":
    # The copy goes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
