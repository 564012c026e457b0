"""A process that has imported everything, and forks one child for each rank of a command.

Each child is a process of its own, as if started by a launcher: it runs a script as ``__main__``
in its own session and can be killed at any time. What differs from a fresh interpreter: the hash
seed is the server's, what modules read from the environment when they are imported is fixed, and
the last part of the interpreter's exit is skipped, see :func:`run_script`. Requests and replies are
lines of JSON.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import signal
import sys
import tempfile
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import dschat_lora

# What the stages import late; a child that finds it in place starts a second earlier. An engine of
# ZeRO loads the optimizer Muon to see that it is not in use, and with it all of torch's compiler.
LATE = """
    deepspeed.comm.mori deepspeed.module_inject.auto_ep_layer deepspeed.ops.op_builder.all_ops
    deepspeed.ops.triton_ops deepspeed.runtime.superoffload.superoffload_stage3
    deepspeed.runtime.zero.muon.muon_optimizer deepspeed.utils.pin_memory distutils.ccompiler
    distutils.sysconfig encodings.utf_8_sig numpy.ctypeslib peft
    safetensors.torch setuptools torch._dynamo torch.utils._foreach_utils
    transformers.integrations.deepspeed transformers.models.auto.tokenization_auto
    transformers.models.opt.modeling_opt transformers.tokenization_utils_tokenizers
""".split()


def import_everything():
    """Import every module of the package, and the late ones of the others."""
    gc.disable()  # nothing of it is garbage
    modules = pkgutil.walk_packages(dschat_lora.__path__, "dschat_lora.")
    skipped = ("__main__", "environments.mcp", "environments.reasoning_gym")  # slow, for few tests
    for name in [module.name for module in modules if not module.name.endswith(skipped)] + LATE:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if str(error.name).startswith("dschat_lora"):
                raise  # else it is of an extra that is not installed
    # Compiles a thousand regular expressions, which else the first model of each child does.
    get_checkpoint_conversion_mapping("opt")
    torch.set_num_threads(1)
    # Libraries of operators leave torch's dispatcher at the end, which takes a tenth of a second.
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    # The collector would write to every page of every child, which takes two seconds at its end.
    gc.collect()
    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a forked child would miss the other threads"


class Server:
    """The children and how they ended."""

    def __init__(self):
        self._codes = {}

    def serve(self):
        """Reply to requests; returns the request of a child, in the child, else None."""
        for line in sys.stdin:
            request = json.loads(line)
            if "start" in request or "host" in request:
                pid = os.fork()
                if pid == 0:
                    return request["start"] if "start" in request else serve_on_host(request)
                self._codes[pid] = None
                reply = pid
            elif "signal" in request:
                reply = self._signal(request["pid"], request["signal"])
            else:
                reply = [self._code(pid) for pid in request["codes"]]
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()
        for pid in self._codes:
            self._signal(pid, signal.SIGKILL)
        return None

    def _code(self, pid):
        """Exit code of a child, or minus the signal that ended it; None while it runs."""
        if self._codes[pid] is None and os.waitid(
            os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            # Not reaped yet, so that the group is still its own: what it started ends with it.
            os.killpg(pid, signal.SIGKILL)
            self._codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return self._codes[pid]

    def _signal(self, pid, number):
        """Whether the child was there to receive it."""
        if self._code(pid) is not None:
            return False
        os.kill(pid, number)
        return True


def serve_on_host(request):
    """Serve other requests in the namespaces of another process, as :meth:`Server.serve`.

    A process stays where it is numbered; so the child of this one serves.
    """
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [f"/proc/{request['host']}/ns/{name}" for name in ("net", "uts", "mnt", "pid")]
    for descriptor in [os.open(space, os.O_RDONLY) for space in spaces]:
        if libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(descriptor)
    if (pid := os.fork()) != 0:
        os.waitpid(pid, 0)
        os._exit(0)
    attach({0: (request["in"], os.O_RDONLY), 1: (request["out"], os.O_WRONLY)})
    return Server().serve()


def attach(files):
    """Replace descriptors by files, each ``(path, flags)``, and with them the standard input."""
    for descriptor, (path, flags) in files.items():
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    # The reader may hold requests for the server.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115


def become(request):
    """Turn this forked process into the command of the request, up to its first line."""
    os.setsid()
    # A shell lets its background jobs ignore it, which their children inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    attach(
        {0: (request["in"], os.O_RDONLY), 1: (request["out"], write), 2: (request["err"], write)}
    )
    os.environ.clear()
    os.environ.update(request["environment"], FAULT_PID=str(os.getpid()))
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    sys.path[0] = str(Path(request["argv"][0]).resolve().parent)
    # A fresh interpreter has these unlike any other's; torch's own generator starts alike.
    random.seed()
    np.random.seed()
    tempfile.tempdir = None
    configure = getattr(ctypes.CDLL(None), "fault_configure", None)
    if configure is not None:
        configure()


def run_script(script):
    """Run a script to its end.

    The teardown of modules and libraries is skipped: it writes to every page that the process
    shares with the server, which takes as long as a short run. What was registered for the end has
    run. One of several processes in which a thread of their group is left ends as usual, which
    that thread may abort.
    """
    code = None
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
        if not ends_early() or not isinstance(code, int | None):
            raise
    if ends_early():
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def ends_early():
    """Whether the teardown of this process is skipped."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or not group_threads()


def group_threads():
    """Names of the threads of this process that belong to a process group over gloo."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text())
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    import_everything()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    task = Server().serve()
    if task is not None:
        become(task)
        run_script(task["argv"][0])
