import json
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hand_tokenizers import build_byte_tokenizer

import dschat_lora
from dschat_lora.data import cache
from dschat_lora.data.encoder import describe_tokenizer
from dschat_lora.data.rows import KNOWN_TYPES
from dschat_lora.data.samples import TokenSet
from dschat_lora.data.templates import BUILT_IN_TEMPLATE

EOS = 2


def pairs(count, tag="row"):
    return [{"prompt": f"{tag} {i}:", "completion": f" {i}"} for i in range(count)]


def texts(token_set, tokenizer=None):
    """Samples as text, special tokens included."""
    tokenizer = tokenizer or build_byte_tokenizer()
    return [tokenizer.decode(token_set[i].input_ids) for i in range(len(token_set))]


def test_all_row_types_and_file_formats_become_samples(run, jsonl, tmp_path):
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    mixed = jsonl(
        [
            {"text": "plain"},
            {"prompt": "p", "completion": "c"},
            {"messages": [user, answer]},
            {"prompt": "p", "chosen": "good", "rejected": "bad"},
            {"chosen": "one two", "rejected": "one three"},
        ]
    )
    parquet = tmp_path / "x.parquet"
    pa.parquet.write_table(pa.table({"text": ["from parquet"]}), parquet)
    table = tmp_path / "x.csv"
    table.write_text("prompt,completion\nx,y\n")
    prepared = run(mixed, parquet, table)
    assert texts(prepared.train) == [
        "plain</s>",
        "pc</s>",
        "\n\nHuman: q\n\nAssistant: a</s>",
        "pgood</s>",
        "one two</s>",
        "from parquet</s>",
        "xy</s>",
    ]
    assert prepared.audit.rows_by_type == {
        "text": 2,
        "prompt-completion": 2,
        "conversation": 1,
        "preference": 2,
    }


def test_phases_of_one_seed_train_on_disjoint_rows_and_share_the_held_out(run, jsonl):
    path = jsonl(pairs(50))
    options = {"data_split": "2,4,4", "eval_ratio": 0.1}
    prepared = [run(path, phase=phase, **options) for phase in (1, 2, 3)]
    assert [len(part.train) for part in prepared] == [9, 18, 18]
    assert [texts(part.eval) for part in prepared] == [texts(prepared[0].eval)] * 3
    seen = Counter(texts(prepared[0].eval))
    for part in prepared:
        seen.update(texts(part.train))
    assert seen == Counter(f"row {i}: {i}</s>" for i in range(50))


def test_a_bad_row_does_not_move_the_split(run, jsonl):
    rows, options = pairs(20), {"data_split": "2,4,4", "bad_rows": "skip"}
    rows[10] = {"oops": 1}
    good, bad = run(jsonl(pairs(20)), **options), run(jsonl(rows, "bad.jsonl"), **options)
    assert set(texts(good.train)) - {"row 10: 10</s>"} == set(texts(bad.train))


def test_sft_only_data_is_used_whole_in_step_one_and_in_no_other(run, jsonl):
    common, extra = jsonl(pairs(10)), jsonl(pairs(7, "extra"), "extra.jsonl")
    options = {"data_split": "2,4,4", "sft_only_data_path": (str(extra),)}
    counts = [
        sum(text.startswith("extra") for text in texts(run(common, phase=phase, **options).train))
        for phase in (1, 2, 3)
    ]
    assert counts == [7, 0, 0]


def test_weights_say_how_often_the_rows_of_each_path_are_used(run, jsonl):
    rows = [*pairs(6), {"prompt": "x" * 80, "completion": "too long"}]
    other = jsonl(pairs(10, "other"), "other.jsonl")
    prepared = run(jsonl(rows), other, data_weights=(2.0, 0.5))
    counts = Counter(texts(prepared.train))
    assert {counts[f"row {i}: {i}</s>"] for i in range(6)} == {2}
    others = [count for text, count in counts.items() if text.startswith("other")]
    assert others == [1] * 5
    audit = prepared.audit
    assert (audit.duplicate_rows, audit.dropped_rows) == (0, 1)
    # Samples that are used twice count twice, and their rows once.
    assert (audit.train_rows, audit.train_samples, audit.eos_samples) == (7 + 5, 12 + 5, 12 + 5)
    assert (audit.tokens, audit.supervised_tokens) == (12 * 9 + 5 * 11, 17 * 3)


