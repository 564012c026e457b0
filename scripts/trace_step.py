"""What one step of SFT and one iteration of GRPO pass through: files, functions, lines, frames.

``python scripts/trace_step.py [sft|grpo] [--walk]`` trains the bundled model for three steps on the
CPU and profiles the time from the second line of metrics to the third: the data, forward, backward
and step, and what is counted and written of them. Files, functions and lines are those of the
package that are entered, a function's lines from its ``def`` to its end; frames are the package's
on the stack at its deepest, from the stage's main function on. ``--walk`` lists the functions in
the order in which they are first entered. In that order, a change of file is a function whose file
is not that of the function before it, the first included, and begins a visit to that file.
"""

import inspect
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import dschat_lora as dl

PACKAGE = str(Path(dl.__file__).parent) + "/"
GENERATED = ("<listcomp>", "<genexpr>", "<lambda>", "<dictcomp>", "<setcomp>", "<module>")


class Walk:
    """The package's functions that are entered between the second and the third training line."""

    def __init__(self) -> None:
        self.depths: dict[CodeType, int] = {}  # greatest depth, in order of first entry
        self._num_lines = 0

    def __call__(self, kind: str, step: int, record: dict[str, Any]) -> None:
        """The callback of a run."""
        if kind == "train":
            self._num_lines += 1
            sys.setprofile(self._enter if self._num_lines == 2 else None)

    def _enter(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and _is_ours(code):
            depth, above = 0, frame
            while above is not None:
                depth += _is_ours(above.f_code)
                above = above.f_back
            self.depths[code] = max(depth, self.depths.get(code, 0))


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE) and code.co_name not in GENERATED


def _train(stage: str, walk: Walk, directory: str) -> None:
    common = {"max_steps": 3, "eval_interval": 100, "output_dir": directory, "callbacks": [walk]}
    if stage == "sft":
        dl.sft(lora_dim=8, gradient_accumulation_steps=2, quiet=True, **common)
        return
    dl.rlhf(
        algorithm="grpo",
        actor_lora_dim=8,
        rewards=[lambda completions, **_: [len(set(each)) / 10 for each in completions]],
        num_generations=4,
        per_device_generation_batch_size=8,
        per_device_training_batch_size=8,
        quiet=True,
        **common,
    )


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stage", choices=("sft", "grpo"), nargs="?", default="sft")
    parser.add_argument("--walk", action="store_true", help="list the functions in order")
    options = parser.parse_args()
    walk = Walk()
    with tempfile.TemporaryDirectory() as directory:
        _train(options.stage, walk, directory)
    sys.setprofile(None)
    if options.walk:
        for code, depth in walk.depths.items():
            place = code.co_filename.removeprefix(PACKAGE)
            print(f"{depth:3} {place}:{code.co_firstlineno} {code.co_qualname}")
    visits = [file.removeprefix(PACKAGE) for file, _ in groupby(c.co_filename for c in walk.depths)]
    lines = sum(len(inspect.getsourcelines(code)[0]) for code in walk.depths)
    num_files, num_frames = len(set(visits)), max(walk.depths.values())
    print(
        f"{options.stage}: {num_files} files, {len(walk.depths)} functions, {lines:,} lines, "
        f"{num_frames} frames, {len(visits)} changes of file"
    )
    most = Counter(visits).most_common(5)
    print("most visits:", ", ".join(f"{file} {num}" for file, num in most))


if __name__ == "__main__":
    main()
