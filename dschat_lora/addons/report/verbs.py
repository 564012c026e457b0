"""The command lines of ``dschat-lora report`` and ``dschat-lora rollouts``, and ``Run.report``."""

from pathlib import Path

from dschat_lora.addons.report.html import FILE, render_report
from dschat_lora.addons.report.rollouts import RolloutQuery, show_rollouts
from dschat_lora.addons.report.run_data import read_runs
from dschat_lora.api.process import on_first_process, run_in_process
from dschat_lora.config.parser import Parser
from dschat_lora.config.staging import write_whole
from dschat_lora.report.terminal import log_once
from dschat_lora.runtime.directory import check_file_can_be_made


def report(argv: list[str]) -> None:
    """Run ``dschat-lora report``."""
    parser = Parser(
        "dschat-lora report",
        "Write an HTML page about runs: verdict, curves, samples, cost, settings. Runs of the same "
        "stage share charts.",
        "examples:\n  dschat-lora report output/sft output/reward output/rlhf",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="output directory of a run")
    parser.add_argument(
        "--output_path",
        metavar="FILE",
        help="file to write; default: report.html in the directory of the run or, of several, in "
        "the working directory (reports.html where that is a run's)",
    )
    chosen = parser.values(argv, ["output_path"])
    homes = [Path(run).expanduser() for run in chosen["runs"]]
    for home in homes:
        if not (home / "run.json").is_file():
            raise ValueError(f"{home} holds no run.json: it is not the output directory of a run")
    path = homes[0] / FILE
    if len(homes) > 1:  # whose own pages stay
        path = Path.cwd() / ("reports.html" if Path("run.json").is_file() else FILE)
    path = Path(chosen["output_path"] or path).expanduser()
    check_file_can_be_made(str(path), "output_path")
    title = ", ".join(home.resolve().name for home in homes)
    write_whole(path, render_report(title, read_runs(homes), {}))
    log_once(f"report: {path}")


def rollouts(argv: list[str]) -> None:
    """Run ``dschat-lora rollouts``."""
    parser = Parser(
        "dschat-lora rollouts",
        "Browse the logged responses of a step 3 run: by default the best and the worst.",
        "examples:\n  dschat-lora rollouts output/rlhf --changed 3",
    )
    parser.add_argument("run", metavar="OUT", help="output directory of the run")
    numbers = {
        "best": "show N responses of the highest reward",
        "worst": "show N responses of the lowest reward",
        "changed": "show N prompts whose mean reward changed most, by the best response before "
        "and after",
        "failed": "show the last N episodes of an agent that failed, and why",
    }
    for name, text in numbers.items():
        parser.add_argument(f"--{name}", metavar="N", type=int, default=0, help=text)
    parser.add_argument(
        "--contains", metavar="TEXT", help="only responses that contain TEXT, or whose prompt does"
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="responses over time to prompts that contain TEXT"
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=20,
        help="maximum number for these two (default: 20)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.values(argv, [*numbers, "contains", "prompt", "limit", "json"])
    for name in (*numbers, "limit"):
        if chosen[name] < 0:
            raise ValueError(f"--{name} must be >= 0, got {chosen[name]}")
    if not any(chosen[name] for name in (*numbers, "contains", "prompt")):
        chosen |= {"best": 3, "worst": 3}
    home, in_json = Path(chosen.pop("run")), chosen.pop("json")
    show_rollouts(home, RolloutQuery(**chosen), json=in_json)


def write_page(home: Path) -> Path:
    """``Run.report``: write the page of a run again, by the first process of a launch."""
    path = home / FILE
    with run_in_process():
        on_first_process(
            lambda: write_whole(path, render_report(home.resolve().name, read_runs([home]), {}))
        )
    return path
