"""What command lines that are refused are told: the tables ``messages/ROOM.toml``.

``[files]`` fills the room's directory: a text is written as it is, a list as JSON lines, a table as
JSON or, where the name ends in ``/``, as an adapter whose ``adapter_config.json`` has these fields.
Each ``[[table]]`` has ``rows``: a command line, and the parts that its message has; one that begins
with ``error: `` is the whole of it. ``common`` stands in front of each row's words. The first is
a verb, or the folder of a script such as ``step1_sft``; ``{model}`` and ``{train}`` are bundled.
``needs`` names add-ons and modules, ``environment`` sets variables. What is imported late, where a
verb's heavy part begins, is not reached, unless the table is to be run ``whole``.
"""

import json
import shlex
import tomllib
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from dschat_lora.__main__ import main
from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.commands.train import run_stage
from dschat_lora.config.addon_names import ADDONS
from dschat_lora.config.addons import installed, verbs
from dschat_lora.engine import failure_detection
from helpers.addons import has_verb
from helpers.command_lines import outcome_of
from helpers.step1 import write_adapter_config, write_jsonl

ROOMS = {
    path.stem: tomllib.loads(path.read_text(encoding="utf-8"))
    for path in sorted(Path(__file__).with_name("messages").glob("*.toml"))
}
BUNDLED = {"{model}": BUNDLED_MODEL, "{train}": BUNDLED_DATA["train"]}
SCRIPTS = {"step1_sft": "sft", "step2_reward": "reward", "step2_dpo": "dpo", "step3_rlhf": "rlhf"}
ROWS = [
    pytest.param(room, table, " ".join(words), parts, id=f"{room}: {words[-1]}")
    for room, content in ROOMS.items()
    for table in content["table"]
    for line, *parts in table["rows"]
    for words in [[*table.get("common", "").split(), line]]
]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """``directory_of(room)``: the directory with the room's files."""
    directories = {}

    def make(room):
        directory = directories[room] = tmp_path_factory.mktemp(room)
        for name, content in ROOMS[room].get("files", {}).items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith("/"):
                write_adapter_config(path, **content)
            elif isinstance(content, list):
                write_jsonl(path, content)
            else:
                path.write_text(content if isinstance(content, str) else json.dumps(content))
        return directory

    return lambda room: directories.get(room) or make(room)


def is_there(need):
    return need in installed() if need in ADDONS else find_spec(need) is not None


def test_each_row_stands_once_and_has_words_that_its_line_has_not():
    rows = [row.values for row in ROWS]
    assert [line for _, _, line, parts in rows if all(part in line for part in parts)] == []
    keys = [(room, line, str(t.get("environment")), t.get("whole")) for room, t, line, _ in rows]
    assert [key for key in set(keys) if keys.count(key) > 1] == []


@pytest.mark.parametrize(("room", "table", "line", "parts"), ROWS)
def test_refused_line_is_told(directory_of, monkeypatch, room, table, line, parts):
    words = [str(BUNDLED.get(word, word)) for word in shlex.split(line)]
    verb = words[0] if words else ""
    missing = [need for need in table.get("needs", ()) if not is_there(need)]
    if missing or (verb in verbs() and not has_verb(verb)):
        pytest.skip(f"{missing or verb} is not there")
    monkeypatch.chdir(directory_of(room))
    monkeypatch.setattr(failure_detection, "join", lambda: None)  # no launcher started others
    for name, value in table.get("environment", {}).items():
        monkeypatch.setenv(name, value)
    script = verb in SCRIPTS and partial(run_stage, SCRIPTS[verb])
    argv = ["main.py", *words[1:]] if script else ["dschat-lora", *words]
    outcome = outcome_of(argv, script or main, whole=table.get("whole", False))
    message = outcome.err
    assert not outcome.error, outcome.error
    assert (outcome.code, outcome.out, outcome.written) == (2, "", set()), message
    assert message.startswith("error: ")
    assert message.count("\n") == 1, message
    wrong = [
        part
        for part in parts
        if (message[:-1] != part if part.startswith("error: ") else part not in message)
    ]
    assert not wrong, message