def test_rows_that_are_held_out_are_kept_out_of_training(run, jsonl):
    prepared = run(jsonl(pairs(4) * 5), eval_ratio=0.1)
    # Rows of one prompt stay together: one of the four prompts, five times.
    assert len(prepared.eval) == 5
    held_out = set(texts(prepared.eval))
    assert len(held_out) == 1
    assert not held_out & set(texts(prepared.train))
    rest = [text for text in texts(run(jsonl(pairs(4) * 5)).train) if text not in held_out]
    assert sorted(texts(prepared.train)) == sorted(rest)
    assert prepared.audit.overlap_removed
    assert prepared.audit.overlap_rows == 0
    assert prepared.audit.duplicate_rows == 16


def test_an_evaluation_file_is_used_whole_and_its_overlap_only_counted(run, jsonl):
    held_out = jsonl([*pairs(3), {"text": "new"}, {"text": "x" * 80}], "eval.jsonl")
    options = {"eval_data_path": (str(held_out),), "eval_ratio": 0.5, "overlong": "drop"}
    prepared = run(jsonl(pairs(10)), **options)
    assert len(prepared.train) == 10
    assert texts(prepared.eval) == [*(f"row {i}: {i}</s>" for i in range(3)), "new</s>"]
    audit = prepared.audit
    assert (audit.overlap_rows, audit.overlap_removed) == (3, False)
    assert (audit.eval_rows, audit.eval_samples, audit.eval_dropped_rows) == (5, 4, 1)
    assert sum("--eval_data_path" in text for text in audit.warnings()) == 1


def test_a_bad_row_stops_the_run_or_is_counted_and_quoted(run, jsonl, tmp_path):
    bad = ["{", {"text": ""}, {"prompt": "p"}, {"messages": [{"role": "x"}]}]
    path = jsonl([*pairs(2), *bad, {"prompt": "p", "completion": "\ud800"}, *pairs(1)])
    with pytest.raises(ValueError, match=rf"^{path}:3: not valid JSON"):
        run(path)
    assert not list((tmp_path / "cache").iterdir())
    # Those of an evaluation file count too.
    options = {"eval_data_path": (str(jsonl([*pairs(1, "eval"), "{"], "eval.jsonl")),)}
    for from_cache in (False, True):
        prepared = run(path, bad_rows="skip", **options)
        assert prepared.from_cache is from_cache
        assert (len(prepared.train), len(prepared.eval)) == (3, 1)
        assert (prepared.audit.bad_rows, prepared.audit.empty_rows) == (6, 1)
        lines = [text.removeprefix(f"{tmp_path}/") for text in prepared.audit.bad_row_examples]
        places = [text.partition(": ")[0] for text in lines]
        assert places == [*(f"train.jsonl:{n}" for n in range(3, 8)), "eval.jsonl:2"]
        assert lines[1] == "train.jsonl:4: `text` is empty"
        assert lines[4] == "train.jsonl:7: '\\ud800' is half a character (a lone surrogate)"


def test_a_hundred_bad_rows_are_quoted_of_all_files(run, jsonl, monkeypatch):
    monkeypatch.setattr("dschat_lora.data.record_files.ROWS_PER_FILE", 40)
    audit = run(jsonl([*[{"oops": 1}] * 150, *pairs(1)]), bad_rows="skip").audit
    lines = [int(text.split(":")[1]) for text in audit.bad_row_examples]
    assert (audit.bad_rows, lines) == (150, [*range(1, 101)])


def test_answers_that_their_label_calls_bad_are_left_out_and_counted(run, jsonl):
    rows = [
        {**row, "label": label} for row, label in zip(pairs(4), (True, 0, "false", 1), strict=True)
    ]
    prepared = run(jsonl(rows), unpaired_rows="good_only")
    assert texts(prepared.train) == ["row 0: 0</s>", "row 3: 3</s>"]
    assert (prepared.audit.bad_rows, prepared.audit.rows_by_type) == (
        0,
        {"unpaired preference": 2, "unpaired preference with label false left out": 2},
    )
    assert len(run(jsonl(rows), unpaired_rows="all").train) == 4
    with pytest.raises(ValueError, match=r":1: row has a `label`, so its answer may be bad"):
        run(jsonl(rows))


