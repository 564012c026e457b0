"""Files of an attacker who knows the code: no code of theirs runs, nothing is written elsewhere."""

import ast
import json
import pickle
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.checkpoint.adapter import read_adapter
from dschat_lora.checkpoint.history import step_directory
from dschat_lora.checkpoint.manifest import write_manifest
from dschat_lora.config.data import DataConfig
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.config.options import flatten, options_that_run, parse_config
from dschat_lora.data.cache import file_digest
from dschat_lora.data.prepare import prepare
from dschat_lora.lora.targets import choose_targets
from dschat_lora.models.loading import load_causal_lm, load_config, load_tokenizer
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.directory import RunDirectory
from dschat_lora.runtime.resume import options_to_keep, settle
from helpers.addons import of_addon
from helpers.attacks import Payload, elsewhere, message
from helpers.step1 import checked, parsed, write_adapter_config, write_jsonl

__all__ = ["elsewhere"]
pytestmark = pytest.mark.usefixtures("elsewhere")

PACKAGE = Path(__file__).resolve().parents[2] / "dschat_lora"


@pytest.fixture
def checkpoint(tmp_path):
    """``checkpoint(**options)``: of a run of step 1, with options changed."""

    def make(**options):
        config = checked("--output_dir", "out")
        directory = step_directory(tmp_path / "out", 5)
        directory.mkdir(parents=True)
        identity = {"rows_per_step": config.batch.per_device_train_batch_size}
        content = {
            "step": 5,
            "identity": identity,
            "options": options_to_keep(config) | options,
            "config": flatten(config) | options,
        }
        (directory / "state.json").write_text(json.dumps(content))
        write_manifest(directory, kind="checkpoint")
        return directory

    return make


def resume(config_class=None, stage="sft"):
    argv = ["--output_dir", "out", "--resume_from_checkpoint", "latest"]
    config = parsed(*argv) if config_class is None else parse_config(config_class, argv)
    return settle(config, stage=stage)


# ---------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_cannot_trust_remote_code(checkpoint, tmp_path):
    checkpoint(trust_remote_code=True, model_name_or_path=str(tmp_path / "out"))
    words = message(resume)
    assert "out/checkpoints/step-00000005 was made with --trust_remote_code, which runs" in words


def test_one_that_is_typed_again_is_trusted(checkpoint):
    checkpoint(trust_remote_code=True)
    argv = ["--output_dir", "out", "--resume_from_checkpoint", "latest", "--trust_remote_code"]
    assert settle(parsed(*argv), stage="sft").model.trust_remote_code


@pytest.mark.parametrize(
    "name", sorted({*options_that_run(RlhfConfig, "code", "object")} - {"trust_remote_code"})
)
def test_a_checkpoint_cannot_choose_functions(checkpoint, name):
    checkpoint(**{name: "out.evil:score"})
    assert f"--{name} out.evil:score, which runs code" in message(resume, RlhfConfig)


@pytest.mark.parametrize(
    "name", ["data_output_path", *["tensorboard_path"] * len(of_addon("trackers.options"))]
)
def test_a_checkpoint_cannot_say_where_to_write(checkpoint, tmp_path, name, capsys):
    checkpoint(**{name: str(tmp_path / "home")})
    assert flatten(resume())[name] is None
    assert "not taken from the checkpoint" in capsys.readouterr().out


def test_a_checkpoint_cannot_have_deepspeed_write(checkpoint, tmp_path):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "home")}}
    (tmp_path / "ds.json").write_text(json.dumps(monitor))
    checkpoint(deepspeed_config=str(tmp_path / "ds.json"))
    assert "DeepSpeed writes files (csv_monitor)" in message(resume)


@pytest.mark.parametrize(
    "options",
    [
        {"lora_dim": {"a": 1}},
        {"seed": "__import__('os').system('touch ran')"},
        {"packing": "maybe"},
    ],
)
def test_options_of_a_checkpoint_are_checked_as_if_typed(checkpoint, options):
    checkpoint(**options)
    assert "state.json: options: " + next(iter(options)) in message(resume)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "tensorboard"])
def test_a_run_does_not_write_through_links(tmp_path, name):
    target = tmp_path / "profile"
    target.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(target)
    assert "is a link to" in message(RunDirectory.reopen, "out")
    assert target.read_text() == "mine"


# ---------------------------------------------------------------------------- adapters and models


def test_a_pickled_adapter_is_refused(tmp_path):
    path = write_adapter_config(tmp_path / "adapter")
    (path / "adapter_model.safetensors").unlink()
    torch.save(Payload(), path / "adapter_model.bin")
    assert "can run code when loaded" in message(read_adapter, path)


def test_a_pattern_that_backtracks_without_end_is_given_up():
    model = torch.nn.ModuleDict({"a" * 60: torch.nn.Linear(2, 2)})
    begun = time.monotonic()
    words = message(choose_targets, model, LoraConfig(target_modules=("(a|aa)+b",)))
    assert "takes more than 1 s" in words
    assert time.monotonic() - begun < 60


