"""A process with a fake CUDA device, started once for all tests here."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fakecuda import shim

ROOT = Path(__file__).resolve().parents[2]


class FakeDevice:
    """Runs functions of ``fakecuda.programs`` in processes that see a CUDA device."""

    def __init__(self, library, directory):
        self._library, self._directory, self._calls, self._process = library, directory, 0, None

    def run(self, function, *, timeout=900, **arguments):
        """What the function returned; fails with its traceback if it raised."""
        if self._process is None:
            self._start()
        self._calls += 1
        result = self._directory / f"{self._calls}.json"
        request = {"function": function, "arguments": arguments, "result": str(result)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + timeout
        while not result.exists():
            assert time.monotonic() < deadline, f"{function} took longer than {timeout} s"
            assert self._process.poll() is None, self.log()
            time.sleep(0.02)
        answer = json.loads(result.read_text())
        assert "error" not in answer, f"{answer['error']}\n{self.log()}"
        return answer["value"]

    def log(self):
        return (self._directory / "log").read_text()

    def stop(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self):
        environment = os.environ | {
            "DS_ACCELERATOR": "cuda",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TRANSFORMERS_VERBOSITY": "error",
        }
        with (self._directory / "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fakecuda.worker", str(self._library)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
            )


@pytest.fixture(scope="session")
def fake_device(tmp_path_factory):
    """``fake_device.run(function, ...)``; skips where the shim cannot be compiled."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the fake CUDA device with")
    cache = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "fake_cuda"
    try:
        library = shim.build(cache)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the fake CUDA device cannot be compiled: {error.stderr.decode()[-500:]}")
    device = FakeDevice(library, tmp_path_factory.mktemp("fakecuda"))
    yield device
    device.stop()
