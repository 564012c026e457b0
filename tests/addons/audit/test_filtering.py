"""Near duplicates, contaminated rows and languages, and the file of the rows that are kept."""

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from data.hand_tokenizers import build_byte_tokenizer
from dschat_lora.addons.audit.config import FilterConfig
from dschat_lora.addons.audit.filtering import count_languages, filter_rows
from dschat_lora.addons.audit.similar_rows import NearDuplicates, run_hashes, words_of
from dschat_lora.config.data import DataConfig
from dschat_lora.data.chat import make_chat

DIGITS = "zero one two three four five six seven eight nine ten eleven twelve thirteen".split()


def filtered(data, *, kind="samples", seed=3, columns=(), **options):
    """What is found of a file, or of several ones."""
    paths = tuple(map(str, data)) if isinstance(data, list) else (str(data),)
    chat = make_chat(build_byte_tokenizer(), None, eos_id=2)
    config = DataConfig(data_path=paths, columns=columns)
    return filter_rows(FilterConfig(**options), config, chat, kind=kind, seed=seed)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text(*words):
    return {"text": " ".join(words)}


def shingles(words, n=5):
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def near_by_plain_loop(texts, threshold):
    """Of each row the first row kept before it that is near; every pair is compared."""
    kept, near = {}, {}
    for number, own in enumerate(map(shingles, texts)):
        likes = (k for k, other in kept.items() if len(own & other) >= threshold * len(own | other))
        first = next(likes, None)
        if first is None:
            kept[number] = own
        else:
            near[number] = first
    return near


@pytest.fixture(scope="module")
def edited_texts():
    """Groups of texts of 40 words: one, and some in which a few words are others."""
    draw, texts = random.Random(5), []
    for _ in range(40):
        first = [f"w{draw.randrange(3000)}" for _ in range(40)]
        texts.append(first)
        for edits in (1, 1, 2, 3, 6):
            words = list(first)
            for place in draw.sample(range(40), edits):
                words[place] = f"x{draw.randrange(3000)}"
            texts.append(words)
    draw.shuffle(texts)
    return texts


@pytest.mark.parametrize("threshold", [0.5, 0.75])
def test_near_duplicates_are_those_of_a_loop_over_all_pairs(edited_texts, threshold):
    pytest.importorskip("datasketch", reason="needs dschat_lora[audit]")
    index, found = NearDuplicates(threshold), {}
    for number, words in enumerate(edited_texts):
        like = index.find_or_add(str(number), words)
        if like is not None:
            found[number] = int(like.like)
            other = edited_texts[int(like.like)]
            both, all_ = (f(shingles(words), shingles(other)) for f in (set.__and__, set.__or__))
            assert like.by == pytest.approx(len(both) / len(all_))
    expected = near_by_plain_loop(edited_texts, threshold)
    assert len(expected) > 40
    # At the threshold one pair of twenty may be missed, and what follows from it.
    assert len(found.items() & expected.items()) >= 0.95 * len(expected)
    assert len(found.items() - expected.items()) <= 0.05 * len(expected)


def test_a_similarity_of_the_threshold_is_near_and_less_is_not(tmp_path):
    pytest.importorskip("datasketch", reason="needs dschat_lora[audit]")
    # 8 of 10 runs of five words are in both: 12 words, and these with one behind, one in front.
    rows = text(*DIGITS[:13]), text(*DIGITS[1:14])
    assert len(shingles(DIGITS[:13]) & shingles(DIGITS[1:14])) == 8
    assert len(shingles(DIGITS[:13]) | shingles(DIGITS[1:14])) == 10
    data = write(tmp_path / "a.jsonl", *rows)
    assert filtered(data, near_duplicates=0.8).counts == {"near_duplicates": 1}
    assert filtered(data, near_duplicates=0.81).counts == {"near_duplicates": 0}
    (pair,) = filtered(data, near_duplicates=0.8).near_duplicates
    assert (pair.row, pair.like, pair.by) == (f"{data}:2", f"{data}:1", 0.8)


def test_case_punctuation_and_space_make_no_difference_and_scripts_without_spaces_have_words():
    assert words_of("  The FOX,\n(it) runs-off!") == ["the", "fox", "it", "runs", "off"]
    assert words_of("法国abc首都 ｱ") == ["法", "国", "abc", "首", "都", "ア"]
    assert words_of("สวัสดี") == ["ส", "วั", "ส", "ดี"]
    assert words_of("नमस्ते दुनिया") == ["नमस्ते", "दुनिया"]
    assert words_of("🙂 ... ") == []
    assert run_hashes([], 5).tolist() == []
    assert len(run_hashes(["a", "b"], 5)) == 1
    runs = run_hashes(["a", "b", "a", "b", "a"], 2).tolist()
    assert runs[0] == runs[2] != runs[1] == runs[3]


