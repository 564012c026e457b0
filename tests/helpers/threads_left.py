"""Step 1; then, as its last line, the threads of a process group that are left."""

import runpy

from helpers.forkserver import group_threads
from helpers.launcher import STEP1

if __name__ == "__main__":
    try:
        runpy.run_path(str(STEP1), run_name="__main__")
    finally:
        print(group_threads())  # noqa: T201
