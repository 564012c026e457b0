"""A process with the shim: ``python -m fakecuda.worker LIBRARY`` runs functions in forks of it.

Each line of its input is a JSON object with ``function`` ("module:name"), ``arguments`` and
``result``, the file that gets what the function returned, as JSON.
"""

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

from fakecuda import shim

shim.load(sys.argv[1])

import torch  # noqa: E402

from dschat_lora.engine import distributed, failure_detection  # noqa: E402

# Imagined ranks bring nothing; their numbers would come by way of the device, which has none.
for _name in ("sum_over_ranks", "sum_over_processes", "max_over_ranks"):
    setattr(distributed, _name, lambda values: values)
distributed.broadcast_string = lambda text: text
failure_detection.join = lambda: None


def _gather_as_many(values):
    """Rows of all ranks, each of which brings as many."""
    if distributed.data_world_size() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(distributed.data_world_size())]
    torch.distributed.all_gather(parts, values, group=distributed.data_group())
    return torch.cat(parts)


distributed.gather_over_ranks = _gather_as_many


def main():
    torch.set_num_threads(1)
    import_module("fakecuda.programs")  # once for all forks
    for line in sys.stdin:
        request = json.loads(line)
        if os.fork() == 0:
            _answer(**request)
        os.wait()


def _answer(function, arguments, result):
    module, name = function.split(":")
    try:
        answer = {"value": getattr(import_module(module), name)(**arguments)}
    except BaseException:  # noqa: BLE001 - the test shows it
        answer = {"error": traceback.format_exc()}
    staged = Path(f"{result}.part")
    staged.write_text(json.dumps(answer))
    staged.replace(result)
    os._exit(0)


main()
