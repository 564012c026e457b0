"""Two hosts: network, process, mount and name spaces of their own, with a cable between them."""

import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from helpers.launcher import ROOT, free_port

ADDRESSES = {"A": "10.77.0.1", "B": "10.77.0.2"}


def why_not():
    """Why hosts cannot be made here; empty where they can."""
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"no {' '.join(missing)}"
    tried = subprocess.run(["unshare", "-n", "-m", "-u", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "no right to make network namespaces"


class Host:
    """One of the hosts. Its ``view`` is the same path on each, and another directory.

    Attributes:
        disk: what ``view`` is on this host, seen from outside.
    """

    def __init__(self, name, root, view, launcher):
        self.name, self.view = name, view
        self.disk = root / name
        self.disk.mkdir()
        ready = self.disk / "up"
        script = (
            f"hostname {name}; mount --bind {self.disk} {view}; ip link set lo up; "
            f"touch {ready}; exec sleep infinity"
        )
        spaces = ["unshare", "-n", "-m", "-u", "-p", "--fork", "--kill-child", "--mount-proc"]
        self._outer = subprocess.Popen([*spaces, "bash", "-c", script])
        while not ready.exists():
            assert self._outer.poll() is None, f"host {name} did not start"
            time.sleep(0.01)
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        self.first = children.read_text().split()[0]
        self.prefix = ["nsenter", "-t", self.first, "-m", "-n", "-u", "-p", "--"]
        self.launcher = launcher.on_host(
            self.first,
            root / f"{name}-launcher",
            XDG_CACHE_HOME=str(view / "cache"),
            HF_HUB_OFFLINE="1",
        )

    def run(self, *command):
        """Run a command there to its end."""
        subprocess.run([*self.prefix, *map(str, command)], check=True, capture_output=True)

    def popen(self, *command):
        """Start a command there, with the environment of a test."""
        own = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": ROOT, "XDG_CACHE_HOME": self.view / "cache"}
        settings = [f"{name}={value}" for name, value in own.items()]
        return subprocess.Popen(
            [*self.prefix, "env", *settings, *map(str, command)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def stop(self):
        """End every process of the host."""
        with suppress(Exception):
            self.launcher.stop()
        self._outer.kill()
        self._outer.wait()


class TwoHosts:
    """Hosts A and B, each with a directory of its own at ``view``."""

    def __init__(self, root, launcher):
        self.view = root / "view"
        self.view.mkdir()
        self.hosts = {name: Host(name, root, self.view, launcher) for name in "AB"}
        a, b = (host.first for host in self.hosts.values())
        cable = ["ip", "link", "add", "eth0", "netns", a, "type", "veth"]
        subprocess.run([*cable, "peer", "name", "eth0", "netns", b], check=True)
        for name, host in self.hosts.items():
            host.run("ip", "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")

    def start(self, argv, *, each=1, script=None, env=None):
        """Run a stage on both, ``each`` processes a host; the two started commands."""
        shared = self.environment(each) | (env or {})
        more = {} if script is None else {"script": script}
        return [
            host.launcher.start(argv, self.view, ranks=each, first=n * each, env=shared, **more)
            for n, host in enumerate(self.hosts.values())
        ]

    def environment(self, each=1):
        """What a launcher tells the processes, besides their ranks."""
        return {
            "WORLD_SIZE": 2 * each,
            "LOCAL_WORLD_SIZE": each,
            "MASTER_ADDR": ADDRESSES["A"],
            "MASTER_PORT": free_port(),
        }

    def write(self, name, text, hosts="AB"):
        """Put a file on the disks of these hosts; its path there."""
        for host in hosts:
            (self.hosts[host].disk / name).write_text(text, encoding="utf-8")
        return self.view / name

    def cable(self, state):
        """Cut the cable (``down``), or mend it (``up``)."""
        self.hosts["B"].run("ip", "link", "set", "eth0", state)

    def stop(self):
        """End both."""
        for host in self.hosts.values():
            host.stop()
