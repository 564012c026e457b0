from collections import Counter

import numpy as np
import pytest

from data.chat_tokenizers import build_chat_tokenizer
from dschat_lora.config.data import DataConfig
from dschat_lora.data.audit import DataAudit
from dschat_lora.data.prepare import prepare, preview
from dschat_lora.data.token_files import quantile

SOUND = {
    "rows_by_type": {"preference": 90, "text": 20},
    "bad_rows": 2,
    "empty_rows": 1,
    "bad_row_examples": ("f:3: `text` is empty", "f:9: not valid JSON"),
    "duplicate_rows": 5,
    "overlap_rows": 1,
    "shared_prompt_rows": 0,
    "overlap_removed": True,
    "train_rows": 100,
    "eval_rows": 10,
    "dropped_rows": 4,
    "truncated_rows": 0,
    "eval_dropped_rows": 1,
    "identical_rows": 0,
    "eval_identical_rows": 0,
    "doubled_bos_rows": 0,
    "length_quantiles": {"min": 3, "p50": 40, "max": 1200},
    "longer_rows": {},
    "train_samples": 96,
    "eval_samples": 9,
    "tokens": 4000,
    "supervised_tokens": 1000,
    "eos_samples": 96,
    "max_seq_len": 512,
    "kind": "samples",
}


def make(**changes):
    return DataAudit.from_dict(SOUND | changes)


def test_prompts_that_are_all_copies_of_held_out_ones_are_told_of_the_option_of_step_3():
    words = "or --eval_prompts 0, which holds none out"
    assert words in make(train_rows=0, kind="prompts").refusal


def test_sound_data_passes_without_a_word():
    make().check()
    assert make().warnings() == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_rows": 0, "supervised_tokens": 0},
            "no training rows are left after the split; give more data in --data_path or "
            "--eval_ratio 0, which holds none out, or check --data_split and --data_weights "
            "(left out as copies of held-out rows: 1)",
        ),
        (
            {"supervised_tokens": 0, "eos_samples": 0, "dropped_rows": 100},
            "no token of 100 training rows would be trained on: "
            "prompt and completion of 100 do not fit --max_seq_len 512 (longest row: 1200 tokens); "
            "raise it",
        ),
        (
            {"eos_samples": 0},
            "none of 96 training samples ends in end-of-sequence, so the model would not "
            "learn to end answers; raise --max_seq_len 512, or use --overlong drop to drop the "
            "truncated rows",
        ),
    ],
)
def test_data_that_teaches_nothing_stops_the_run(changes, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        make(**changes).check()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"eos_samples": 47}, "only 49% of the samples end in end-of-sequence"),
        (
            {"dropped_rows": 6, "truncated_rows": 5},
            "longer than --max_seq_len 512: 11 of 100",
        ),
        ({"overlap_removed": False}, "--eval_data_path has 1 training row too"),
        (
            {"doubled_bos_rows": 3},
            "the beginning-of-sequence token that 3 rows had",
        ),
        ({"eval_samples": 0}, "no row is held out"),
    ],
)
def test_doubtful_data_is_warned_about(changes, warning):
    (text,) = make(**changes).warnings()
    assert text.startswith(warning)
    assert make(**changes).lines()[-1] == f"warning      {text}"


@pytest.mark.parametrize("changes", [{"eos_samples": 48}, {"dropped_rows": 10}])
def test_the_borders_of_doubt_are_not_warned_about(changes):
    assert make(**changes).warnings() == ()


def test_the_table_shows_the_counts():
    assert make().lines() == [
        "rows         90 preference, 20 text; 2 bad (1 empty)",
        "repeated     5 duplicates (trained on), 1 also held out (left out)",
        "train        100 rows, 96 samples, 4,000 tokens",
        "eval         10 rows, 9 samples",
        "length       min 3, p50 40, max 1,200 tokens",
        "too long     4 dropped, 0 truncated (4.0% of the rows); eval 1 dropped",
        "supervised   1,000 tokens (25.0%)",
        "ends in EOS  96 samples (100.0%)",
        "bad row      f:3: `text` is empty",
        "bad row      f:9: not valid JSON",
    ]
    assert make(train_rows=20, data_part="part 1 of --data_split 2,8,0").lines()[2] == (
        "train        20 of 100 rows (part 1 of --data_split 2,8,0), 96 samples, 4,000 tokens"
    )


