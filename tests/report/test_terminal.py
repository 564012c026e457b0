from dschat_lora.report import terminal
from dschat_lora.report.terminal import table


def test_first_column_is_left_and_numbers_are_right():
    assert table(["SFT", "before", "after"], [["perplexity", "1.5", "1.25"], ["x", "10", "2"]]) == [
        "SFT         before  after",
        "----------  ------  -----",
        "perplexity     1.5   1.25",
        "x               10      2",
    ]


# ---------------------------------------------------------------------------- time left, width


def test_time_left_is_told_at_most_once_a_minute_and_not_at_the_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    remaining, told = terminal.RemainingTime(1000, 100), []
    for step in range(101, 1001):
        now[0] += 3.0
        told.append((step, remaining.advance()))
    lines = [(step, line) for step, line in told if line]
    assert [step for step, _ in lines] == [*range(120, 1000, 20)]
    # 20 steps in 60 s: 880 more take 44 minutes
    assert lines[0][1] == "  time         0:01:00 passed, about 0:44:00 left: 120 of 1,000"


def test_long_line_goes_on_below_its_text():
    line = "  note         " + "word " * 30
    first, *more = terminal.wrapped(line).splitlines()
    assert len(first) <= 80
    assert all(each.startswith(" " * 15 + "word") and len(each) <= 80 for each in more)
    assert " ".join([first, *more]).split() == line.split()
    assert terminal.wrapped("dry run: nothing") == "dry run: nothing"