def model_with_code(path, **more):
    """A copy of the bundled model whose files ask for code of their own."""
    path.mkdir()
    for file in BUNDLED_MODEL.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    payload = "import pathlib\npathlib.Path('ran').touch()\n"
    (path / "evil.py").write_text(payload + "class Evil: pass\n")
    for name, fields in more.items():
        file = path / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return path


MODEL_CODE = {
    "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
    "model_type": "evil",
}
TOKENIZER_CODE = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}


def test_a_models_code_does_not_run(tmp_path):
    path = model_with_code(tmp_path / "m", config=MODEL_CODE)
    with pytest.raises(ValueError, match="configuration cannot be loaded: The repository"):
        load_config(str(path), ModelConfig())


def test_a_tokenizers_code_does_not_run(tmp_path):
    path = model_with_code(tmp_path / "m", tokenizer_config=TOKENIZER_CODE)
    with suppress(ValueError):  # unless it is read as the known kind that it is
        load_tokenizer(str(path), ModelConfig())


@pytest.mark.parametrize("what", ["model", "tokenizer", "pickle"])
def test_these_payloads_would_run_if_they_were_trusted(tmp_path, what):
    fields = {"config": MODEL_CODE} if what == "model" else {"tokenizer_config": TOKENIZER_CODE}
    path = model_with_code(tmp_path / f"trusted-{what}", **fields)
    trusted = ModelConfig(trust_remote_code=True)
    with suppress(Exception):  # they are no models, whatever they are
        if what == "model":
            load_config(str(path), trusted)
        elif what == "tokenizer":
            load_tokenizer(str(path), trusted)
        else:
            pickle.loads(pickle.dumps(Payload()))
    (tmp_path / "ran").unlink()


def test_pickled_weights_of_a_model_do_not_run(tmp_path):
    path = model_with_code(tmp_path / "m")
    (path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Payload()}, path / "pytorch_model.bin")
    settings = load_config(str(path), ModelConfig())
    with pytest.raises((ValueError, pickle.UnpicklingError)):
        load_causal_lm(str(path), settings, ModelConfig(), dtype=torch.float32, meta=False)


def test_a_chat_template_stays_in_its_sandbox(tmp_path):
    tokenizer = load_tokenizer(str(BUNDLED_MODEL), ModelConfig())
    tokenizer.chat_template = (
        "{{ messages.__class__.__base__.__subclasses__()[0].__init__.__globals__"
        "['__builtins__']['open']('ran', 'w') }}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = write_jsonl(tmp_path / "rows.jsonl", [{"messages": messages}])
    config = DataConfig(data_path=(str(data),))
    options = {"phase": 1, "seed": 0, "eos_id": 2, "cache_dir": tmp_path / "cache"}
    assert "rows.jsonl:1" in message(lambda: prepare(config, tokenizer, **options))


# ---------------------------------------------------------------------------- data, recipes, caches


def test_a_cache_cannot_name_files_elsewhere(tmp_path):
    tokenizer = load_tokenizer(str(BUNDLED_MODEL), ModelConfig())
    data = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": " b"}] * 4)
    config = DataConfig(data_path=(str(data),))
    options = {"phase": 1, "seed": 0, "eos_id": 2, "cache_dir": tmp_path / "cache"}
    prepared = prepare(config, tokenizer, **options)
    manifest = tmp_path / "cache" / prepared.fingerprint / "manifest.json"
    content = json.loads(manifest.read_text())
    outside = write_jsonl(tmp_path / "outside", [{}])
    content["files"][str(outside)] = file_digest(outside)
    manifest.write_text(json.dumps(content))
    assert not prepare(config, tokenizer, **options).from_cache


# ---------------------------------------------------------------------------- the code itself

# What turns bytes into code, and where it is used on purpose.
DANGEROUS = {
    "eval": set(),
    "exec": set(),
    "os.system": set(),
    "pickle.load": set(),
    "pickle.loads": set(),
    "yaml.load": set(),
    "yaml.unsafe_load": set(),
    "dist.broadcast_object_list": set(),
    "dist.all_gather_object": set(),
    "dist.gather_object": set(),
    "importlib.import_module": {"runtime/checks.py"},
    # These name modules of the package itself, and of an attention kernel.
    "import_module": {
        *("__init__.py", "config/addons.py", "old_names.py", "models/attention.py"),
        *("data/row_formats.py", "addons/environments/libraries.py"),
        "runtime/stage_main.py",
    },
}


def test_nothing_else_turns_bytes_into_code():
    misuses = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called, place = ast.unparse(node.func), str(path.relative_to(PACKAGE))
            if called in DANGEROUS and place not in DANGEROUS[called]:
                misuses.add(f"{place}: {called}")
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if called == "torch.load" and keywords.get("weights_only") != "True":
                misuses.add(f"{place}: torch.load without weights_only")
            if keywords.get("shell") == "True":
                misuses.add(f"{place}: a shell")
    assert not misuses