def test_columns_are_those_of_all_sources(run, jsonl):
    def source(tag):
        rows = [{"q": f"{row['prompt']}", "a": row["completion"]} for row in pairs(1, tag)]
        return jsonl(rows, f"{tag}.jsonl")

    prepared = run(
        source("train"),
        sft_only_data_path=(str(source("more")),),
        eval_data_path=(str(source("held out")),),
        columns=("prompt=q", "completion=a"),
    )
    assert texts(prepared.train) == ["train 0: 0</s>", "more 0: 0</s>"]
    assert texts(prepared.eval) == ["held out 0: 0</s>"]
    assert prepared.audit.rows_by_type == {"prompt-completion": 2}  # those to train on


def test_the_audit_names_the_layout_of_rows(run, jsonl):
    rows = [
        {"instruction": "i", "output": "o"},
        {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]},
        {"text": "t"},
    ]
    prepared = run(jsonl(rows))
    assert prepared.audit.lines()[0] == (
        "rows         1 conversation (alpaca), 1 conversation (sharegpt), 1 text; 0 bad (0 empty)"
    )
    assert texts(prepared.train) == [
        "\n\nHuman: i\n\nAssistant: o</s>",
        "\n\nHuman: h\n\nAssistant: g</s>",
        "t</s>",
    ]


def test_a_source_without_rows_is_an_error_even_when_bad_rows_are_skipped(run, jsonl):
    with pytest.raises(ValueError, match=r"--data_path .*train\.jsonl has no rows"):
        run(jsonl([]), bad_rows="skip")


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_change_nothing_but_the_time(run, jsonl, monkeypatch, workers, tmp_path):
    monkeypatch.setattr("dschat_lora.data.record_files.ROWS_PER_FILE", 3)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    prepared = run(jsonl(pairs(20)), preprocessing_num_workers=workers)
    assert texts(prepared.train) == [f"row {i}: {i}</s>" for i in range(20)]
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    with pytest.raises(ValueError, match=r"train\.jsonl:1: 9 tokens are more than --max_seq_len"):
        run(jsonl(pairs(9)), preprocessing_num_workers=workers, max_seq_len=8, overlong="error")


