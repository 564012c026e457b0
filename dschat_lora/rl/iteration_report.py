"""Log of an iteration of step 3: metrics, progress line, warnings and a sample."""

from dataclasses import dataclass
from typing import Any

from dschat_lora.report.log import rlhf_line
from dschat_lora.rl.diagnostics import Diagnostics
from dschat_lora.rl.experience import Experience
from dschat_lora.rl.schedule import RlhfProgress
from dschat_lora.rl.setup import RlhfSetup


@dataclass(frozen=True)
class IterationReport:
    """Writes an iteration's metrics, progress line, warnings and sample to the log."""

    setup: RlhfSetup
    num_iterations: int
    diagnostics: Diagnostics

    def __call__(
        self, progress: RlhfProgress, metrics: dict[str, Any], experience: Experience
    ) -> None:
        """Report an iteration; every rank knows all, so all of them get the same warnings."""
        config, log = self.setup.config, self.setup.run.log
        iteration, total = progress.iteration, self.num_iterations
        log.write("train", progress.step, metrics)
        log.advance()
        if iteration % config.run.logging_steps == 0 or iteration == total:
            log.say_metrics(rlhf_line(iteration, total, metrics))
        for message in self.diagnostics.iteration(metrics):
            self._warn("warning", progress, message)
        interval = 1 if config.classic.print_answers else config.classic.print_answers_interval
        if interval and (iteration - 1) % interval == 0:
            response, decode = experience.responses[0], self.setup.tokenizer.decode
            log.say(
                f"  sample       {decode(response.prompt)!r} -> {decode(response.tokens)!r} "
                f"(score {float(experience.scores[0]):.3g})"
            )

    def nothing_counts(self, progress: RlhfProgress, experience: Experience) -> None:
        """Report an iteration without an optimizer step."""
        self._warn(
            "empty_batch",
            progress,
            f"none of the {len(experience.responses)} responses of iteration "
            f"{progress.iteration} counts: no score came for any of them, no token could be drawn, "
            "or --mask_truncated_completions left them out; nothing was learnt",
        )

    def _warn(self, event: str, progress: RlhfProgress, message: str) -> None:
        log = self.setup.run.log
        log.write("event", progress.step, {"event": event, "message": message})
        log.say(f"  warning      {message}")
