"""Options of microsoft/LoRA's GPT-2 scripts as options of this package."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dschat_lora.config.groups import LoraConfig
from dschat_lora.experiments.nlg.config import CARDS, DecodeConfig, NlgConfig
from dschat_lora.report.terminal import log_once

# Options of eval.py and measure_scores.py, and of this package.
_SHORT = {"-R": "--references", "-H": "--hypotheses", "-nr": "--ref_num", "-m": "--metrics"}
_LORA = set(LoraConfig.__dataclass_fields__)


def scorer_arguments(argv: Sequence[str]) -> list[str]:
    """A command line of GenerationEval's ``eval.py`` or e2e-metrics' ``measure_scores.py``.

    ``-R``, ``-H``, ``-nr`` and ``-m bleu,meteor,ter`` of the first, and of the second two files in
    turn, references and texts. Its ``-p`` asks for what is always so.
    """
    words = [_SHORT.get(word, word) for word in argv if word != "-p"]
    if words[:1] and not words[0].startswith("-"):
        words = ["--references", words[0], *words[1:]]
        if words[2:3] and not words[2].startswith("-"):
            words.insert(2, "--hypotheses")
    if "--metrics" in words[:-1]:
        at = words.index("--metrics") + 1
        words[at : at + 1] = words[at].replace("-", "_").split(",")
    return words


def with_our_options(config: NlgConfig) -> NlgConfig:
    """The config with what ``--obj``, ``--fp16``, ``--model_card`` and ``--lora_dim 0`` mean.

    Raises:
        ValueError: if an option contradicts the one that does the same here.
    """
    model, data, lora, given = config.model, config.data, config.lora, config.given
    if config.obj == "jlm":
        data = replace(data, train_on_prompt=True)
    elif "obj" in given and data.train_on_prompt:
        raise ValueError("--obj clm and --train_on_prompt contradict each other; give one")
    if config.fp16:
        if model.dtype not in ("auto", "fp16"):
            raise ValueError(f"--fp16 and --dtype {model.dtype} contradict each other; give one")
        model = replace(model, dtype="fp16")
    name = _named_model(model.model_name_or_path, config.init_checkpoint, config.model_card)
    if name != model.model_name_or_path:
        model, given = replace(model, model_name_or_path=name), given | {"model_name_or_path"}
    if lora.lora_dim == 0 and (dropped := sorted(given & _LORA - {"lora_dim"})):
        log_once(f"  note         --lora_dim 0 trains every weight: no {', '.join(dropped)}")
        lora, given = LoraConfig(lora_dim=0), given - set(dropped)
    return replace(config, model=model, data=data, lora=lora, given=given)


def with_base(config: DecodeConfig) -> DecodeConfig:
    """The config with the model that ``--init_checkpoint`` and ``--model_card`` name.

    Raises:
        ValueError: as :func:`with_our_options`, or if there is no such checkpoint.
    """
    name = _named_model(config.model_name_or_path, config.init_checkpoint, config.model_card)
    path = Path(config.output_path).expanduser()
    if config.work_dir is not None and not path.is_absolute():
        path = Path(config.work_dir).expanduser() / path
    return replace(config, model_name_or_path=name, output_path=str(path))


def weights_file(init_checkpoint: str | None) -> Path | None:
    """The file of weights that ``--init_checkpoint`` names; None where it names a model."""
    path = None if init_checkpoint is None else Path(init_checkpoint).expanduser()
    return path if path is not None and path.is_file() else None


def _named_model(name: str | None, init_checkpoint: str | None, card: str | None) -> str | None:
    """The model to load, without the weights of a file of weights."""
    of_card = None if card is None else CARDS[card]
    if init_checkpoint is None:
        return name or of_card
    if weights_file(init_checkpoint) is not None:
        if name is None and of_card is None:
            raise ValueError(
                f"--init_checkpoint {init_checkpoint} is a file of weights; --model_card gpt2.md, "
                "or --model_name_or_path, says of which model"
            )
        return name or of_card
    if name not in (None, init_checkpoint):
        raise ValueError(
            f"--init_checkpoint {init_checkpoint} and --model_name_or_path {name} name two models; "
            "give one"
        )
    path = Path(init_checkpoint).expanduser()
    if path.suffix in (".pt", ".pth", ".bin", ".safetensors") and not path.exists():
        run = path.parent
        at = f"; {run} is a run: give --init_checkpoint {run}" if _is_run(run) else ""
        raise ValueError(f"--init_checkpoint {init_checkpoint} does not exist{at}")
    return init_checkpoint


def _is_run(directory: Path) -> bool:
    return (directory / "run.json").is_file()
