"""The reader: pictures of rows as runs of token ids, in prepared data."""

import json
import shutil

import pytest
import torch

from addons.images.vlms import drawn, prepared_by, tiny_vlm
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.config.held import held
from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.data.media import FIRST_ID, media_reader
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.loading import load_tokenizer
from dschat_lora.models.source import find_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_vlm("llava_next", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(tmp_path):
    for number, size in enumerate([(32, 32), (20, 40), (48, 24)]):
        drawn(*size, seed=number).save(tmp_path / f"{number}.png")
    return tmp_path


def row(*pictures, text="What?", answer="That."):
    parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": [f"{n}.png" for n in pictures]}


def prepared(model, folder, rows, *options, kind="samples", name="rows.jsonl"):
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return prepared_from(model, folder, folder / name, *options, kind=kind)


def prepared_from(model, folder, data, *options, kind="samples"):
    config = parse_config(
        SupervisedConfig,
        [
            *("--model_name_or_path", str(model), "--data_path", str(data)),
            *("--eval_ratio", "0", "--data_output_path", str(folder / "cache")),
            *("--preprocessing_num_workers", "1", *options),
        ],
        program="test",
    )
    return prepared_by(config, model, folder / "cache", kind)[-1]


def runs(sample):
    """(first, size) of each picture of a sample, by its ids alone."""
    ids = sample.input_ids.tolist()
    begins = [n for n, i in enumerate(ids) if i >= FIRST_ID and i != ids[n - 1] + 1]
    ends = [n + 1 for n, i in enumerate(ids) if i >= FIRST_ID and ids[n + 1] != i + 1]
    return [(ids[begin], end - begin) for begin, end in zip(begins, ends, strict=True)]


def test_each_picture_has_ids_of_its_own_wherever_it_stands(model, folder):
    data = prepared(model, folder, [row(0), row(1, 2), row(2, 0), row()])
    own = [entry.first for entry in data.media.entries]
    assert [[first for first, _ in runs(sample)] for sample in data.train] == [
        [own[0]],
        [own[1], own[2]],
        [own[2], own[0]],
        [],
    ]
    sizes = {entry.first: entry.size for entry in data.media.entries}
    assert all(sizes[first] == size for sample in data.train for first, size in runs(sample))


def test_equal_bytes_are_one_picture_whatever_their_file(model, folder):
    shutil.copy(folder / "0.png", folder / "1.png")
    data = prepared(model, folder, [row(0), row(1)])
    assert data.audit.duplicate_rows == 1
    assert runs(data.train[0]) == runs(data.train[1])


def test_rows_with_equal_text_and_other_pictures_are_no_duplicates(model, folder):
    assert prepared(model, folder, [row(0), row(1)]).audit.duplicate_rows == 0


def test_another_picture_in_a_file_of_the_same_name_is_other_data(model, folder):
    before = prepared(model, folder, [row(0)])
    again = prepared(model, folder, [row(0)])
    drawn(32, 32, seed=9).save(folder / "0.png")
    after = prepared(model, folder, [row(0)])
    assert again.from_cache
    assert not after.from_cache
    assert before.fingerprint == again.fingerprint != after.fingerprint
    assert before.media.identity == again.media.identity != after.media.identity


def test_prepared_data_has_its_pictures_where_they_are_now(model, folder, tmp_path_factory):
    prepared(model, folder, [row(0)])
    moved = shutil.move(folder, tmp_path_factory.mktemp("moved") / "data")
    again = prepared(model, moved, [row(0)])
    assert again.from_cache
    (entry,) = again.media.entries
    assert again.media.picture(entry).size == (32, 32)


def test_a_row_that_would_be_cut_inside_a_picture_is_dropped_and_counted(model, folder):
    long = row(0, text="word " * 20, answer="end " * 60)
    whole = prepared(model, folder, [long, row(0)])
    ((first, size),) = runs(whole.train[0])
    start = whole.train[0].input_ids.tolist().index(first)
    limit = start + size - 1
    cut = ["--overlong", "truncate", "--max_seq_len"]
    inside = prepared(model, folder, [long, row(0)], *cut, str(limit))
    behind = prepared(model, folder, [long, row(0)], *cut, str(len(whole.train[0].prompt) + 5))
    assert inside.audit.dropped_rows == 2
    assert behind.audit.dropped_rows == 0
    assert runs(behind.train[0]) == [(first, size)]


def test_a_file_that_becomes_another_of_the_pictures_is_other_data(model, folder):
    shutil.copy(folder / "0.png", folder / "2.png")
    rows = [row(0), row(1), row(2)]
    first, second, third = (runs(sample) for sample in prepared(model, folder, rows).train)
    assert (third, second) == (first, [(first[0][0] + first[0][1], second[0][1])])
    shutil.copy(folder / "1.png", folder / "2.png")
    _, second, third = (runs(sample) for sample in prepared(model, folder, rows).train)
    assert third == second


def test_equal_pictures_in_memory_are_equal_data(model, folder):
    def again(*seeds):
        images = [drawn(20, 20, seed=seed) for seed in seeds]
        rows = [row(0) | {"images": [each]} for each in images]
        with held(rows, "data") as name:
            return prepared_from(model, folder, name).fingerprint

    assert again(1, 2, 1) == again(1, 2, 1) != again(1, 2, 2)


def test_pictures_of_data_that_were_moved_are_read_where_they_are(model, folder):
    old, new = folder / "old", folder / "new"
    for each in (old, new):
        each.mkdir()
        shutil.copy(folder / "0.png", each)
        (each / "cache").symlink_to(folder)
    prepared(model, old, [row(0)])
    (old / "0.png").unlink()
    media = prepared(model, new, [row(0)]).media
    assert media.picture(media.entries[0]).size == (32, 32)


@pytest.mark.smoke
def test_bad_pictures_stop_the_run_by_file_and_row_or_are_skipped_and_counted(model, folder):
    (folder / "1.png").write_bytes((folder / "0.png").read_bytes()[:100])
    rows = [row(0), row(1), row(7), row(0, text="<image>")]
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: picture '.*1\.png': "):
        prepared(model, folder, rows)
    data = prepared(model, folder, rows, "--bad_rows", "skip")
    assert data.audit.bad_rows == 3
    assert len(data.train) == 1
    examples = data.audit.bad_row_examples
    assert [text.split(": ")[0].rpartition(":")[2] for text in examples] == ["2", "3", "4"]


def test_a_shape_that_the_processor_refuses_is_a_bad_row(folder, tmp_path):
    qwen = tiny_vlm("qwen3_vl", tmp_path / "qwen3_vl")
    drawn(2000, 1).save(folder / "0.png")
    rows = [row(1), row(0), row(2)]
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: picture 0\.png: absolute aspect ratio"):
        prepared(qwen, folder, rows)
    for _ in range(2):  # from the cache, too
        data = prepared(qwen, folder, rows, "--bad_rows", "skip")
        known = [data.media.entry_of(first) for sample in data.train for first, _ in runs(sample)]
        assert [entry.name for entry in known] == ["picture 1.png", "picture 2.png"]


def test_no_bad_picture_is_taken_for_rows_of_another_model(model, folder):
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: `images` item 1: picture '7\.png' in"):
        prepared(model, folder, [row(7)])


@pytest.mark.parametrize("given", ["text", "prompt"])
def test_tokens_of_pictures_are_not_learnt_where_all_others_are(model, folder, given):
    rows = {"text": {"text": "<image>What?", "image": "0.png"}, "prompt": row(0)}
    (sample,) = prepared(model, folder, [rows[given]], "--train_on_prompt").train
    ids = sample.input_ids
    assert (ids >= FIRST_ID).any()
    assert sample.supervised.tolist() == [False, *(ids[1:] < FIRST_ID)]


def test_a_row_without_pictures_is_what_it_is_without_the_reader(model, folder):
    rows = [row(), row(text="And?")]
    assert prepared(model, folder, rows).media is None


def test_without_pillow_pictures_are_refused_in_a_line_and_text_is_read(model, folder, monkeypatch):
    monkeypatch.setattr("dschat_lora.addons.images.reader.find_spec", lambda name: None)
    assert len(prepared(model, folder, [row()]).train) == 1
    with pytest.raises(ValueError, match=r"^pictures need Pillow: pip install"):
        prepared(model, folder, [row(0)])


def test_a_text_with_the_token_of_features_is_refused(tmp_path):
    model = tiny_vlm("gemma3", tmp_path / "model")
    drawn(32, 32).save(tmp_path / "0.png")
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the text has '<image_soft_token>'"):
        prepared(model, tmp_path, [row(0, answer="<image_soft_token>")])


def test_transformers_own_generation_takes_text_before_any_picture_is_known(tmp_path):
    base = tiny_vlm("qwen3_vl", tmp_path / "model")
    tokenizer = load_tokenizer(str(base), ModelConfig())
    source = find_model(str(base))
    model = build_causal_lm(
        source,
        tokenizer,
        ModelConfig(),
        LoraConfig(lora_dim=0),
        dtype=torch.float32,
        seed=1,
        meta=False,
    ).model.eval()
    ids, options = torch.tensor([[5, 6, 7, 8]]), {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options)
    media_reader(None, tokenizer, str(base)).attach(model)
    assert model.generate(ids, **options).tolist() == expected.tolist()
