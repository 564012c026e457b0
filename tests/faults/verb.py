"""A verb of the command, in a process to which ``PREPARE`` was done first."""

import os
import resource
import shutil  # noqa: F401 - for PREPARE
import sys
import time

from dschat_lora.__main__ import main


def limit(name, bytes_more=0):
    """Let the process have so many bytes of RLIMIT_AS or RLIMIT_DATA more than it has."""
    field = {"AS": "VmSize", "DATA": "VmData"}[name]
    with open("/proc/self/status", encoding="utf-8") as status:
        (used,) = [int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":")]
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (used + bytes_more,) * 2)


def close(number):
    """Close a standard stream, as ``>&-`` does."""
    os.close(number)
    setattr(sys, ("stdin", "stdout", "stderr")[number], None)


def point(number, path):
    """Let a standard stream write to a file."""
    os.dup2(os.open(path, os.O_RDWR), number)


def lose_reader(number):
    """Let a standard stream write to a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.dup2(writer, number)
    os.close(reader)
    os.close(writer)


def leave_for_nowhere():
    """Let the current directory be one that was removed."""
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")


def set_clock(seconds):
    """Let the wall clock go from ``seconds`` on backwards."""
    begun = time.monotonic()
    time.time = lambda: seconds - (time.monotonic() - begun)


if __name__ == "__main__":
    exec(os.environ.pop("PREPARE", ""))  # of these tests alone
    main()
