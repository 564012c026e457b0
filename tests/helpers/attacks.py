"""An attacker's payload and texts, where they would leave a file or a mark, and refusals."""

import os
import re
from html.parser import HTMLParser

import pytest

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\x08\r\ud800"


def seen(capsys):
    out, err = capsys.readouterr()
    return out + err


def has_control(text):
    return re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text) is not None


MARKUP = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>" + ESCAPES[:-1]


class Elements(HTMLParser):
    """The elements and attributes of a page."""

    def __init__(self, html):
        super().__init__()
        self.found = set()
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.found |= {tag, *((tag, name) for name, _ in attributes)}


class Payload:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.fixture
def elsewhere(own_directory, tmp_path, monkeypatch):
    """The user's own directory, where the attacker's payloads would leave a file ``ran``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    assert not (tmp_path / "ran").exists()


def message(function, *arguments):
    """The one line of a refusal."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        function(*arguments)
    return " ".join(str(error.value).split())  # as it is printed
