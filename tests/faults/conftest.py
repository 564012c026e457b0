from types import SimpleNamespace

import pytest

pytest.register_assert_rewrite("harness")

from harness import TINY  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _file_operations_can_fail(fault_library):
    assert fault_library is not None, "a C compiler has to compile fault.c"


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
