"""Links in a directory at the names that something writes, and what becomes of their targets."""

import os
from contextlib import suppress

KINDS = ("file", "absent file", "directory", "hard link", "pipe")


def check_no_link_is_followed(out, write, name, kind):
    """``write(out)`` leaves alone what the link called ``name`` leads to, outside of ``out``."""
    mine = out.parent / "mine"
    if kind == "directory":
        mine.mkdir()
        (mine / "kept").write_text("mine")
    elif kind != "absent file":
        mine.write_text("mine")
    if kind == "hard link":
        os.link(mine, out / name)
    elif kind == "pipe":
        os.mkfifo(out / name)
    else:
        (out / name).symlink_to(mine)
    with suppress(OSError):
        write(out)
    if kind == "directory":
        assert [path.name for path in mine.iterdir()] == ["kept"]
        assert (mine / "kept").read_text() == "mine"
    else:
        assert mine.exists() == (kind != "absent file")
        assert not mine.exists() or mine.read_text() == "mine"


def check_links_within_are_followed(out, write):
    """``write`` writes to ``out`` by a link to it, and through links that stay in it."""
    (out / "logs").mkdir()
    for name in ("votes.jsonl", "metrics.jsonl", "rollouts.jsonl.gz"):
        (out / name).symlink_to(f"logs/{name}")
    link = out.parent / "link"
    link.symlink_to("out")
    write(link)
    assert any(path.is_file() for path in out.rglob("*"))
