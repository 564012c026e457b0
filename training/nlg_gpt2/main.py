"""GPT-2 puts data into words (E2E, WebNLG, DART): microsoft/LoRA's experiment, in three verbs.

    deepspeed training/nlg_gpt2/main.py --model_name_or_path gpt2-medium --data_path train.txt
    deepspeed training/nlg_gpt2/main.py decode --model_name_or_path output/nlg --data_path test.txt
    python training/nlg_gpt2/main.py evaluate --predictions predictions.jsonl

Without a verb it trains. The loss is taken on the text and its end-of-sequence token only.
"""

import sys

from dschat_lora.config.addons import verb_path
from dschat_lora.runtime.stage_main import ended_in_one_line

if __name__ == "__main__":
    with ended_in_one_line():
        verb_path("nlg")
    from dschat_lora.addons.nlg.verbs import run_nlg

    run_nlg(sys.argv[1:], description=__doc__)
