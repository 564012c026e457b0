import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

pytest.register_assert_rewrite("harness")

from harness import GLUE, NLG, RLHF, TINY  # noqa: E402

from helpers.addons import has_verb  # noqa: E402
from helpers.glue_toys import save_encoder, write_task  # noqa: E402
from helpers.restaurants import save_base, write_data  # noqa: E402


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


@pytest.fixture(scope="session")
def verb_run(launcher):
    """``verb_run(*words, home, ...)``: how a verb ended, in a process that PREPARE was done to.

    ``act(running)`` is called once it has begun; further names are of its environment.
    """
    script = Path(__file__).with_name("verb.py")

    def call(*words, home, act=None, timeout=60, **environment):
        running = launcher.start(words, home, env=environment, script=script)
        if act is not None:
            act(running)
        (code,) = running.wait(timeout)
        (session,) = running.pids
        left = [p for p in psutil.process_iter() if is_left_of(p, session)]
        _, left = psutil.wait_procs(left, timeout=10)  # a compiler that was probed ends by itself
        return SimpleNamespace(
            home=home, code=code, out=running.out(), err=running.err(), left=left
        )

    return call


def is_left_of(process, session):
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


@pytest.fixture(scope="session")
def experiments(launcher, tmp_path_factory):
    """What GLUE and NLG stand on, by the words that stand for it, and a run of each."""
    home = tmp_path_factory.mktemp("experiments")
    places = {name: str(home / name) for name in ("ENCODER", "TASK", "GPT2", "GLUE", "NLG")}
    save_encoder("roberta", home / "ENCODER")
    write_task("mrpc", home / "TASK")
    save_base(home / "GPT2")
    places["TRAIN"], places["HELD"] = map(str, write_data(home))
    script = Path(__file__).with_name("verb.py")
    for name, words in {"GLUE": GLUE, "NLG": NLG}.items():
        if not has_verb(name.lower()):
            continue
        words = [name.lower(), *(places.get(word, word) for word in words)]
        running = launcher.start([*words, "--output_dir", places[name]], home, script=script)
        assert running.wait() == [0], running.output()
    places["CHECKPOINT"] = str(home / "GLUE" / "checkpoint-12")
    return places


@pytest.fixture(scope="session")
def trained(launcher, tmp_path_factory):
    """Runs by the words that stand for them: SFT, REWARD, and PPO with its rollouts."""
    home, runs = tmp_path_factory.mktemp("trained"), {}
    script = Path(__file__).with_name("verb.py")

    def train(name, *words):
        options = [*words, "--output_dir", str(home / name)]
        running = launcher.start(options, home, script=script)
        assert running.wait() == [0], running.output()
        runs[name] = str(home / name)

    each = ["--save_interval", "1"]
    train("SFT", "sft", *TINY, *each)
    train("REWARD", "reward", *TINY)
    train("PPO", "rlhf", *(runs.get(word, word) for word in RLHF), *each)
    return runs
