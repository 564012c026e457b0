"""How the processes of a run find each other, before torch is imported: sockets to rank 0."""

import errno
import hashlib
import json
import os
import re
import socket
import struct
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import PrefixStore

#: what launchers set for each process
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Hosts may start one after another; a message is one line of JSON.
MEETING_SECONDS = 300.0
_LINE_LIMIT = 1 << 20


@dataclass(frozen=True)
class Member:
    """A process of the run.

    Attributes:
        rank: among all, from 0.
        host: name of its machine.
        pid: there.
        software: what has to be the same everywhere, by name.
    """

    rank: int
    host: str
    pid: int
    software: dict[str, str]


class Connection:
    """A socket that carries JSON objects, one a line. Sending is safe from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._pending = b""
        self._sending = Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send, unless the other side is gone, which its reader will see."""
        with self._sending, suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What has arrived, after waiting for some; None at the end, and after anything else."""
        try:
            data = self.sock.recv(1 << 16)
            *lines, self._pending = (self._pending + data).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except TimeoutError:
            return []
        except (OSError, ValueError, RecursionError):
            return None
        sound = data and len(self._pending) < _LINE_LIMIT
        return messages if sound and all(isinstance(m, dict) for m in messages) else None

    def receive_one(self, deadline: float) -> dict[str, Any] | None:
        """The next message; None where there is none before the deadline."""
        while (left := deadline - time.monotonic()) > 0:
            self.sock.settimeout(left)
            messages = self.receive()
            if messages is None:
                return None
            if messages:
                return messages[0]
        return None

    def close(self) -> None:
        """Close the socket."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def check_launch_variables() -> None:
    """Refuse numbers that no launcher sets; without one, forget names that it would have set.

    Where CUDA_VISIBLE_DEVICES hides all GPUs, which launchers undo, processes take the CPU, unless
    another accelerator is here.

    Raises:
        ValueError: naming the variable, and what it may be.
    """
    if "WORLD_SIZE" not in os.environ:
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            os.environ.pop(name, None)
    size = _checked("WORLD_SIZE", "1", range(1, 2**20))
    for name in ("RANK", "LOCAL_RANK"):
        _checked(name, "0", range(size))
    _checked("LOCAL_WORLD_SIZE", "1", range(1, size + 1))
    _checked("MASTER_PORT", "1", range(1, 2**16))
    if "DS_ACCELERATOR" not in os.environ and hides_gpus():
        import torch  # late: it takes seconds

        if torch.version.cuda is not None or not torch.accelerator.is_available():
            os.environ["DS_ACCELERATOR"] = "cpu"


