"""dschat-lora push and export."""

import json

import pytest

from dschat_lora.addons.publish.config import PushConfig
from dschat_lora.addons.publish.sharing import push_directory
from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.checkpoint.adapter_config import CONFIG_FILE
from helpers.trained import home, verb

__all__ = ["home", "verb"]


def test_push_says_what_it_would_upload(verb, home, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    told = json.loads(verb("push", "reward", "me/judge", "--json"))
    adapter = home / "reward" / "adapter"
    assert told["repo"] == "me/judge"
    assert told["files"] == {path.name: path.stat().st_size for path in adapter.iterdir()}
    assert told["uploaded"] is False


def test_export_runs_the_converter_and_says_what_to_type_without_one(verb, home, tmp_path):
    told = json.loads(verb("export", "sft/adapter", "--json", code=1))
    assert told["written"] is None
    assert told["commands"][-1].startswith("python llama.cpp/convert_lora_to_gguf.py sft/adapter ")
    script = tmp_path / "convert_lora_to_gguf.py"
    script.write_text("import sys; open(sys.argv[3], 'w').write(' '.join(sys.argv[1:]))")
    told = json.loads(
        verb("export", "sft/adapter", "--llama_cpp", tmp_path, "--outtype", "q8_0", "--json")
    )
    base = BUNDLED_MODEL.resolve()
    written = home / "sft" / "adapter.gguf"
    assert told["written"] == str(written)
    staged = written.with_name(".adapter.gguf.tmp")
    assert written.read_text() == (f"sft/adapter --outfile {staged} --outtype q8_0 --base {base}")


def test_export_that_fails_leaves_the_file_that_was_there(verb, home, tmp_path):
    script = tmp_path / "convert_lora_to_gguf.py"
    script.write_text("import sys; open(sys.argv[3], 'w').write('half'); sys.exit(3)")
    written = tmp_path / "there.gguf"
    written.write_text("whole")
    verb(*("export", "sft/adapter", "--llama_cpp", tmp_path, "--output_path", written), code=2)
    assert written.read_text() == "whole"
    assert {path.name for path in tmp_path.iterdir()} >= {"there.gguf", script.name}
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.smoke
def test_push_names_and_refuses_a_link_that_leads_out(tmp_path):
    (tmp_path / CONFIG_FILE).write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").symlink_to("config.json")
    config = PushConfig(path=str(tmp_path), repo="a/b", dry_run=True)
    push_directory(config)
    (tmp_path / "README.md").symlink_to("/etc/hosts")
    with pytest.raises(ValueError, match=r"README.md is a link to /etc/hosts"):
        push_directory(config)
