"""Print the oldest version that setup.py allows of each package, as pip's requirements."""

import re
import sys
from pathlib import Path

_BOUND = re.compile(r'"([A-Za-z][\w-]*)>=([\d.]+)')


def oldest_versions(setup: str) -> list[str]:
    """``package==version`` of every lower bound in the text of a setup.py, each package once."""
    found = dict(_BOUND.findall(setup))
    return [f"{name}=={version}" for name, version in sorted(found.items())]


if __name__ == "__main__":
    text = (Path(__file__).resolve().parents[1] / "setup.py").read_text(encoding="utf-8")
    wanted = set(sys.argv[1:])
    lines = oldest_versions(text)
    print("\n".join(line for line in lines if not wanted or line.partition("==")[0] in wanted))
