"""The file of votes: which answer was preferred to which others."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

from dschat_lora.addons.serving.endpoint.errors import invalid
from dschat_lora.addons.serving.endpoint.requests import Fields, checked_messages
from dschat_lora.config.staging import open_in_place


class VoteFile:
    """A JSONL file with a row for each answer that another one was preferred to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def append(self, body: object) -> int:
        """Write the rows of a vote, all or none; returns how many.

        Raises:
            ApiError: naming the field that is wrong.
            OSError: if the file cannot be written.
        """
        rows = _vote_rows(body)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open_in_place(self.path, "ab+", buffering=0) as file:
                size = file.tell()
                if size:  # a line that a crash left unfinished stays a line of its own
                    file.seek(-1, os.SEEK_END)
                    text = text if file.read(1) == b"\n" else f"\n{text}"
                try:
                    # A disk that is nearly full takes a part.
                    if file.write(text.encode()) < len(text.encode()):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)
                    raise
        return len(rows)


def _vote_rows(body: object) -> list[dict[str, Any]]:
    """Rows of ``prompt``, ``chosen`` and ``rejected``, one for each answer that was not chosen.

    Answers that are equal to the chosen one, or empty, say nothing and are left out.
    """
    fields = Fields(body)
    prompt = checked_messages(fields.take("prompt", list, "a list of messages"), "prompt")
    chosen_model, chosen = _model_and_text(fields.take("chosen", dict, "an object"), "chosen")
    others = fields.take("rejected", list, "a list of objects") or []
    fields.finish()
    rejected = [_model_and_text(each, "rejected") for each in others]
    rows = [
        {
            "prompt": prompt,
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": text}],
            "chosen_model": chosen_model,
            "rejected_model": model,
        }
        for model, text in rejected
        if text.strip() and text.strip() != chosen.strip()
    ]
    if not chosen.strip():
        raise invalid("an empty answer cannot be chosen", "chosen")
    if not rows:
        raise invalid("there is no other answer to compare with", "rejected")
    return rows


def _model_and_text(value: object, param: str) -> tuple[str, str]:
    if isinstance(value, dict) and value.keys() == {"model", "content"}:
        model, content = value["model"], value["content"]
        if isinstance(model, str) and isinstance(content, str):
            return model, content
    raise invalid(f'{param} must be {{"model": TEXT, "content": TEXT}}', param)
