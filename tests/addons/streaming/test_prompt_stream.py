"""Prompts of step 3 that are read while training: the iterations of prepared prompts."""

import gzip
import json
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet
import pytest
from streams import streaming

from data.hand_tokenizers import build_byte_tokenizer
from dschat_lora.addons.streaming.loader import Stream
from dschat_lora.addons.streaming.prompts import PromptStream
from dschat_lora.config.prompts import PromptConfig
from dschat_lora.data.prepare import prepare
from dschat_lora.data.sources import StreamError
from dschat_lora.rl.draw.source import PromptOrder
from dschat_lora.rl.loop.schedule import RlhfSchedule

SEED = 3
RUN = {"phase": 3, "seed": SEED, "eos_id": 2, "kind": "prompts"}


@pytest.fixture
def files(tmp_path):
    """Three files of 9, 4 and 10 prompts."""
    for file, size in enumerate((9, 4, 10)):
        rows = [{"prompt": f"{file}.{n}:", "answer": n} for n in range(size)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"part{file}.jsonl").write_text(text)
    return tmp_path


def config_of(files, **options):
    path = files / "*.jsonl" if files.is_dir() else files
    return streaming([path], data=PromptConfig, **options).data


class Run:
    """A run of so many prompts an iteration over a stream."""

    def __init__(self, files, each, *, state=None, iteration=0, **options):
        config = config_of(files, **options)
        self.stream = Stream(config, build_byte_tokenizer(), **RUN, left_out=frozenset())
        self.iteration = iteration
        self.order = PromptStream(
            self.stream,
            per_iteration=each,
            most=1000,
            seed=SEED,
            iteration=lambda: self.iteration,
            say=print,
        )
        if state is not None:
            self.order.restore(json.loads(json.dumps(state)))

    def prompts(self, ahead=0):
        """Those of the next iteration, once so many after it are read."""
        self.order.block(self.iteration + ahead)
        found = [each.columns for each in self.order.block(self.iteration)]
        self.iteration += 1
        return found


@pytest.fixture
def prepared(files, tmp_path_factory):
    tokenizer, cache = build_byte_tokenizer(), tmp_path_factory.mktemp("cache")
    return prepare(replace(config_of(files), tail=None), tokenizer, cache_dir=cache, **RUN).train


@pytest.mark.parametrize("each", [5, 23, 40])
def test_a_block_of_all_prompts_gives_the_iterations_of_prepared_ones(files, prepared, each):
    run, order = Run(files, each), PromptOrder(len(prepared), each, SEED)
    for iteration in range(3 * order.iterations_per_epoch + 1):
        block = run.order.block(iteration)
        assert run.prompts() == [prepared[number].columns for number in order(iteration)]
        # What may come in their place is in the same order too.
        pool = block.pool
        assert block.numbers == order(iteration)
        assert len(pool) == len(prepared)
        assert all(pool[n].columns == prepared[n].columns for n in range(len(pool)))
        assert run.order.size(iteration) == order.size(iteration)
        epoch, number = divmod(iteration + 1, order.iterations_per_epoch)
        passes = run.order.passes(iteration + 1)
        assert passes == pytest.approx({"epoch": epoch + number * each / len(prepared)})
    run.stream.close()


def test_an_epoch_counts_files_and_of_the_present_one_what_was_read(files):
    run, sizes = Run(files, 1, shuffle_buffer_size=1), (9, 4, 10)
    for epoch in range(2):
        done = []
        for _ in range(23):
            row = json.loads(run.prompts()[0])
            file, number = map(int, row["prompt"].removesuffix(":").split("."))
            done += [file] * (file not in done)
            passes = epoch + (len(done) - 1 + (number + 1) / sizes[file]) / 3
            assert run.order.passes(run.iteration) == pytest.approx({"epoch": passes})
    run.stream.close()


KNOWN = [n / 30 for n in (5, 10, 15, 20, 25, 30)]


