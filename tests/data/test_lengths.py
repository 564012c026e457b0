"""The check before a run that some prompt fits, with the bundled tokenizer."""

import pytest
from tokenizers import Tokenizer

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.config.data import DataConfig
from dschat_lora.data.rows import check_some_prompt_fits
from helpers.step1 import write_jsonl

WORD = " What"  # a token of the bundled tokenizer
ROWS = {
    "prompts": lambda text: {"prompt": text},
    "messages": lambda text: {"messages": [{"role": "user", "content": text}, *ANSWER]},
    "later turns": lambda text: {"messages": [*SHORT, {"role": "user", "content": text}, *ANSWER]},
    "text": lambda text: {"text": text},
    "system": lambda text: {"messages": [{"role": "system", "content": text}, *SHORT]},
    "token ids": lambda text: {"prompt": [5] * len(text), "completion": [6]},
}
ANSWER = [{"role": "assistant", "content": "Yes."}]
SHORT = [{"role": "user", "content": "Hi."}, *ANSWER]


def check(directory, *texts, row="prompts", limit=8, tokenizer=BUNDLED_MODEL, **options):
    path = write_jsonl(directory / "rows.jsonl", [ROWS[row](text) for text in texts])
    config = DataConfig(data_path=(str(path),), max_seq_len=limit, **options)
    check_some_prompt_fits(config, str(tokenizer), "prompts")


@pytest.mark.parametrize("row", ["prompts", "messages"])
def test_prompts_of_which_none_fits_are_refused_with_the_shortest(tmp_path, row):
    with pytest.raises(ValueError, match="none of the 2 prompts .* shortest has 9 tokens"):
        check(tmp_path, WORD * 9, WORD * 11, row=row)


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        ((WORD * 9, WORD * 8, WORD * 9), {}),  # the second fits, though it has 40 bytes
        ((WORD * 9,), {"overlong": "truncate"}),
        ((WORD * 9,), {"row": "later turns"}),  # whose first answer is a sample
        ((WORD * 9,), {"row": "text"}),  # which is cut into pieces
        ((WORD * 9,), {"row": "system"}),  # which a template may leave out
        ((WORD * 9,), {"row": "token ids"}),
    ],
    ids=["one fits", "cut", "the first turn fits", "text", "system", "token ids"],
)
def test_data_of_which_something_may_be_left_is_not_refused(tmp_path, texts, options):
    check(tmp_path, *texts, **options)


def test_padding_and_truncation_that_a_tokenizer_file_asks_for_do_not_count(tmp_path):
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    check(tmp_path, WORD * 8, tokenizer=tmp_path)
    tokenizer.no_padding()
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="shortest has 9 tokens"):
        check(tmp_path, WORD * 9, tokenizer=tmp_path)
