"""GPT-2 puts data into words (E2E, WebNLG, DART): microsoft/LoRA's experiment, in three verbs.

    deepspeed training/nlg_gpt2/main.py --model_name_or_path gpt2-medium --data_path train.txt
    deepspeed training/nlg_gpt2/main.py decode --model_name_or_path output/nlg --data_path test.txt
    python training/nlg_gpt2/main.py evaluate --predictions predictions.jsonl

Without a verb it trains. The loss is taken on the text and its end-of-sequence token only.
"""

import sys

from dschat_lora.config.options import chosen_verb
from dschat_lora.experiments.nlg.config import DecodeConfig, EvaluateConfig, NlgConfig
from dschat_lora.experiments.nlg.validation import check_decode, check_evaluate, check_training
from dschat_lora.runtime.stage_main import run_main


def train(config: NlgConfig) -> None:
    """Train, evaluate and save, from a checked config."""
    # Imported here, so that a wrong option is reported without waiting for torch.
    from dschat_lora.experiments.nlg.train import run_training

    run_training(config)


def decode(config: DecodeConfig) -> None:
    """Write a text to every meaning, from a checked config."""
    from dschat_lora.experiments.nlg.decode import run_decode

    run_decode(config)


def evaluate(config: EvaluateConfig) -> None:
    """Compare texts with their references, from a checked config."""
    from dschat_lora.experiments.nlg.evaluate import run_evaluate

    run_evaluate(config)


if __name__ == "__main__":
    verb, argv = chosen_verb(sys.argv[1:], ("train", "decode", "evaluate"))
    if verb == "train":
        run_main(NlgConfig, check_training, train, description=__doc__, argv=argv)
    elif verb == "decode":
        run_main(DecodeConfig, check_decode, decode, description=__doc__, argv=argv)
    else:
        run_main(EvaluateConfig, check_evaluate, evaluate, description=__doc__, argv=argv)
