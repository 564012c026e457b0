"""A stage of which only the curve is there: its loss follows from rate, seed and step.

``python -m curve_run STAGE --lora_learning_rate X --output_dir DIR ...`` makes a step in
10 ms, saves at SIGTERM, and goes on from there with --resume_from_checkpoint.
"""

import json
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path


def loss(rate, seed, step):
    """Falls faster with a larger rate, to an end that is best at 1e-3; seeds differ by 0.1."""
    end = {1e-4: 3.0, 1e-3: 1.0, 1e-2: 2.0}[rate]
    return end + 4 * 0.5 ** (step * rate * 1e3) + 0.1 * seed


def main():
    words = sys.argv[2:]
    given = dict(pairwise(words))
    rate, home = float(given["--lora_learning_rate"]), Path(given["--output_dir"])
    seed, last = int(given["--seed"]), int(given["--max_steps"])
    interval, stopped = int(given["--eval_interval"]), []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    home.mkdir(parents=True, exist_ok=True)
    log, checkpoint = home / "metrics.jsonl", home / "checkpoints" / "step"
    first = int(checkpoint.read_text()) if "--resume_from_checkpoint" in words else 0
    sys.stderr.write(f"from step {first}\n")
    with log.open("a") as file:
        for step in range(first, last + 1):
            if step > first:
                file.write(json.dumps({"kind": "train", "step": step}) + "\n")
            if (step % interval == 0 or step == last) and (step > first or not first):
                value = loss(rate, seed, step)
                line = {"kind": "eval", "step": step, "loss": value, "reward": -value, "time": 1.0}
                file.write(json.dumps(line) + "\n")
            file.flush()
            time.sleep(0.01)
            if stopped:
                checkpoint.parent.mkdir(exist_ok=True)
                checkpoint.write_text(str(step))
                raise SystemExit(143)
            if rate == 1e-2 and seed == 666 and step:
                sys.stderr.write("the loss is nan\n")
                raise SystemExit(2)


if __name__ == "__main__":
    main()
