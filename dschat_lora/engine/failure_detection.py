"""What becomes of a run when one of its processes fails or is lost: all end, with one line.

The processes meet before torch is imported (:func:`join`), and a thread in each stays in touch
with rank 0's. It knows at once of a process that was killed, and after a while
(:func:`set_timeout`) of one that is stopped or cut off; collectives would wait for hours.
"""

import atexit
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dschat_lora.engine.rendezvous import Connection, Member, rendezvous, this_member

# Silence of a peer after which it counts as lost, before the first step is over.
FIRST_TIMEOUT = 300.0
_BEAT_SECONDS = 2.0
# Others that are lost at the same time are named in the same line; a launcher polls once a second.
_GATHER_SECONDS = 0.3
# How long a process has to end by itself, once it is known that the run ends.
_GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class RunEnd:
    """Why the run, or one of its processes, ends.

    Attributes:
        words: for the person; None where another process has said it.
        code: exit code.
        everywhere: whether it is said on every host, and not by rank 0 alone.
    """

    words: str | None
    code: int
    everywhere: bool = False


class FailureDetector:
    """Finds out that another process of the run has failed, or is lost, and ends this one.

    Args:
        connections: by rank, to those that this process hears directly: on rank 0 to all others,
            elsewhere to rank 0.
        members: all processes, by rank.
        own_rank: of this process.
    """

    def __init__(
        self, connections: dict[int, Connection], members: list[Member], own_rank: int
    ) -> None:
        self.members = members
        self.rank = own_rank
        self.timeout = self.later_timeout = FIRST_TIMEOUT
        self.recovery_message: Callable[[str | None], str] | None = None
        self._connections = connections
        self._last_heard = dict.fromkeys(connections, time.monotonic())
        self._silence_elsewhere = 0.0  # as rank 0 says
        self._lock = threading.Lock()
        self._ready: set[int] = set()
        self._go = threading.Event()
        self._left: set[int] = set()
        self._failures: dict[int, RunEnd] = {}
        self._lost: dict[int, str] = {}
        self._noticed: float | None = None  # when the first failure or loss was
        self._outcome: RunEnd | None = None
        self._said = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------ the main thread

    def wait_until_all_are_ready(self) -> None:
        """Return once every process has called this; one that fails instead ends all."""
        self._go.clear()
        self._tell_rank_zero({"ready": True})
        self._go.wait()

    def fail(self, words: str | None, code: int) -> bool:
        """Tell the others that this process ends; whether somebody else says why.

        Args:
            words: why, in one line; None where another process knows.
            code: its exit code.
        """
        with self._lock:
            said = self._said
            self._said = said or (self.rank == 0 and words is not None)
        self._tell_rank_zero({"failed": words, "code": code})
        # Until everybody knows; rank 0 leaves last, for it is the one that speaks.
        self._closing.wait(_GRACE_SECONDS)
        return said if self.rank == 0 else 0 not in self._lost

    def _tell_rank_zero(self, message: dict[str, Any]) -> None:
        if self.rank == 0:
            self._handle(0, message)
        else:
            self._connections[0].send(message)

    def wait_for_lost_peer(self, error: BaseException) -> None:
        """Give the thread time to find that ``error`` is but the consequence of a lost peer.

        If so, it ends the process.
        """
        broken = any(word in str(error) for word in ("onnection", "gloo", "NCCL", "peer", "closed"))
        begun = time.monotonic()
        while self._thread.is_alive():
            waited = time.monotonic() - begun
            all_are_heard = waited > 3 * self._interval() > self._longest_silence()
            if (waited > 1 and not broken) or all_are_heard:
                return  # all are there: it is an error of its own
            time.sleep(0.05)

    def _longest_silence(self) -> float:
        """Seconds since the most silent peer was heard of, as far as this process knows."""
        now = time.monotonic()
        heard = [then for rank, then in self._last_heard.items() if rank not in self._left]
        return max([self._silence_elsewhere, *(now - then for then in heard)])

    def leave(self) -> None:
        """Part in order; call on every rank, when nobody waits for another any more."""
        if self._closing.is_set():
            return  # the run has ended otherwise
        if self.rank != 0:
            self._connections[0].send({"left": True})
        else:
            deadline = time.monotonic() + _GRACE_SECONDS
            while len(self._left) < len(self._connections) and time.monotonic() < deadline:
                time.sleep(0.005)
        self._closing.set()
        self._thread.join()

    # ------------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection.sock, selectors.EVENT_READ, (rank, connection))
            last, last_beat = time.monotonic(), 0.0
            while not self._closing.is_set():
                for key, _ in selector.select(0.1):
                    rank, connection = key.data
                    messages = connection.receive()
                    self._last_heard[rank] = time.monotonic()
                    if messages is None:
                        selector.unregister(connection.sock)
                        self._handle(rank, {"gone": True})
                    for message in messages or []:
                        self._handle(rank, message)
                now = time.monotonic()
                if now - last > 2 * self._interval():  # this process itself was stopped
                    self._last_heard = dict.fromkeys(self._last_heard, now)
                last = now
                if now - last_beat > self._interval():
                    self._broadcast({"beat": self._longest_silence() if self.rank == 0 else 0.0})
                    last_beat = now
                self._decide(now)
        for connection in self._connections.values():
            connection.close()

    def _interval(self) -> float:
        """Seconds between signs of life."""
        return min(_BEAT_SECONDS, self.timeout / 4)

    def _handle(self, rank: int, message: dict[str, Any]) -> None:
        """Act on what a process says, or on its end."""
        with self._lock:
            if "beat" in message:
                self._silence_elsewhere = float(message["beat"])
            elif "ready" in message:
                self._ready.add(rank)
                if len(self._ready) == len(self.members):
                    self._ready.clear()
                    self._broadcast({"go": True})
                    self._go.set()
            elif "go" in message:
                self._go.set()
            elif "left" in message:
                self._left.add(rank)
            elif "failed" in message:
                self._failures[rank] = RunEnd(message["failed"], int(message["code"]))
            elif "end" in message:
                self._outcome = RunEnd(**message["end"])
            elif "gone" in message and rank not in self._left | self._failures.keys():
                self._lost[rank] = "killed, or the network is cut"
            if self._noticed is None and (self._failures or self._lost or self._outcome):
                self._noticed = time.monotonic()

    def _decide(self, now: float) -> None:
        """End the run, once what happened is known."""
        # Rank 0 decides first, if it can.
        limit = self.timeout + (0 if self.rank == 0 else 2 * self._interval())
        for rank, heard in self._last_heard.items():
            if rank not in self._left and now - heard > limit:
                silent = f"no sign of life for {self.timeout:g} s: stopped, or the network is cut"
                with self._lock:
                    self._lost.setdefault(rank, silent)
                    self._noticed = self._noticed or now
        if self._noticed is None:
            return
        waited = now - self._noticed
        if self._outcome is None and self._lost and waited > _GATHER_SECONDS:
            self._outcome = RunEnd(self._loss_message(), 1, everywhere=True)
        if self._outcome is None and self._failures and self.rank == 0:
            self._outcome = self._outcome_of_failures(waited)
        if self._outcome is not None:
            self._end(self._outcome)

    def _outcome_of_failures(self, waited: float) -> RunEnd | None:
        """What rank 0 tells of them; None where a better line may still come."""
        failures = self._failures
        # Rank 0 speaks for itself, and its line is the better one where all fail alike.
        if 0 in failures and failures[0].words is not None:
            return failures[0]
        ended = failures.keys() | self._left | self._lost.keys()
        all_said = len(ended) == len(self.members) and any(f.words for f in failures.values())
        if waited < _GRACE_SECONDS / 3 and not all_said:
            return None
        first = min(failures, key=lambda r: (failures[r].words is None, r))
        words = failures[first].words
        words = words and f"{self.name_of(first)}: error: {words}"
        return RunEnd(words, failures[first].code or 1)

    def _loss_message(self) -> str:
        by_reason: dict[str, list[str]] = {}
        for rank, reason in sorted(self._lost.items()):
            by_reason.setdefault(reason, []).append(self.name_of(rank))
        return "; ".join(
            f"{' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))} "
            f"{'is' if len(names) == 1 else 'are'} gone ({reason})"
            for reason, names in by_reason.items()
        )

    def _end(self, outcome: RunEnd) -> None:
        """Tell the others and the person, and end this process unless it ends by itself."""
        if self.rank == 0:
            self._broadcast({"end": vars(outcome)})
        host = self.members[self.rank].host
        here = [m for m in self.members if m.host == host]
        speaker = min(m.rank for m in here if m.rank not in self._lost) if outcome.everywhere else 0
        if outcome.words is not None and not self._said and self.rank == speaker:
            words, remedy = outcome.words, ""
            if self.recovery_message is not None:
                with suppress(Exception):  # it reads and writes files, perhaps of a lost disk
                    remedy = self.recovery_message(words)
            if outcome.everywhere:  # a process was lost
                words = f"error: {words}{remedy and '; '}{remedy}"
            self._said = True
            with suppress(OSError):
                os.write(2, f"{words}\n".encode())
            for member in here:  # that are stopped: nobody else would end them
                if member.rank in self._lost.keys() & self._connections.keys():
                    with suppress(OSError):
                        os.kill(member.pid, signal.SIGKILL)
        self._closing.set()
        if not outcome.everywhere:
            time.sleep(_GRACE_SECONDS)
        os._exit(outcome.code)

    def _broadcast(self, message: dict[str, Any]) -> None:
        for rank, connection in self._connections.items():
            if rank not in self._left | self._lost.keys():
                connection.send(message)

    def name_of(self, rank: int) -> str:
        """``host B, rank 2``; a single host needs no name."""
        several = len({member.host for member in self.members}) > 1
        return f"host {self.members[rank].host}, rank {rank}" if several else f"rank {rank}"


