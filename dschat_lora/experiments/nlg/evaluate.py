"""All metrics of written texts, in one table."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dschat_lora.checkpoint.staging import write_whole
from dschat_lora.config.options import fail
from dschat_lora.experiments.nlg.config import EvaluateConfig, MetricName, Profile
from dschat_lora.experiments.nlg.metrics import chosen
from dschat_lora.experiments.nlg.predictions import Prediction, chosen_predictions
from dschat_lora.experiments.nlg.scorer_files import cleaner
from dschat_lora.experiments.nlg.texts import Score
from dschat_lora.report.terminal import error_message, log_once, table
from dschat_lora.runtime.seeds import show_spreads, spreads

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
            found = spreads(values)
            show_spreads(found, runs="files in turn")
            report = {"files": reports, "measures": {n: asdict(s) for n, s in found.items()}}
        if config.output_path is not None:
            write_whole(Path(config.output_path).expanduser(), json.dumps(report, indent=2) + "\n")
    except (ValueError, OSError) as error:
        fail(error_message(error), code=1 if isinstance(error, OSError) else 2)


def _evaluate_file(
    config: EvaluateConfig, name: str, predictions: list[Prediction]
) -> dict[str, Any]:
    """Print the table of one file, and return it JSON-ready."""
    published, wanted = PUBLISHED_REFERENCES[config.profile], config.ref_num
    limit = published if wanted is None else wanted
    predictions = prepared(predictions, config.profile, limit=limit)
    references = sum(len(each.references) for each in predictions)
    log_once(
        f"{len(predictions):,} meanings, {references:,} references, {config.profile}, "
        f"{config.filter}"
    )
    scores = evaluate(predictions, config.profile, config.metrics)
    rows = [(title, f"{score.value:.4f}", score.signature) for title, score in scores.items()]
    for line in table(("metric", "score", "how"), rows):
        log_once(line)
    return {
        "predictions": name,
        "profile": config.profile,
        "filter": config.filter,
        "meanings": len(predictions),
        "references": references,
        "metrics": {title: asdict(score) for title, score in scores.items()},
    }


def evaluate(
    predictions: list[Prediction], profile: Profile, names: Sequence[MetricName] = ()
) -> dict[str, Score]:
    """The metrics of ``names`` by their titles, see :func:`chosen`."""
    hypotheses = [each.text for each in predictions]
    references = [each.references for each in predictions]
    return {name: metric(hypotheses, references) for name, metric in chosen(profile, names).items()}


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