@pytest.mark.parametrize(
    ("name", "most", "expected"),
    [
        ("rows.jsonl", 0, KNOWN),
        ("rows.parquet", 0, KNOWN),
        ("rows.jsonl", 30, KNOWN),
        ("rows.jsonl", 60, [n / 2 for n in KNOWN[:4]] + [2 / 3, 1]),
        ("rows.jsonl.gz", 0, [0, 0, 0, 0, 0.5, 1]),  # its size when unpacked is not known
    ],
)
def test_an_epoch_of_one_file_counts_what_was_read_where_its_size_is_known(
    tmp_path, name, most, expected
):
    rows = [{"prompt": f"{n:02}:"} for n in range(30)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    run = Run(tmp_path / name, 5, shuffle_buffer_size=10, max_source_rows=(most,))
    epochs = []
    for _ in expected:
        run.prompts()
        epochs.append(run.order.passes(run.iteration)["epoch"])
    run.stream.close()
    assert epochs == pytest.approx(expected)


@pytest.mark.parametrize("workers", [1, 2])
def test_small_blocks_have_every_prompt_once_in_a_pass(files, workers):
    run = Run(files, 6, shuffle_buffer_size=4, preprocessing_num_workers=workers)
    whole = [[n for _ in range(4) for n in run.prompts()] for _ in range(2)]
    sizes = [run.order.size(iteration) for iteration in range(8)]
    run.stream.close()
    assert sizes == [6, 6, 6, 5] * 2
    for found in whole:
        assert len(set(found)) == len(found) == 23
    assert whole[0] != whole[1]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_run_goes_on_at_the_prompt_at_which_it_was_left(files, ahead):
    run = Run(files, 6, shuffle_buffer_size=4)
    whole, states = [], []
    for _ in range(12):
        states.append(json.dumps(run.order.state()))
        assert run.order.state()["iteration"] == run.iteration
        whole.append(run.prompts(ahead))
    run.stream.close()
    with pytest.raises(KeyError):
        run.order.block(run.iteration - 3)  # an iteration is kept no longer than the next one
    for iteration, state in enumerate(states[:-2]):
        again = Run(files, 6, state=json.loads(state), iteration=iteration, shuffle_buffer_size=4)
        assert again.order.passes(iteration) == run_passes(states[iteration])
        sizes = [again.order.size(number) for number in range(iteration)]
        assert sizes == [len(prompts) for prompts in whole[:iteration]]
        assert [again.prompts() for _ in range(2)] == whole[iteration : iteration + 2]
        assert json.dumps(again.order.state()) == states[iteration + 2]
        again.stream.close()


def test_an_iteration_that_cannot_be_read_whole_counts_for_nothing(files):
    for path in files.glob("*.jsonl"):
        path.write_text(path.read_text().replace("\n", '\n{"other": 1}\n'))
    for failing in range(1, 6):
        run = Run(files, 6, shuffle_buffer_size=4, bad_rows="skip")
        blocks, read = iter(range(failing)), run.stream.next

        def next_or_fail(blocks=blocks, read=read):
            if next(blocks, None) is None:
                raise StreamError("lost")
            return read()

        run.stream.next, states = next_or_fail, []

        def read_on(run=run, states=states):
            while True:
                states.append(json.dumps(run.order.state()))
                run.prompts()

        with pytest.raises(StreamError):
            read_on()
        run.stream.close()
        assert json.dumps(run.order.state()) == states[-1]


def test_each_block_has_an_order_of_its_own(files):
    order, start = Run(files, 6).order, {"epoch": 0}
    blocks = [SimpleNamespace(samples=range(9), start={**start, "block": n}) for n in range(3)]
    assert len({tuple(order.rows_of(block)) for block in blocks}) == 3


def test_an_epoch_of_a_mixture_is_that_of_the_source_that_was_read_least(files):
    order = Run(files, 6).order
    order.restore({**order.state(), "passes": {"a": 2.0, "b": 0.5}})
    assert order.passes(0) == {"epoch": 0.5, "epochs/a": 2.0, "epochs/b": 0.5}


def run_passes(state):
    passes = json.loads(state)["passes"]
    return {"epoch": min(passes.values(), default=0.0)}


@pytest.mark.parametrize(("each", "rows", "max_steps"), [(5, 2, 60), (6, 4, 17), (23, 8, 9)])
def test_steps_and_iterations_are_those_of_prepared_prompts(files, each, rows, max_steps):
    run = Run(files, each)
    plan = (1, rows, 2, 1, max_steps)
    streamed, expected = (
        RlhfSchedule(run.order, *plan),
        RlhfSchedule(PromptOrder(23, each, SEED), *plan[:3], 99, max_steps),
    )
    assert streamed.iterations_per_epoch == 1000  # a pass counts as longer than the run
    # Before a pass has ended, iterations count as full.
    assert streamed.num_iterations == math.ceil(max_steps / (2 * math.ceil(each / rows)))
    iteration = 0
    while iteration < streamed.num_iterations:
        run.prompts()
        assert streamed.steps_before(iteration) == expected.steps_before(iteration)
        assert streamed.steps_of(iteration) == expected.steps_of(iteration)
        iteration += 1
    run.stream.close()
    assert iteration == streamed.num_iterations == expected.num_iterations
    assert streamed.num_steps == max_steps


@pytest.mark.parametrize("each", [6, 8])  # a pass ends in a shorter iteration, or in a full one
def test_the_run_ends_with_the_pass_that_is_the_last(files, each):
    (files / "part1.jsonl").write_text((files / "part1.jsonl").read_text() + '{"prompt": "x"}\n')
    run = Run(files, each, shuffle_buffer_size=4, max_repeats=(2,))
    schedule, seen = RlhfSchedule(run.order, 1, 2, 1, 1, 1000), Counter()
    states = []
    while run.iteration < schedule.num_iterations:
        states.append(run.order.state())
        seen.update(run.prompts())
    run.stream.close()
    assert run.iteration == run.order.end == 2 * 24 / each
    assert len(seen) == 24
    assert set(seen.values()) == {2}
    assert schedule.num_steps == 1000
    # What a checkpoint says of it, before the last iteration and after it.
    for state, left in ((states[-1], 1), (run.order.state(), 0)):
        again = Run(files, each, state=state, iteration=run.iteration - left, max_repeats=(2,))
        assert (again.order.end is None) == bool(left)
