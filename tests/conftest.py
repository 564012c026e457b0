"""One thread, no network and no user's cache for every test; processes that run real engines."""

import gc
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

# Before anything imports torch, DeepSpeed or transformers.
_CACHE = tempfile.mkdtemp(prefix="dschat_lora-tests-")
_USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
# Compiled operators are kept: building them anew in each run takes half a minute.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_USER_CACHE / "torch_extensions"))
os.environ["XDG_CACHE_HOME"] = _CACHE
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch compiles in this process: to start others takes longer than what tests compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("PYTHONHASHSEED", "0")  # else GLUE's command would start Python anew
# Tests of the tier "gpu" give it back to the processes they start.
os.environ["DSCHAT_LORA_GPUS"] = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU, where a test has them run

gc.disable()  # until everything is imported

import psutil  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from helpers.launcher import Launcher  # noqa: E402
from helpers.ranks import Ranks  # noqa: E402
from helpers.spread import ALL  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


ADDONS = Path(__file__).with_name("addons")


def pytest_collection_modifyitems(config, items):
    """Leave what is marked ``thorough`` to ``make test-all``, unless a test is named by its id.

    Of tests of add-ons those marked ``smoke`` are taken, and all of what is named in their folder.
    """
    if ALL or any("::" in each for each in config.args):
        return
    home = config.invocation_params.dir
    named = [path for path in ((home / each).resolve() for each in config.args) if within(path)]

    def is_left_out(item):
        if item.get_closest_marker("thorough"):
            return True
        if not within(item.path) or item.get_closest_marker("smoke"):
            return False
        return not any(item.path.is_relative_to(path) for path in named)

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]


def within(path):
    return path.is_relative_to(ADDONS)


def pytest_collection_finish(session):
    # What imports left stays for good; else each full collection walks through all of it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # tests of models make many objects, and little garbage
    gc.enable()


_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def launcher_variables():
    """What commands in this process set or forget of a launcher's variables ends with the test."""
    before = {name: os.environ.get(name) for name in _LAUNCHER}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def own_directory(tmp_path, monkeypatch):
    """A directory of the user's own, without a launcher's environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def first_rows(monkeypatch):
    """Of the bundled training data checks read the first row; all 4,000 take most of their time."""
    monkeypatch.setattr("dschat_lora.data.rows.SMALL_FILE", 500_000)


def cpu_seconds(pid=None):
    """CPU time of this process, or of another, and of all that it started, ended or not."""
    try:
        process = psutil.Process(pid)
        total = sum(process.cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0  # its parent has its time
    # The lists of the threads; psutil would read through all processes of the machine.
    for path in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with suppress(OSError):
            total += sum(cpu_seconds(int(child)) for child in path.read_text().split())
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    item.user_properties.append(["cpu", -cpu_seconds()])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.user_properties = [
            ["cpu", cpu_seconds() + value] for _, value in item.user_properties
        ]
    return report


DEAREST = 10


def pytest_terminal_summary(terminalreporter):
    """Print the files that took most CPU time, that of their processes included."""
    files = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                files[report.location[0]] += dict(report.user_properties).get("cpu", 0.0)
    terminalreporter.section("dearest files, in CPU seconds")
    terminalreporter.line(f"{sum(files.values()):7.1f}  all {len(files)} files")
    for name, seconds in files.most_common(DEAREST):
        terminalreporter.line(f"{seconds:7.1f}  {name}")


def pytest_unconfigure(config):
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(scope="session")
def fault_library(tmp_path_factory):
    """``faults/fault.c``, compiled for LD_PRELOAD; None without a C compiler."""
    if shutil.which("cc") is None:
        return None
    library = tmp_path_factory.mktemp("library") / "fault.so"
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"]
    source = Path(__file__).with_name("faults") / "fault.c"
    subprocess.run(["cc", *flags, "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="session")
def launcher(fault_library, tmp_path_factory):
    """Starts processes that have imported everything, whose file operations fail where asked to.

    One server serves all tests of a process, for its imports take seconds.
    """
    running = Launcher(tmp_path_factory.mktemp("launcher"), preload=fault_library)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory, launcher):
    """``ranks(n)``: n processes over gloo, started once and kept for the session."""
    running = {}

    def of_size(size):
        if size not in running:
            directory = tmp_path_factory.mktemp(f"ranks{size}")
            running[size] = Ranks(size, directory, launcher)
        return running[size]

    yield of_size
    for each in running.values():
        each.stop()


@pytest.fixture(scope="session")
def fresh_ranks(tmp_path_factory, launcher):
    """``fresh_ranks(n)``: n new processes, for what a process shows only once."""
    started = []

    def of_size(size, **environment):
        directory = tmp_path_factory.mktemp("fresh")
        started.append(Ranks(size, directory, launcher, **environment))
        return started[-1]

    yield of_size
    for each in started:
        each.stop()


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    """``model_directory(kind)``: a tiny pretrained model of the architecture, on disk."""
    from helpers.tiny import save_tiny_model

    root = tmp_path_factory.mktemp("models")

    def of_kind(kind):
        directory = root / kind
        if not directory.exists():
            save_tiny_model(kind, directory)
        return str(directory)

    return of_kind
