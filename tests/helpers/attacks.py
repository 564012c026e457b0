"""An attacker's payload, a directory where it would leave a file, and messages of refusals."""

import os

import pytest


class Payload:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The user's own directory, where the attacker's payloads would leave a file ``ran``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert not (tmp_path / "ran").exists()


def message(function, *arguments):
    """The one line of a refusal."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        function(*arguments)
    return " ".join(str(error.value).split())  # as it is printed
