"""One of the processes of :class:`helpers.ranks.Ranks`: a loop over requests on standard input."""

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from dschat_lora.engine.process_group import init_distributed, shutdown


def main():
    sys.path[0] = str(Path(__file__).parents[1])  # as in tests: `addons` is no helper there
    torch.set_num_threads(1)
    if os.environ["RANK"] == "0":
        time.sleep(float(os.environ.get("DELAY_OF_RANK_0", "0")))
    init_distributed()
    for line in sys.stdin:
        request = json.loads(line)
        module, _, name = request["function"].partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
            report = {"value": function(**request["arguments"])}
        except Exception:  # noqa: BLE001
            report = {"error": traceback.format_exc()}
        result = Path(request["result"])
        staged = result.with_suffix(".part")
        torch.save(report, staged)
        staged.replace(result)
    shutdown()


if __name__ == "__main__":
    main()
