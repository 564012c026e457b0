"""Print the oldest version that setup.py allows of packages and extras, as pip's requirements.

python scripts/oldest_versions.py torch serve nlg
"""

import re
import sys
from pathlib import Path

from extra_requirements import requirements_of

_BOUND = re.compile(r'"([A-Za-z][\w-]*)>=([\d.]+)')


def oldest_versions(setup: str, wanted: list[str]) -> list[str]:
    """``package==version`` of lower bounds in the text of a setup.py, each package once.

    ``wanted`` names packages, and extras for all of theirs; none: every package.
    """
    found = dict(_BOUND.findall(setup))
    names = set().union(*(_packages(name, setup, found) for name in wanted)) if wanted else found
    return [f"{name}=={found[name]}" for name in sorted(names)]


def _packages(name: str, setup: str, found: dict[str, str]) -> list[str]:
    """The package itself, or those of an extra."""
    if name in found:
        return [name]
    return [re.split(r"[^\w-]", each)[0] for each in requirements_of(name, setup)]


if __name__ == "__main__":
    text = (Path(__file__).resolve().parents[1] / "setup.py").read_text(encoding="utf-8")
    print("\n".join(oldest_versions(text, sys.argv[1:])))
