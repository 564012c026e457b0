"""The command lines of ``dschat-lora eval`` and ``score``."""

from dschat_lora.addons.evaluation.config import EvalConfig, ScoreConfig
from dschat_lora.addons.evaluation.validation import check_eval, check_score
from dschat_lora.config.verbs import parsed_config
from dschat_lora.runtime.stage_main import ended_in_one_line, late

EVAL_EXAMPLES = """examples:
  dschat-lora eval output/sft held_out.jsonl   perplexity; of pairs accuracy too
  dschat-lora eval output/reward pairs.jsonl --json   accuracy, margin, scores
  dschat-lora eval output/sft prompts.jsonl --reward_model output/reward
  dschat-lora eval output/sft sums.jsonl --judge_function judge:is_right
  dschat-lora eval output/sft --tasks hellaswag gsm8k --limit 200"""
SCORE_EXAMPLES = """examples:
  dschat-lora score output/reward pairs.jsonl --output_path scores.jsonl"""


def evaluate(argv: list[str]) -> None:
    """Run ``dschat-lora eval``."""
    usage = "eval RUN [DATA ...]"
    config = parsed_config(usage, EvalConfig, argv, "data_path", examples=EVAL_EXAMPLES)
    scores = check_eval(config)
    measures = late("addons.evaluation.measure:evaluate_model")(config, scores=scores)
    late("addons.evaluation.measure:show_measures")(measures, as_json=config.json)


def score(argv: list[str]) -> None:
    """Run ``dschat-lora score``."""
    usage = "score RUN [DATA ...]"
    config = parsed_config(usage, ScoreConfig, argv, "data_path", examples=SCORE_EXAMPLES)
    check_score(config)
    with ended_in_one_line(stopped="stopped; --output_path was not written"):
        late("addons.evaluation.score:score_files")(config)
