"""All metrics of written texts, in one table."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dschat_lora.addons.loralib.seeds import show_spreads, spreads
from dschat_lora.addons.nlg import metrics
from dschat_lora.addons.nlg.config import EvaluateConfig, MetricName, Profile
from dschat_lora.addons.nlg.metrics import References, Score, Texts
from dschat_lora.addons.nlg.predictions import Prediction, chosen_predictions, cleaner
from dschat_lora.addons.nlg.ter import ter
from dschat_lora.config.staging import write_whole
from dschat_lora.report.terminal import error_message, log_once, table
from dschat_lora.runtime.stage_main import fail

# References of a meaning at most, as the published scores were made; 0: all.
PUBLISHED_REFERENCES: dict[Profile, int] = {"e2e": 0, "webnlg": 6, "dart": 6}


def run_evaluate(config: EvaluateConfig) -> None:
    """Print the table of all metrics, and write it as JSON where a file is named.

    An error of the disk ends the process as one line. Of several processes the first one works.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        files = chosen_predictions(config)
        if config.dry_run:
            count = sum(map(len, files.values()))
            log_once(f"evaluate: {count:,} texts with references are in order")
            return
        reports = [_evaluate_file(config, name, texts) for name, texts in files.items()]
        report = reports[0]
        if len(reports) > 1:
            values = [{n: m["value"] for n, m in each["metrics"].items()} for each in reports]
            measures = spreads(values)
            show_spreads(measures, runs="files in turn")
            report = {"files": reports, "measures": {n: asdict(s) for n, s in measures.items()}}
        if config.output_path is not None:
            write_whole(Path(config.output_path).expanduser(), json.dumps(report, indent=2) + "\n")
    except (ValueError, OSError) as error:
        fail(error_message(error), code=1 if isinstance(error, OSError) else 2)


def _evaluate_file(
    config: EvaluateConfig, name: str, predictions: list[Prediction]
) -> dict[str, Any]:
    """Print the table of one file, and return it JSON-ready."""
    limit = config.ref_num
    if limit is None:
        limit = PUBLISHED_REFERENCES[config.profile]
    predictions = prepared(predictions, config.profile, limit=limit)
    hypotheses = [each.text for each in predictions]
    references = [each.references for each in predictions]
    count = sum(map(len, references))
    log_once(
        f"{len(predictions):,} meanings, {count:,} references, {config.profile}, {config.filter}"
    )
    wanted = chosen_metrics(config.profile, config.metrics)
    scores = {title: metric(hypotheses, references) for title, metric in wanted.items()}
    rows = [(title, f"{score.value:.4f}", score.signature) for title, score in scores.items()]
    for line in table(("metric", "score", "how"), rows):
        log_once(line)
    return {
        "predictions": name,
        "profile": config.profile,
        "filter": config.filter,
        "meanings": len(predictions),
        "references": count,
        "metrics": {title: asdict(score) for title, score in scores.items()},
    }


def chosen_metrics(
    profile: Profile, names: Sequence[MetricName] = ()
) -> dict[str, Callable[[Texts, References], Score]]:
    """Metrics by their titles, in the order of the published tables; all of them by default.

    Of E2E, METEOR leaves punctuation out, as e2e-metrics does; of the others it is kept, as in
    GenerationEval.
    """
    tokenize = metrics.treebank_tokens if profile == "e2e" else metrics.words_of
    title = "METEOR" if metrics.has_meteor_1_5() else "METEOR (nltk)"
    known: dict[MetricName, tuple[str, Callable[[Texts, References], Score]]] = {
        "bleu": ("BLEU", metrics.bleu),
        "nist": ("NIST", metrics.nist),
        "meteor": (title, partial(metrics.meteor, tokenize=tokenize)),
        "rouge_l": ("ROUGE-L", metrics.rouge_l),
        "cider": ("CIDEr", metrics.cider),
        "ter": ("TER", ter),
        "chrf": ("chrF", metrics.chrf),
    }
    return {title: metric for name, (title, metric) in known.items() if name in (names or known)}


def prepared(predictions: list[Prediction], profile: Profile, *, limit: int) -> list[Prediction]:
    """The texts as the profile compares them, each with its first ``limit`` references (0: all)."""
    clean = str if profile == "e2e" else cleaner(tokenize=True, lower=True)
    return [
        Prediction(
            clean(each.text),
            tuple(clean(reference) for reference in each.references[: limit or None]),
            each.category,
        )
        for each in predictions
    ]
