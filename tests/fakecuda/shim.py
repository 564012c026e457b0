"""The library that gives a CPU build of torch a CUDA device without a card; see shim.cpp."""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.cpp")


def build(directory):
    """Compile the shim into ``directory``, unless it is there, and return its path.

    12 seconds for each version of torch.

    Raises:
        OSError, subprocess.CalledProcessError: without a working g++.
    """
    torch = Path(importlib.util.find_spec("torch").origin).parent
    key = hashlib.sha256(f"{torch}{SOURCE.read_text()}".encode()).hexdigest()[:16]
    library = Path(directory) / f"fake-cuda-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        staged = library.with_suffix(f".{os.getpid()}")
        options = ["-std=c++20", "-w", "-shared", "-fPIC", f"-I{torch}/include"]
        libraries = [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-ltorch_cpu", "-lc10"]
        command = ["g++", *options, SOURCE, *libraries, "-o", staged]
        subprocess.run(command, check=True, capture_output=True)
        staged.replace(library)
    return library


def load(library):
    """Load the library; before anything imports torch."""
    assert "torch" not in sys.modules, "the shim registers itself before torch"
    ctypes.CDLL(str(library))
