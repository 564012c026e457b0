"""scripts/structure.py on a tree of which every figure is counted by hand."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "structure.py"
FILES = {
    "tests/test_layering.py": 'FLOORS = [{"ground": Room()}, {"rl": Room()}]\n',
    "dschat_lora/__init__.py": '"""The package."""\n\n__version__ = "1"\n',
    "dschat_lora/ground/__init__.py": "",
    # a circle of rooms, in which the ground reaches up
    "dschat_lora/ground/tensors.py": (
        "from dschat_lora import __version__\n\ndef whiten(x):\n    import dschat_lora.rl.options\n"
    ),
    "dschat_lora/addons/__init__.py": "",
    "dschat_lora/addons/serving.py": "from dschat_lora.rl import options  # of SGLang\n",
    "dschat_lora/rl/__init__.py": "",
    "dschat_lora/rl/options.py": (
        "from dataclasses import dataclass\n"
        "from typing import TYPE_CHECKING, Any, ClassVar\n"
        "\n"
        "if TYPE_CHECKING:\n"
        "    from dschat_lora.rl.trainer import RlhfTrainer\n"
        "\n"
        "@dataclass\n"
        "class Options:\n"
        "    names: ClassVar[int] = 0\n"
        "    seed: int\n"
        "    extra: Any\n"
        "# vllm\n"
    ),
    # a chain of four: trainer, draw.prompts and draw.rows (a circle), options
    "dschat_lora/rl/trainer.py": (
        '"""Train.\n'
        "\n"
        'With no effect."""\n'
        "# a comment\n"
        "from dschat_lora.rl.draw.prompts import Prompts\n"
        "from dschat_lora.rl.options import Options\n"
        "\n"
        "class RlhfTrainer:\n"
        "    def __init__(self, a, *, b, **more):\n"
        '        """Set the teacher."""\n'
        "        found = isinstance(config, Options)\n"
        "\n"
        '        self.note = f"--{a} has no effect"\n'
        "\n"
        'serve = late("addons.serving:serve")\n'
    ),
    "dschat_lora/rl/draw/__init__.py": "",
    "dschat_lora/rl/draw/prompts.py": "from dschat_lora.rl.draw import rows\nclass Prompts: ...\n",
    "dschat_lora/rl/draw/rows.py": (
        "import dschat_lora.rl.draw.prompts  # of a RolloutServer\n"
        "from dschat_lora.ground.tensors import whiten\n"
        "from dschat_lora.rl.options import Options\n"
        "class Prompts: ...\n"
    ),
}


def test_figures_of_a_tree_are_those_that_are_counted_by_hand(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    measure = runpy.run_path(str(SCRIPT))["measure"]
    figures = measure(tmp_path, count=["Options", "RlhfTrainer.__init__"])
    sizes = figures["sizes"]
    # trainer.py: two imports, the class, its method with two lines, and the last line; blanks,
    # comments and docstrings are left out
    assert sizes["dschat_lora/rl"] == {
        "files": 6, "lines": 33, "code lines": 9 + 7 + 2 + 4, "functions": 1, "median": 5
    }  # fmt: skip
    assert sizes["dschat_lora"]["code lines"] == 22 + 1 + 3 + 1
    assert (sizes["- trunk"]["lines"], sizes["- add-ons"]["lines"]) == (33 + 3 + 4, 1)
    assert sizes["- rl"] == sizes["dschat_lora/rl"]
    assert sizes["training"]["files"] == 0
    teachers = figures.pop("files that mention a feature outside its room / all")["teachers"]
    assert teachers == "1 / 1"
    method = "rl.trainer.RlhfTrainer.__init__"
    assert figures == figures | {
        "rooms": {
            "rooms": 3,
            # addons to rl; rl to addons and ground; ground to rl; none for type checkers
            "arrows between rooms": 4,
            "circles between rooms": ["addons <-> rl", "ground <-> rl"],
            "strongly connected rooms": ["addons ground rl"],
            "arrows to a higher floor": ["ground -> rl"],
            "arrows among add-ons": 0,
            "modules of the trunk that import add-ons": ["rl.trainer"],
        },
        "inside rl": {
            "flat files": 2,
            "sub-folders": 1,
            # the trainer to draw and options, draw to options
            "arrows between parts": 3,
            "circles between parts": [],
            "strongly connected parts": [],
            "import depth": 4,
            "longest chain": ["trainer > draw.prompts > draw.rows > options"],
        },
        "siblings": {"rl.trainer": 2},
        "lines of functions": {method: 5},
        "files outside addons that name engines": {
            "in rl": ["rl/draw/rows.py", "rl/options.py"],
            "elsewhere": [],
        },
        "fields and arguments": {"rl.options.Options": 2, method: 3},
        "style": {
            "isinstance(config, ...)": 1,
            'messages of "no effect"': 1,
            "plain Any": 1,
            "public classes of one name": ["Prompts"],
            "lines of the largest function": {"rl.trainer.__init__": 5},
            "lines of the largest file": {"rl/trainer.py": 15},
            "functions that assign found": 1,
            "public docstrings": 0,
            # Options, RlhfTrainer, Prompts twice, whiten
            "public definitions without": 5,
        },
    }
