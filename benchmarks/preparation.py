"""Preparation of much data: its rate against tokenizers' own, its memory, and a second start.

``python -m benchmarks.preparation [ROWS] [DIRECTORY] [words] [short]`` writes rows of made-up words
of about 600 bytes, or with ``short`` of 100, a prompt and its completion. It learns a byte-level
BPE of 32,000 tokens, or with ``words`` a tokenizer by white space, with which memory and a second
start are soon measured. It prepares the rows with all cores, then again from the cache, and 1,000
of them. Rates are per CPU second of all processes too, which other work on the machine changes
little. Memory is what belongs to the processes alone, without mapped files, above what they have
after imports.
"""

import json
import random
import resource
import shutil
import string
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dschat_lora.config.data import DataConfig
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.loader import keep_rows, make_rows
from dschat_lora.data.prepare import Prepared, prepare

ROWS, SMALL, LENGTH, VOCABULARY = 2_000_000, 1000, 512, 32_000
SAMPLE = 20_000  # rows of which tokenizers' own rate is measured


def main() -> None:
    """Print the figures."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    directory = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp())
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{count}.jsonl"
    if not path.exists():
        write_rows(path, count, words=(4, 12) if "short" in sys.argv else (50, 130))
    small = directory / "small.jsonl"
    with path.open() as rows:
        small.write_text("".join(islice(rows, SMALL)))
    tokenizer = make_tokenizer(small, by_words="words" in sys.argv)
    say(f"{count:,} rows, {path.stat().st_size / 1e9:.2f} GB")
    own = measure_tokenizers(tokenizer, path)
    with watched("preparation", count) as figures:
        run(path, tokenizer, directory / "cache")
    own = (own + measure_tokenizers(tokenizer, path)) / 2  # before and after, for a busy machine
    share = own / figures["cpu"] * count
    say(f"{'':14} {share:.0%} of tokenizers' own rate per CPU second")
    starts = []
    for data in (small, path):
        prepared = run(data, tokenizer, directory / "cache")
        count_and_pack(prepared, directory / "cache")  # a first start keeps the rows
        with watched(f"start, {data.stem}", count) as figures:
            prepared = run(data, tokenizer, directory / "cache")
            count_and_pack(prepared, directory / "cache")
        starts.append(figures["wall"])
    say(f"{'':14} {starts[1] - starts[0]:.1f} s longer than with {SMALL:,} rows")
    shutil.rmtree(directory / "cache")


def run(path: Path, tokenizer: Any, cache: Path) -> Prepared:
    """Prepare as step 1 does."""
    config = DataConfig(data_path=(str(path),), max_seq_len=LENGTH)
    eos: int = tokenizer.eos_token_id
    return prepare(config, tokenizer, phase=1, seed=0, eos_id=eos, cache_dir=cache)


def count_and_pack(prepared: Prepared, cache: Path) -> None:
    """What else a start does with each sample: count it, and find its row."""
    train = prepared.train
    counts = SampleCollator(0).counts(train)
    keep_rows(
        cache,
        [LENGTH, prepared.train.digest],
        lambda: make_rows(counts.tokens, max_seq_len=LENGTH, packing=True, seed=0),
    )


def measure_tokenizers(tokenizer: Any, path: Path) -> float:
    """CPU seconds a row of tokenizers alone, of prompts and of prompts with their completions."""
    with path.open() as lines:
        rows = [json.loads(line) for line in islice(lines, SAMPLE)]
    texts = [text for r in rows for text in (r["prompt"], r["prompt"] + r["completion"])]
    with watched("tokenizers", len(rows)) as figures:
        for start in range(0, len(texts), 2000):
            tokenizer.backend_tokenizer.encode_batch(texts[start : start + 2000])
    return figures["cpu"] / len(rows)


def write_rows(path: Path, count: int, words: tuple[int, int]) -> None:
    """Rows of so many made-up words, as frequent as in a language."""
    draw = random.Random(0)
    known = [
        "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 10))) for _ in "x" * 20000
    ]
    weights = np.cumsum([1 / rank for rank in range(1, len(known) + 1)]).tolist()
    with path.open("w") as file:
        for number in range(count):
            text = draw.choices(known, cum_weights=weights, k=draw.randint(*words))
            asked = len(text) // 3
            prompt, answer = " ".join(text[:asked]), " ".join(text[asked:])
            row = {"prompt": f"{number}: {prompt}", "completion": f" {answer}"}
            file.write(json.dumps(row) + "\n")


def make_tokenizer(path: Path, *, by_words: bool) -> PreTrainedTokenizerFast:
    """A byte-level BPE learnt of a file, or a tokenizer that knows its words."""
    if by_words:
        model = Tokenizer(models.WordLevel(unk_token="</s>"))
        model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(special_tokens=["</s>"], show_progress=False)
    else:
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    model.train([str(path)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")


@contextmanager
def watched(name: str, rows: int) -> Iterator[dict[str, float]]:
    """Measure what is done within: wall and CPU seconds, and the memory of all processes."""
    figures: dict[str, float] = {}
    ended, peaks = threading.Event(), [0.0, 0.0]
    before, cpu, wall = private_bytes(psutil.Process()), cpu_seconds(), time.perf_counter()

    def watch() -> None:
        while not ended.wait(0.2):
            own = private_bytes(psutil.Process())
            workers = sum(map(private_bytes, psutil.Process().children(recursive=True)))
            peaks[:] = max(peaks[0], own - before), max(peaks[1], own + workers - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield figures
    finally:
        ended.set()
        thread.join()
    figures.update(wall=time.perf_counter() - wall, cpu=cpu_seconds() - cpu)
    say(
        f"{name:14} {figures['wall']:8.1f} s, {rows / figures['wall']:9,.0f} rows/s, "
        f"{figures['cpu'] / rows * 1e6:7,.0f} CPU us a row; memory +{peaks[0] / 2**20:,.0f} MiB, "
        f"with workers +{peaks[1] / 2**20:,.0f} MiB"
    )


def private_bytes(process: psutil.Process) -> float:
    """Memory of a process that is no file's, shared pages in parts."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))


def cpu_seconds() -> float:
    """Of this process and its workers that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


say: Callable[[str], None] = lambda text: print(text, flush=True)  # noqa: E731


if __name__ == "__main__":
    main()
