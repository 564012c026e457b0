"""Print the requirements of an extra of setup.py, to install them without the package.

python scripts/extra_requirements.py docs
"""

import ast
import sys
from pathlib import Path


def requirements_of(extra: str, setup: str) -> list[str]:
    """The list that the text of a setup.py assigns to the extra's name in capitals."""
    for node in ast.parse(setup).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == extra.upper():
            return list(ast.literal_eval(node.value))
    raise ValueError(f"setup.py has no list {extra.upper()}")


if __name__ == "__main__":
    text = (Path(__file__).resolve().parents[1] / "setup.py").read_text(encoding="utf-8")
    print("\n".join(requirements_of(sys.argv[1], text)))