_detector: FailureDetector | None = None
_meets = False  # whether others are met: until then each process says why it ends


def join() -> None:
    """Meet the other processes of the launch, unless that has been done; call on every rank.

    From here on :func:`dschat_lora.runtime.stage_main.fail` of any process ends all.

    Raises:
        ValueError: if they cannot meet, or their software differs.
    """
    global _detector, _meets
    if _detector is not None or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    _meets = True
    connections, members = rendezvous()
    _detector = FailureDetector(connections, members, this_member().rank)
    atexit.register(_at_exit)
    check_same_software(members, _detector.rank)


def check_same_software(members: list[Member], rank: int) -> None:
    """Refuse to run other code than rank 0.

    Raises:
        ValueError: naming what differs, on the rank that differs.
    """
    first, mine = members[0], members[rank]
    for name, there in first.software.items():
        here = mine.software.get(name)
        if here != there:
            raise ValueError(
                f"{name} is {here or 'not installed'} here and {there} on host {first.host}: "
                "install the same on all hosts"
            )


def wait_until_all_are_ready() -> None:
    """Return once every process of the launch has called this; one that fails ends all."""
    if _detector is not None:
        _detector.wait_until_all_are_ready()


def set_timeout(seconds: float) -> None:
    """How long a peer may be silent, once the first step is over."""
    if _detector is not None:
        _detector.later_timeout = seconds
        _detector.timeout = max(FIRST_TIMEOUT, seconds)