def test_the_table_of_a_stream_says_which_rows_it_counts():
    plain, streamed = make().lines(), make().lines(of_head=True)
    assert streamed[0] == "rows         of the first 1,000 of each source: " + plain[0][13:]
    assert streamed[1:] == plain[1:]


def test_an_audit_survives_its_dictionary():
    assert DataAudit.from_dict(make().to_dict()) == make()


@pytest.mark.parametrize("size", [1, 2, 9, 10, 101])
def test_quantiles_of_counts_are_those_of_the_numbers(size):
    numbers = np.random.default_rng(size).integers(0, 20, size)
    for share in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
        expected = np.quantile(numbers, share, method="inverted_cdf")
        assert quantile(Counter(numbers.tolist()), share) == expected
    assert quantile({}, 0.5) == 0


def turns(*answers):
    """A conversation with these answers."""
    texts = [text for answer in answers for text in ("ask", answer)]
    roles = ("user", "assistant") * len(answers)
    found = zip(roles, texts, strict=True)
    return {"messages": [{"role": role, "content": text} for role, text in found]}


BAD = {"prompt": "no answer"}
LONG = "x" * 400
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
# kind, rows, options, and by hand: training rows, samples, rows that are dropped, dropped
# in part, truncated, split and of equal answers
CASES = {
    "an answer each": ("samples", [turns("b", "c")], {}, (1, 2, 0, 0, 0, 0, 0)),
    "answers too long": (
        *("samples", [turns("b"), turns("b", "c", LONG), turns(LONG), BAD], {}),
        (3, 3, 1, 1, 0, 0, 0),
    ),
    "answers cut": (
        *("samples", [turns("b", "c", LONG), turns("b")], {"overlong": "truncate"}),
        (2, 4, 0, 0, 1, 0, 0),
    ),
    "used twice": (
        *("samples", [turns("b", "c", LONG)] * 2, {"data_weights": (2.0,)}),
        (2, 8, 0, 2, 0, 0, 0),
    ),
    "pieces": ("samples", [{"text": LONG}, {"text": "b"}], {}, (2, 6, 0, 0, 0, 1, 0)),
    "pairs": (
        *("pairs", [PAIR, PAIR | {"rejected": "b"}, PAIR | {"chosen": LONG}], {}),
        (3, 1, 1, 0, 0, 0, 1),
    ),
    "answers of pairs": (
        *("unpaired", [PAIR, {**PAIR, "prompt": "d", "chosen": LONG}], {}),
        (2, 3, 0, 1, 0, 0, 0),
    ),
    "prompts": ("prompts", [{"prompt": "a"}, {"prompt": LONG}], {}, (2, 1, 1, 0, 0, 0, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_counted_once_whatever_becomes_of_them(tmp_path, jsonl, case):
    kind, rows, options, expected = CASES[case]
    config = DataConfig(
        data_path=(str(jsonl(rows)),),
        **{"max_seq_len": 100, "eval_ratio": 0.0, "bad_rows": "skip"} | options,
    )
    tokenizer = build_chat_tokenizer("qwen3")
    eos = {"eos_id": tokenizer.eos_token_id, "kind": kind}
    audit = prepare(config, tokenizer, phase=1, seed=0, cache_dir=tmp_path, **eos).audit
    fates = ("dropped", "partly_dropped", "truncated", "split", "identical")
    found = (getattr(audit, f"{name}_rows") for name in fates)
    assert (audit.train_rows, audit.train_samples, *found) == expected
    assert audit.train_rows + audit.bad_rows == len(rows)
    used = {sample.row for sample in preview(config, tokenizer, **eos)}
    assert len(used) == audit.train_rows - audit.dropped_rows - audit.identical_rows
    above = [audit.train_rows, *audit.longer_rows.values()]  # each row is of one length
    assert above == sorted(above, reverse=True)
    (line,) = (each for each in audit.lines() if each.startswith("too long"))
    dropped, partly, truncated = expected[2:5]
    in_part = f"{partly} in part, " if partly else ""
    assert line.startswith(f"too long     {dropped} dropped, {in_part}{truncated} truncated ")
    share = (dropped + partly + truncated) / audit.train_rows
    assert f"({share:.1%} of the rows)" in line