def test_a_row_is_contaminated_by_a_run_of_thirteen_words_of_any_type_of_row(tmp_path):
    run = " ".join(DIGITS[:13])
    held_out = write(
        tmp_path / "eval.jsonl",
        {"prompt": f"Say: {run.upper()}!", "completion": " fourteen"},
        {
            "messages": [
                {"role": "user", "content": "a b c d e f g h i j k l"},
                {"role": "assistant", "content": "m n"},
            ]
        },
        {
            "question": "Which one of these four towns lies on the river Seine?",
            "choices": ["Paris", "Rome"],
        },
        {"prompt": "name a fruit"},
    )
    data = write(
        tmp_path / "data.jsonl",
        {"prompt": f"x {run}", "completion": " y"},
        {"prompt": f"x {' '.join(DIGITS[:12])}", "completion": " y"},
        {"prompt": "Q", "completion": "b, c, d, e, f, g, h, i, j, k, l, m, n"},
        {
            "prompt": "which one of these four towns lies on the river Seine",
            "completion": " Paris Rome",
        },
        {"prompt": "Name a fruit!", "completion": " A pear."},
        {"prompt": "Name a fruit, please", "completion": " A pear."},
    )
    found = filtered(data, against=(str(held_out),))
    assert found.counts == {"contaminated": 4}
    assert [(p.row, p.like, p.by) for p in found.contaminated] == [
        (f"{data}:1", f"{held_out}:1", run),
        (f"{data}:3", f"{held_out}:2", "b c d e f g h i j k l m n"),
        (
            f"{data}:4",
            f"{held_out}:3",
            "which one of these four towns lies on the river seine paris rome",
        ),
        (f"{data}:5", f"{held_out}:4", "name a fruit"),
    ]
    assert filtered(data, against=(str(held_out),), against_ngram=12).counts == {"contaminated": 5}


def test_shared_system_messages_contaminate_nothing(tmp_path):
    system = {"role": "system", "content": " ".join(DIGITS)}

    def row(*said):
        return {
            "messages": [
                system,
                *(
                    {"role": r, "content": c}
                    for r, c in zip(("user", "assistant"), said, strict=True)
                ),
            ]
        }

    data = write(tmp_path / "data.jsonl", row("a", "b"))
    held_out = write(tmp_path / "eval.jsonl", row("c", "d"))
    assert filtered(data, against=(str(held_out),)).counts == {"contaminated": 0}


def test_rows_that_are_kept_are_their_lines_byte_for_byte(tmp_path):
    lines = [
        b'{"prompt":  "caf\\u00e9 \xc3\xa9", "completion": " 1", "n": 1.50}\r\n',
        b'{"completion": " 2", "prompt": "b"}\n',
        b"\n",
        b'{"prompt": "no answer"}\n',
        b'{"prompt": "b", "completion": " 2", "source": "again"}\n',
        b"no json\n",
        b'{"prompt": "what is held out", "completion": " 4"}\n',
        b'{"prompt": "z", "completion": " 3"}',
    ]
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_bytes(b"".join(lines))
    packed.write_bytes(gzip.compress(b'{"prompt": "c", "completion": " 5"}\n' + lines[1]))
    table = tmp_path / "c.csv"
    table.write_text("prompt,completion\né,6\n")
    held_out = write(tmp_path / "eval.jsonl", {"prompt": "What is held out?"})
    kept = tmp_path / "new" / "kept.jsonl"
    found = filtered([plain, packed, table], kept_path=str(kept), against=(str(held_out),))
    assert (
        kept.read_bytes()
        == b"".join(
            [lines[0], lines[1], lines[-1], b"\n", b'{"prompt": "c", "completion": " 5"}\n']
        )
        + '{"prompt": "é", "completion": "6"}\n'.encode()
    )
    assert found.to_dict()["filtered"]["fates"] == {
        "kept": 5,
        "unusable": 2,
        "contaminated": 1,
        "duplicates": 2,
        "near_duplicates": 0,
    }
    assert found.lines()[-1] == (
        f"kept         5 of 10 rows, in {kept}; left out: 2 unusable, 1 contaminated, 2 duplicates"
    )
    assert [path.name for path in kept.parent.iterdir()] == ["kept.jsonl"]


def test_pairs_differ_by_their_rejected_answers_and_prompts_have_none(tmp_path):
    rows = [
        {"prompt": "p ", "chosen": "yes", "rejected": rejected, "n": n}
        for n, rejected in enumerate(("no", "no", "never"))
    ]
    data, kept = write(tmp_path / "a.jsonl", *rows), str(tmp_path / "kept.jsonl")
    for kind, expected in (("pairs", [0, 2]), ("samples", [0]), ("prompts", [0])):
        filtered(data, kind=kind, kept_path=kept)
        numbers = [json.loads(line)["n"] for line in Path(kept).read_text().splitlines()]
        assert numbers == expected, kind


def test_a_failed_reading_leaves_no_part_of_the_kept_rows(tmp_path):
    data = write(tmp_path / "a.jsonl", text("one"))
    broken = tmp_path / "b.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"text": "two"}\n' * 99)[:-20])
    with pytest.raises(ValueError, match="b.jsonl.gz cannot be read"):
        filtered([data, broken], kept_path=str(tmp_path / "kept.jsonl"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl.gz"]


def test_languages_are_of_a_seeded_sample(tmp_path):
    pytest.importorskip("py3langid", reason="needs dschat_lora[audit]")
    english = ["What is the capital of France?", "The weather was cold and wet.", "Who wrote this?"]
    texts = [
        *english,
        "Die Hauptstadt von Frankreich heißt Paris.",
        "法国的首都是哪里?",
        "12",
        "🙂",
    ]
    assert count_languages(texts) == {"en": 3, "zxx": 2, "de": 1, "zh": 1}
    data = write(tmp_path / "a.jsonl", *({"text": each} for each in texts))
    assert filtered(data, language_rows=99).languages == {"en": 3, "zxx": 2, "de": 1, "zh": 1}
    drawn = Counter()
    for seed in range(20):
        found = filtered(data, language_rows=2, seed=seed)
        assert sum(found.languages.values()) == 2
        drawn.update(found.languages)
    assert drawn.keys() == {"en", "zxx", "de", "zh"}
    assert filtered(data, language_rows=2) == filtered(data, language_rows=2)
