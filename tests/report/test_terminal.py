from dschat_lora.report.terminal import table


def test_first_column_is_left_and_numbers_are_right():
    assert table(["SFT", "before", "after"], [["perplexity", "1.5", "1.25"], ["x", "10", "2"]]) == [
        "SFT         before  after",
        "----------  ------  -----",
        "perplexity     1.5   1.25",
        "x               10      2",
    ]
