"""Run the notebooks anew and keep what their cells show: notebooks/*.ipynb.

python scripts/run_notebooks.py [FILE ...]
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SECONDS = 600  # for a cell


def executed(path: Path, directory: Path) -> NotebookNode:
    """The notebook with the outputs of a new kernel that works in ``directory``."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(directory)}}
    client = NotebookClient(notebook, timeout=SECONDS, resources=resources, record_timing=False)
    client.execute()
    # The version of Python is none of a reader's concern.
    notebook.metadata.language_info = NotebookNode(name="python")
    return notebook


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or sorted(NOTEBOOKS.glob("*.ipynb"))):
        with tempfile.TemporaryDirectory() as directory:
            nbformat.write(executed(path, Path(directory)), path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")