def hides_gpus() -> bool:
    """Whether CUDA_VISIBLE_DEVICES is set, and begins with no number or name of a GPU."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    return not re.match(r"\d|GPU-|MIG-", shown)


def _checked(name: str, default: str, allowed: range) -> int:
    text = os.environ.get(name, default)
    if not re.fullmatch("[0-9]{1,7}", text) or int(text) not in allowed:
        os.environ.pop("RANK", None)  # for rank 0 alone tells an error
        raise ValueError(
            f"the environment variable {name} must be a whole number from {allowed[0]} to "
            f"{allowed[-1]}, as launchers set it, got {text!r}; without WORLD_SIZE a single "
            "process runs"
        )
    return int(text)


def complete_launch_variables() -> None:
    """Set what a launcher has not: without one, a single process.

    Raises:
        ValueError: if MASTER_ADDR is a name that does not resolve, for which torch would wait.
    """
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if os.environ["WORLD_SIZE"] != "1":
        os.environ.setdefault("MASTER_PORT", "29500")
    _launch()
    address, host = os.environ["MASTER_ADDR"], socket.gethostname()
    try:
        socket.getaddrinfo(address, None)
    except (socket.gaierror, UnicodeError) as error:
        raise ValueError(
            f"host {host} cannot resolve MASTER_ADDR {address!a}, the name of rank 0's host "
            f"({error}): give its address (deepspeed or torchrun --master_addr ADDRESS, torchrun "
            "--local_addr ADDRESS on that host), or add the name to /etc/hosts"
        ) from error


def this_member() -> Member:
    """This process, as its launcher and its machine say."""
    software: dict[str, str] = {}  # versions that have to be the same on all hosts
    if not is_one_host():
        digest = hashlib.blake2b(digest_size=6)
        for path in sorted(Path(__file__).resolve().parents[1].rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
        software["dschat_lora's code"] = digest.hexdigest()
        for name in ("torch", "transformers", "deepspeed"):
            with suppress(PackageNotFoundError):
                software[name] = version(name)
    return Member(int(os.environ["RANK"]), socket.gethostname(), os.getpid(), software)


def rendezvous() -> tuple[dict[int, Connection], list[Member]]:
    """Connect each rank with rank 0; call on every rank.

    Sets MASTER_PORT to a port that is free on the first host, where a single host's is not, and,
    where there are several hosts, MASTER_ADDR to an address in place of a name, and
    GLOO_SOCKET_IFNAME to the network that leads to rank 0, unless it is set.

    Returns:
        The connections by rank (on rank 0 to all others, elsewhere to rank 0), and all members.

    Raises:
        ValueError: if the processes cannot meet.
    """
    complete_launch_variables()
    me, deadline = this_member(), time.monotonic() + MEETING_SECONDS
    meet = _wait_for_all if me.rank == 0 else _reach_rank_zero
    connections, members = meet(me, deadline)
    for connection in connections.values():
        connection.sock.settimeout(10)
        if connection.sock.family == socket.AF_UNIX:
            continue
        # Gloo is to use the network that leads to rank 0, by an address that every host can use.
        import psutil

        # IPv4 addresses as such, where an IPv6 socket carries them.
        ends = (connection.sock.getsockname(), connection.sock.getpeername())
        own, other = (end[0].removeprefix("::ffff:") for end in ends)
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address == own for each in addresses):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ["MASTER_ADDR"] = own if me.rank == 0 else other
    return connections, members


# ---------------------------------------------------------------------------- rank 0


def _wait_for_all(me: Member, deadline: float) -> tuple[dict[int, Connection], list[Member]]:
    size, members = int(os.environ["WORLD_SIZE"]), {0: me}
    connections: dict[int, Connection] = {}
    with _listen() as listener:
        while len(members) < size:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection = Connection(listener.accept()[0])
            except TimeoutError:
                missing = [str(rank) for rank in range(size) if rank not in members]
                known = ", ".join(sorted({member.host for member in members.values()}))
                raise ValueError(
                    f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} did not arrive within "
                    f"{MEETING_SECONDS:g} s; those that did are on {known}: start the others, and "
                    "see docs/scaling.md#several-hosts"
                ) from None
            member = _member(connection, size)
            if member is None or member.rank in members:
                connection.close()  # a stranger
                continue
            connections[member.rank], members[member.rank] = connection, member
    in_order = [members[rank] for rank in range(size)]
    # Where rank 0 will serve the store of the process group; None for the launcher's port. Not
    # torchrun's own store: a static one keeps, over a restart, what lost processes wrote.
    port = int(os.environ["MASTER_PORT"]) if is_one_host() else None
    if _has_launchers_store():
        port = usable_port(None)
    for connection in connections.values():
        connection.send({"members": [asdict(m) for m in in_order], "port": port})
    _use_port(port)
    return connections, in_order


def _member(connection: Connection, size: int) -> Member | None:
    """Who has connected; None for a stranger."""
    if connection.sock.family == socket.AF_UNIX:
        credentials = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] != os.getuid():
            return None
    message = connection.receive_one(time.monotonic() + 10)
    try:
        member = Member(**(message or {}))
    except TypeError:
        return None
    return member if member.rank in range(1, size) else None


def _listen() -> socket.socket:
    """Where the other ranks will look for rank 0."""
    if is_one_host():
        settle_port()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(_name_on_this_host())
        listener.listen(64)
        return listener
    port = 0 if _has_launchers_store() else int(os.environ["MASTER_PORT"])
    six = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if six else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=six)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} of {os.environ['MASTER_ADDR']} is in use, probably by another run; "
                "choose one with: deepspeed --master_port PORT ..."
            ) from error
        raise
    if _has_launchers_store():
        _launchers_store().set("port", str(listener.getsockname()[1]))
    return listener


# ---------------------------------------------------------------------------- other ranks


def _reach_rank_zero(me: Member, deadline: float) -> tuple[dict[int, Connection], list[Member]]:
    connection = Connection(_connected(me, deadline))
    connection.send(asdict(me))
    answer = connection.receive_one(deadline)
    if answer is None:
        raise ValueError(
            f"host {me.host}, rank {me.rank}: rank 0 ended before all processes had arrived, or "
            "another run is at its port; see docs/scaling.md#several-hosts"
        )
    _use_port(answer["port"])
    return {0: connection}, [Member(**each) for each in answer["members"]]


def _connected(me: Member, deadline: float) -> socket.socket:
    """A socket to rank 0, once it listens."""
    address, port = os.environ["MASTER_ADDR"], 0
    while True:
        try:
            if is_one_host():
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(_name_on_this_host())
                return sock
            if not port:
                own = _has_launchers_store()
                port = int(_launchers_store().get("port") if own else os.environ["MASTER_PORT"])
            return socket.create_connection((address, port), timeout=5)
        except OSError as error:
            if time.monotonic() > deadline:
                place = "this host" if is_one_host() else f"{address}:{port}"
                raise ValueError(
                    f"host {me.host}, rank {me.rank}: rank 0 does not answer at {place} within "
                    f"{MEETING_SECONDS:g} s ({error}): it has not started, or a firewall blocks "
                    "it; see docs/scaling.md#several-hosts"
                ) from error
        time.sleep(0.02 if is_one_host() else 0.2)


# ---------------------------------------------------------------------------- both


def is_one_host() -> bool:
    """Whether all processes of the run are on this machine."""
    return os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]


def _has_launchers_store() -> bool:
    """Whether torchrun itself serves MASTER_PORT."""
    return _launch()[_USES_ITS_STORE] == "True"


def _launchers_store() -> "PrefixStore":
    """torchrun's store, for this attempt."""
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore

    address, port = _launch()["MASTER_ADDR"], int(_launch()["MASTER_PORT"] or 0)
    store = TCPStore(address or "", port, timeout=timedelta(seconds=MEETING_SECONDS))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"dschat_lora/{attempt}", store)