def preferences(count):
    return [{"prompt": f"{i % 7}", "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(count)]


def conversations(count):
    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    last = [{"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]
    return [{"messages": [*turn * number, *last]} for number in range(count)]


# Without a split all rows are used, and tokenised at once.
@pytest.mark.parametrize("data_split", ["2,4,4", None])
@pytest.mark.parametrize("kind", ["samples", "pairs", "unpaired", "prompts"])
def test_how_rows_lie_in_files_changes_nothing(run, jsonl, tmp_path, monkeypatch, kind, data_split):
    answers = preferences(23)
    rows = [{"oops": 1}, *answers, answers[0], *(conversations(5) if kind != "pairs" else [])]
    if kind == "unpaired":
        rows = [*answers, *(row | {"completion": "c", "label": True} for row in pairs(9))]
    paths = jsonl(rows), jsonl(answers[:5], "b.jsonl")
    options = {"data_weights": (1.0, 2.5), "data_split": data_split, "bad_rows": "skip"}
    results = []
    for size in (1, 4, 1000):
        monkeypatch.setattr("dschat_lora.data.record_files.ROWS_PER_FILE", size)
        monkeypatch.setattr("dschat_lora.data.samples.SAMPLES_PER_BATCH", size)
        monkeypatch.setattr("dschat_lora.data.samples.TOKENS_PER_BATCH", 20 * size)
        prepared = run(*paths, phase=2, kind=kind, eval_ratio=0.2, **options)
        shutil.rmtree(tmp_path / "cache")
        sources = prepared.train_sources, prepared.eval_sources
        results.append((prepared.audit, prepared.train.digest, prepared.eval.digest, sources))
        assert sum(prepared.train_sources.values()) == len(prepared.train)
        assert len(prepared.train) == prepared.audit.train_samples > 0 < len(prepared.eval)
    assert results[0] == results[1] == results[2]


def test_held_out_pairs_with_a_prompt_of_training_pairs_are_counted(run, jsonl):
    def answers(prompt, *names):
        return [{"prompt": prompt, "chosen": name, "rejected": f"{name} no"} for name in names]

    train = jsonl([*answers("p", "a", "b", "c"), *answers("q", "d")])
    held_out = jsonl([*answers("p", "e", "f"), *answers("r", "g")], "eval.jsonl")
    audit = run(train, eval_data_path=(str(held_out),), phase=2, kind="pairs").audit
    assert audit.shared_prompt_rows == 2


@pytest.mark.parametrize("kind", ["samples", "pairs", "prompts"])
def test_samples_that_are_made_at_once_are_those_made_later(run, jsonl, kind):
    path = jsonl([*preferences(23), *preferences(4)])
    # A share of all is no mixture of any but itself; its rows are only then tokenised when all
    # were read.
    first, second = (run(entry, eval_ratio=0.2, kind=kind) for entry in (path, f"{path}:1"))
    assert first.audit == second.audit
    assert (first.train.digest, first.eval.digest) == (second.train.digest, second.eval.digest)


def kill_after(files, work):
    """Work in a process that is killed when it has written so many files."""

    def work_and_die():
        written = []
        rename = Path.rename

        def count(self, target):
            rename(self, target)
            written.append(target)
            if len(written) == files:
                os.kill(os.getpid(), signal.SIGKILL)

        Path.rename = count
        work()

    process = multiprocessing.get_context("fork").Process(target=work_and_die)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


# Rows of a mixture are written as records before they are tokenised, others at once.
@pytest.mark.parametrize(
    ("kinds", "files"),
    [(["rows"], 1), (["rows"], 5)] + [(["rows", "tokens"], n) for n in (4, 7, 10)],
)
def test_what_a_killed_preparation_wrote_is_not_made_again(run, jsonl, tmp_path, kinds, files):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dschat_lora.data.record_files.ROWS_PER_FILE", 4)
        path = jsonl(pairs(20))  # five files of each kind
        path = path if len(kinds) == 1 else f"{path}:1"
        kill_after(files, partial(run, path, preprocessing_num_workers=1))
        (left,) = (tmp_path / "cache").glob(".building-*")
        kept = {file.name for file in left.glob("parts/*.arrow")}
        assert len(kept) == files
        spoilt = max(left.glob("parts/*.arrow"))
        spoilt.write_bytes(spoilt.read_bytes()[:-9])
        made, rename = [], Path.rename
        patch.setattr(Path, "rename", lambda self, to: (made.append(to.name), rename(self, to)))
        prepared = run(path, preprocessing_num_workers=1)
    names = [f"{what}-{number:06}.arrow" for what in kinds for number in range(5)]
    assert made[:-1] == [name for name in names if name not in kept - {spoilt.name}]
    assert texts(prepared.train) == [f"row {i}: {i}</s>" for i in range(20)]
    assert not left.exists()
    shutil.rmtree(tmp_path / "cache")
    assert run(path).train.digest == prepared.train.digest


@pytest.mark.parametrize("name", ["big.jsonl", "big.json", "big.parquet"])
def test_long_texts_are_read_a_few_at_a_time(run, tmp_path, monkeypatch, name):
    monkeypatch.setattr("dschat_lora.data.record_files.BYTES_PER_FILE", 1000)
    texts_of_rows, sizes = [f"{number} " * 300 for number in range(10)], []
    path = tmp_path / name
    if name.endswith("parquet"):
        pa.parquet.write_table(pa.table({"text": texts_of_rows}), path)
    else:
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts_of_rows))
    monkeypatch.setattr(
        "dschat_lora.data.collect.map_in_order",
        lambda work, tasks, workers: (sizes.append(task.size) or work(task) for task in tasks),
    )
    run(path, overlong="truncate")
    assert sizes == [2, 2, 2, 2, 2]


def test_the_cache_is_hit_by_equal_content_under_another_name_if_it_is_sound(run, jsonl, tmp_path):
    path, moved = jsonl(pairs(20)), tmp_path / "moved.jsonl"
    first = run(path, eval_ratio=0.2)
    shutil.move(path, moved)
    os.utime(moved, (1, 1))
    again = run(moved, eval_ratio=0.2)
    assert (first.from_cache, again.from_cache) == (False, True)
    assert (again.fingerprint, again.audit) == (first.fingerprint, first.audit)
    assert texts(again.train) == texts(first.train)
    directory = tmp_path / "cache" / first.fingerprint
    assert {file.suffix for file in directory.iterdir()} == {".arrow", ".json"}  # nothing pickled
    for name, part in (("train", first.train), ("eval", first.eval)):
        assert TokenSet.read(directory / f"{name}.arrow").digest == part.digest
    file = directory / "train.arrow"
    file.write_bytes(file.read_bytes()[:-8])
    rebuilt = run(moved, eval_ratio=0.2)
    assert not rebuilt.from_cache
    assert rebuilt.train.digest == first.train.digest


CHANGES = [
    {"max_seq_len": 63},
    {"overlong": "truncate"},
    {"bad_rows": "skip"},
    {"train_on_prompt": True},
    {"train_empty_think": True},
    {"columns": ("margin=prompt", "prompt=prompt")},
    {"unpaired_rows": "all"},
    {"data_split": "2,4,4"},
    {"data_weights": (2.0,)},
    {"eval_ratio": 0.5},
    {"seed": 1},
    {"phase": 2},
    {"eos_id": 0},
    {"tokenizer": build_byte_tokenizer(bos=True)},
    {"tokenizer": build_byte_tokenizer(merges=[("x", "y")])},
    {"tokenizer": build_byte_tokenizer(chat_template="x")},
]


def test_the_cache_is_missed_when_anything_that_matters_changes(run, jsonl, monkeypatch, tmp_path):
    path, other = jsonl(pairs(5)), jsonl(pairs(5, "other"), "other.jsonl")
    renamed = tmp_path / "same.json"
    shutil.copy(path, renamed)
    prepared = [run(path), *(run(path, **options) for options in CHANGES)]
    prepared += [run(path, other), run(other, path), run(renamed)]
    prepared += [
        run(path, **{name: (str(other),)}) for name in ("eval_data_path", "sft_only_data_path")
    ]
    prepared.append(run(jsonl(pairs(6)[1:], "changed.jsonl")))
    monkeypatch.setattr("dschat_lora.data.prepare.code_digest", lambda: "another version")
    prepared.append(run(path))
    assert len({each.fingerprint for each in prepared}) == len(CHANGES) + 8
    assert not any(each.from_cache for each in prepared)


def test_the_code_digest_follows_the_text_of_the_code(monkeypatch, tmp_path):
    before = cache.code_digest()
    copy = tmp_path / "copy"
    shutil.copytree(os.path.dirname(dschat_lora.__file__), copy)
    monkeypatch.setattr(cache, "files", lambda _: copy)
    digests = [cache.code_digest()]
    assert digests == [before]
    inner = copy / "data" / "inner" / "more.py"
    inner.parent.mkdir()
    for changed in (copy / "data" / "collect.py", copy / "algos" / "seeds.py", inner, inner):
        with changed.open("a") as file:
            file.write("\n")
        digests.append(cache.code_digest())
    formats = tmp_path / "formats.py"
    for text, names in (("x = 1", "A"), ("x = 1", "B"), ("x = 1", "A B"), ("x = 2", "A")):
        formats.write_text(text)
        files = dict.fromkeys(names.split(), formats)
        monkeypatch.setattr(cache, "format_files", lambda files=files: files)  # those of add-ons
        digests.append(cache.code_digest())
    assert len(set(digests)) == 9


def test_what_an_earlier_caller_left_in_the_tokenizer_does_not_matter(run, jsonl):
    path, tokenizer = jsonl(pairs(5)), build_byte_tokenizer()
    first = run(path, tokenizer=tokenizer)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert run(path, tokenizer=tokenizer).from_cache
    assert texts(first.train)[0] == "row 0: 0</s>"


class SlowTokenizer:
    """Without a serialisable backend; ``shift`` is an option that its vocabulary does not show."""

    bos_token_id, eos_token_id, chat_template = 1, 2, None

    def __init__(self, shift, vocabulary):
        self.shift, self.vocabulary = shift, vocabulary

    def __call__(self, text, **options):
        return {"input_ids": [[ord(letter) + self.shift for letter in one] for one in text]}

    def get_vocab(self):
        return self.vocabulary


def test_a_tokenizer_without_a_backend_is_told_apart_by_its_vocabulary_and_its_output():
    described = [
        describe_tokenizer(SlowTokenizer(shift, vocabulary))
        for shift, vocabulary in [(0, {"a": 1}), (1, {"a": 1}), (0, {"a": 2}), (0, {"a": 1})]
    ]
    assert described[0] not in described[1:3]
    assert described[0] == described[3]
    # The package's own chat template is none of the tokenizer's.
    templates = (None, BUILT_IN_TEMPLATE, BUILT_IN_TEMPLATE + " ")
    tokenizers = [build_byte_tokenizer(chat_template=template) for template in templates]
    none, own, another = map(describe_tokenizer, tokenizers)
    assert none == own != another


def test_a_hub_set_is_cached_by_its_own_fingerprint(run, monkeypatch):
    import datasets

    dataset = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *, split: dataset)
    assert texts(run("org/name").train) == ["a</s>", "b</s>"]
    assert run("org/name").from_cache
    dataset = datasets.Dataset.from_list([{"text": "c"}])
    assert texts(run("org/name").train) == ["c</s>"]


def test_the_audit_counts_by_hand(run, jsonl):
    tokenizer = build_byte_tokenizer(bos=True)
    rows = [
        {"prompt": "ab", "completion": "cd"},  # <s> a b c d </s>: 6 tokens, 3 supervised
        {"prompt": "ab", "completion": "cd"},  # the same again
        {"prompt": "<s>a", "completion": "b"},  # a beginning of its own: 4 tokens, 2 supervised
        {"text": "xyz"},  # 5 tokens, 4 supervised
        {"prompt": "abcde", "completion": "fghi"},  # 11 tokens: cut to 8, of which 2 supervised
        {"prompt": "abcdefgh", "completion": "i"},  # 11 tokens: no target left, dropped
        {"prompt": "x", "completion": ""},  # bad, empty
        {"answer": "x"},  # bad
    ]
    path = jsonl(rows)
    audit = run(
        path, tokenizer=tokenizer, max_seq_len=8, overlong="truncate", bad_rows="skip"
    ).audit
    assert audit.to_dict() == {
        "rows_by_type": {"prompt-completion": 5, "text": 1},
        "bad_rows": 2,
        "empty_rows": 1,
        "bad_row_examples": (
            f"{path}:7: `completion` is empty",
            f"{path}:8: row has ['answer']; a row has {KNOWN_TYPES}",
        ),
        "duplicate_rows": 1,
        "overlap_rows": 0,
        "shared_prompt_rows": 0,
        "overlap_removed": True,
        "train_rows": 6,
        "eval_rows": 0,
        "dropped_rows": 1,
        "truncated_rows": 1,
        "eval_dropped_rows": 0,
        "identical_rows": 0,
        "eval_identical_rows": 0,
        "doubled_bos_rows": 1,
        "length_quantiles": {"min": 4, "p50": 6, "p90": 11, "p99": 11, "max": 11},
        "longer_rows": {"64": 0},
        "train_samples": 5,
        "eval_samples": 0,
        "tokens": 6 + 6 + 4 + 5 + 8,
        "supervised_tokens": 3 + 3 + 2 + 4 + 2,
        "eos_samples": 4,
        "max_seq_len": 8,
        "kind": "samples",
        "chat_rows": {},
        "empty_thoughts": 0,
        "answer_samples": 0,
        "split_rows": 0,
        "partly_dropped_rows": 0,
        "eval_partly_dropped_rows": 0,
        "text_samples": 1,
        "text_eos_samples": 1,
        # of the six rows before any is cut: 3 + 3, 3 + 3, 2 + 2, 0 + 5, 6 + 5, 9 + 2
        "part_quantiles": {
            "prompt": {"min": 0, "p50": 3, "p90": 9, "p99": 9, "max": 9},
            "answer": {"min": 2, "p50": 3, "p90": 5, "p99": 5, "max": 5},
        },
        "left_out": {},
    }
    json.dumps(audit.to_dict())


def test_long_texts_are_cut_by_default_and_need_no_end(run, jsonl):
    prepared = run(jsonl([{"text": "x" * 30}, {"text": "abcdef"}]), max_seq_len=8)
    audit = prepared.audit
    # 31 tokens with the end: 8 and, each with one of the piece before, 7 + 1, 7 + 1, 7 + 1, 2 + 1
    assert (audit.train_samples, audit.split_rows, audit.dropped_rows) == (6, 1, 0)
    assert (audit.tokens, audit.supervised_tokens) == (8 + 8 + 8 + 8 + 3 + 7, 30 + 6)
    assert (audit.text_samples, audit.eos_samples, audit.text_eos_samples) == (6, 2, 2)
    audit.check()
    assert "0 truncated and 1 cut into pieces (0.0% of the rows)" in "\n".join(audit.lines())
    assert not any("may not stop" in warning for warning in audit.warnings())


def test_the_end_counts_by_the_last_supervised_token(run, jsonl):
    options = {"max_seq_len": 7, "overlong": "truncate"}
    audit = run(jsonl([{"text": "abcdef"}, {"text": "ab</s>cdefg"}]), **options).audit
    assert (audit.train_samples, audit.eos_samples) == (2, 1)
    assert audit.eos_share == 0.5


def test_rows_without_a_prompt_are_no_group(run, jsonl):
    texts_alone = [{"text": f"text {i}"} for i in range(12)]
    prepared = run(jsonl(texts_alone + pairs(8)), eval_ratio=0.5)
    assert len(prepared.eval) == 10
