"""The table of rows, ``rows.toml``, with its messages written out."""

import json
import math
import re
import tomllib
from pathlib import Path

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
FUNCTION = {"name": "f", "arguments": {"x": 1}}
CALLED = json.dumps(FUNCTION)
WORDS = {"@null": None, "@nan": math.nan, "@call": {"type": "function", "function": FUNCTION}}
WORDS |= {"@called": CALLED, "@called twice": f"[{CALLED}, {CALLED}]"}
WORDS |= {f"@hh {answer}": f"\n\nHuman: u\n\nAssistant: {answer}" for answer in "ab"}


def expanded(value):
    if isinstance(value, list):
        return [expanded(each) for each in value]
    if isinstance(value, dict):
        made = {name: expanded(each) for name, each in value.items()}
        role = next((letter for letter in ROLES if letter in value), None)
        if role is None:
            return made
        return {"role": ROLES[role], "content": made.pop(role), **made}
    if not isinstance(value, str):
        return value
    if said := re.fullmatch("([suat]):(.*)", value, re.DOTALL):
        return {"role": ROLES[said[1]], "content": said[2]}
    if said := re.fullmatch(r"(\w+)>(.*)", value, re.DOTALL):
        return {"from": said[1], "value": said[2]}
    return WORDS.get(value, value)


TABLE = expanded(tomllib.loads(Path(__file__).with_name("rows.toml").read_text(encoding="utf-8")))