def _name_on_this_host() -> str:
    """An address that nobody but the processes of one launch has, and that ends with rank 0.

    Abstract, as unix(7) calls it: no file. A process is told from a later one of its number by
    the clock ticks at which it started (proc(5)), which no change of the wall clock moves.
    """
    parent, port = os.getppid(), _launch()["MASTER_PORT"]
    started, attempt = "", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with suppress(OSError):  # 0: the parent of a container's first process
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"\0dschat_lora-{parent}-{started}-{attempt}-{port}"


_USES_ITS_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # of torchrun
_LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", _USES_ITS_STORE)
_launches: dict[int, dict[str, str | None]] = {}  # by process: a forked one has its own


def _launch() -> dict[str, str | None]:
    """Variables as the launcher set them, whatever they are now."""
    return _launches.setdefault(os.getpid(), {name: os.environ.get(name) for name in _LAUNCHERS})


def settle_port() -> None:
    """Leave MASTER_PORT where it is free on this host, else take one that is."""
    if not _has_launchers_store():
        os.environ["MASTER_PORT"] = str(usable_port(os.environ.get("MASTER_PORT")))


def _use_port(port: int | None) -> None:
    if port is not None:
        os.environ["MASTER_PORT"] = str(port)
        if _has_launchers_store():
            os.environ[_USES_ITS_STORE] = "False"


def usable_port(wanted: str | None) -> int:
    """The port ``wanted`` if it is free on this host, else one that is."""
    for port in (int(wanted or 0), 0):
        with suppress(OSError), socket.create_server(("", port)) as probe:
            return int(probe.getsockname()[1])
    raise OSError("no port of this host is free")
