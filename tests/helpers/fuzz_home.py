"""A working directory with what drawn command lines name: data, models, runs and option files."""

import json
import shutil

from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from helpers.step1 import write_adapter_config, write_jsonl

OPTIONS = "lora_dim: 4\nmax_steps: 2\n"
HOSTILE_YAML = (
    *("", "- 1\n", "a\n", "{\n", "? [a]: b\n", "seed: 1\nseed: 2\n", "1: 2\n", "on: off\n"),
    *("null: 1\n", "seed: [1]\n", "seed: {a: 1}\n", "seed: 2001-99-99\n", "seed: !!int ''\n"),
    *("dry_run: !!bool x\n", "output_dir: !!timestamp x\n", "output_dir: !!binary eA==\n"),
    *("seed: !!float x\n", "output_dir: 2024-01-02\n", "output_dir: 12:30\n", "output_dir: 010\n"),
    *("data_path: &a [*a]\n", "seed: .nan\n", "max_grad_norm: .inf\n", "output_dir: 1.50\n"),
    *("output_dir: \"a\\0b\"\n", "seed: !!python/object:os.system x\n", "\x00", "\ufeffseed: 1\n"),
    *("output_dir: \"\\ud83d\"\n", "data_path: [null]\n", "data_path: [[a]]\n", "seed: true\n"),
    *("<<: 1\n", "<<: {seed: 1}\n", "seed: 1\n---\nseed: 2\n", "&a seed: *a\n", "stages: 1\n"),
    *("stages: {sft: {seed: x}}\noutput_dir: o\n", "stages: {sft: null}\noutput_dir: o\n"),
    *("stages: {1: 2}\noutput_dir: o\n", "stages: {sft: {1: 2}}\noutput_dir: o\n"),
    *("stages: {sft: {}}\noutput_dir: 3\n", "stages: {sft: {}}\ncommon: {null: 1}\noutput_dir: o\n"),
    *("stages: {sft: {}}\nlauncher: {num_gpus: 0}\noutput_dir: o\n", "[" * 5000),
    *("stages: {sft: {}}\noutput_dir: \"a\\0\"\n", "seed: " + "9" * 5000 + "\n", "\t\n"),
    *("stages: {sft: {}}\nstages: {dpo: {}}\noutput_dir: o\n", "? {a: b}\n: 1\n", "dtype: 1\n"),
)
HOSTILE_DS = (
    *("", "[]", "{", "1", "null", '{"zero_optimization": 1}', '{"train_batch_size": true}', "\0"),
    *('{"zero_optimization": {"stage": 9}}', '{"zero_optimization": {"stage": [1]}}', "[" * 5000),
    *('{"gradient_clipping": NaN}', '{"gradient_clipping": 1e999}', '{"gradient_clipping": -1}'),
    *('{"train_batch_size": 0}', '{"train_micro_batch_size_per_gpu": 0}', '{"bf16": null}'),
    *('{"train_micro_batch_size_per_gpu": -3}', '{"gradient_accumulation_steps": 0}'),
    *('{"bf16": {"enabled": 1}}', '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}'),
    *('{"optimizer": null}', '{"optimizer": {"type": []}}', '{"optimizer": {"params": null}}'),
    *('{"optimizer": {"type": "Adam", "params": {"lr": {}}}}', '{"scheduler": {"params": 3}}'),
    *('{"zero_optimization": {"offload_optimizer": 3}}', '{"zero_optimization": null}'),
    *('{"zero_optimization": {"offload_optimizer": {"device": []}}}', '{"autotp_size": "x"}'),
    *('{"train_batch_size": 7}', '{"train_batch_size": 7, "train_batch_size": 8}', '{"a": 1}'),
    *('{"zero_optimization": {"zero_hpz_partition_size": "x"}}', '{"tensor_parallel": 1}'),
    *('{"train_batch_size": ' + "9" * 5000 + "}", '{"train_batch_size": ' + "9" * 400 + "}"),
    *('{"gradient_clipping": ' + "9" * 400 + "}", '{"zero_optimization": {"stage": {}}}'),
)


def make_home(home):
    """Fill the directory."""
    (home / "file.txt").write_text("some text\n")
    (home / "e2e.txt").write_text("name[A]||A is it.\nname[B]||B is it.\n")
    (home / "empty.jsonl").write_text("")
    (home / "hostile.jsonl").write_text('{"prompt": 1}\n')
    (home / "rows.csv").write_text("prompt,completion\nx,y\n")
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    write_jsonl(home / "pairs.jsonl", rows)
    (home / "directory").mkdir()
    shutil.copy(BUNDLED_DATA["train"], home / "directory" / "train.jsonl")
    (home / "cola").mkdir()
    for name in ("train", "dev"):
        (home / "cola" / f"{name}.tsv").write_text("a\t1\t\tgood one\nb\t0\t\tbad one\n")
    write_adapter_config(home / "adapter")
    write_adapter_config(home / "copy")
    write_adapter_config(home / "reward", task_type="SEQ_CLS", modules_to_save=["score"])
    run = home / "run"
    write_adapter_config(run / "adapter")
    (run / "run.json").write_text(json.dumps({"status": "finished", "stage": "sft"}))
    (home / "p.jsonl").write_text('{"prediction": "a", "references": ["b"], "id": 0}\n')
    (home / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (home / "options.yaml").write_text(OPTIONS)
    (home / "recipe.yaml").write_text("output_dir: o\nstages:\n  sft:\n    lora_dim: 4\n")
    (home / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    (home / "hostile.yaml").write_text("seed: [1]\n")
    (home / "hostile.json").write_text('{"zero_optimization": {"stage": []}}')
    (home / "deep.yaml").write_text("[" * 5000)
    (home / "ints.yaml").write_text("output_dir: 12:30\n")
    assert BUNDLED_MODEL.is_dir()
