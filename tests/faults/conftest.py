from types import SimpleNamespace

import pytest

pytest.register_assert_rewrite("harness")

from harness import TINY, compile_library  # noqa: E402

from helpers.launcher import Launcher  # noqa: E402


@pytest.fixture(scope="session")
def fault_library(tmp_path_factory):
    """``fault.c``, compiled."""
    return compile_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="session")
def launcher(fault_library, tmp_path_factory):
    """Starts commands whose file operations can fail, see ``fault.c``."""
    running = Launcher(tmp_path_factory.mktemp("launcher"), LD_PRELOAD=str(fault_library))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def tiny_run(launcher, tmp_path_factory):
    """``tiny_run(*options, FAULT_...)``: how a short step 1 ended.

    Its options come after those of ``base``. It writes to ``out`` in a directory of its own or,
    with ``home``, in that of an earlier run; ``FAULT_PATH`` is ``out`` unless given, and ``log``
    lists the operations.
    """

    def call(*options, base=TINY, home=None, ranks=1, **settings):
        home = home or tmp_path_factory.mktemp("run")
        out, log = home / "out", home / "log"
        log.unlink(missing_ok=True)
        faults = {"FAULT_PATH": out, "FAULT_LOG": log, **settings}
        running = launcher.start([*base, *options], home, ranks=ranks, env=faults)
        codes = running.wait()
        return SimpleNamespace(home=home, out=out, log=log, codes=codes, running=running)

    return call