def after_a_step() -> None:
    """Expect to hear of peers more often: the first step, with all it compiles, is over."""
    if _detector is not None:
        _detector.timeout = _detector.later_timeout


def name_of(rank: int) -> str:
    """``rank 2``, after its host where there are several."""
    return f"rank {rank}" if _detector is None else _detector.name_of(rank)


def on_loss(recovery_message: Callable[[str | None], str]) -> None:
    """Call ``recovery_message`` before another process ends the run: what to say besides why.

    It is given why, is called in a thread, and may record it.
    """
    if _detector is not None:
        _detector.recovery_message = recovery_message


def fail(words: str | None, code: int) -> bool:
    """Tell the other processes that this one ends, and end them; :meth:`FailureDetector.fail`."""
    if _detector is not None:
        return _detector.fail(words, code)
    return not _meets and os.environ.get("RANK", "0") != "0"


def wait_for_lost_peer(error: BaseException) -> None:
    """See :meth:`FailureDetector.wait_for_lost_peer`."""
    if _detector is not None:
        _detector.wait_for_lost_peer(error)


def leave() -> None:
    """Part from the other processes in order; call on every rank."""
    global _detector, _meets
    if _detector is not None:
        _detector.leave()
        _detector, _meets = None, False


def _at_exit() -> None:
    """Say that this process ends, where nobody has: by an error that nobody caught, or not."""
    if _detector is not None:
        error = getattr(sys, "last_value", None)
        if error is not None:
            _detector.fail(f"{type(error).__name__}: {error}", 1)
        leave()
