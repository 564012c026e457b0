"""The page of a run, its responses, and how a notebook shows it."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "report",
    verbs={name: f"dschat_lora.addons.report.verbs:{name}" for name in ("report", "rollouts")},
    summaries={
        "report": "write an HTML page about runs: curves, results, time, settings",
        "rollouts": "browse the responses of a step 3 run",
    },
    writes=("report.html",),
    provides={
        "observer": {"report": "dschat_lora.addons.report.html:LiveReport"},
        "run_view": {
            "page": "dschat_lora.addons.report.verbs:write_page",
            "html": "dschat_lora.addons.report.notebook:run_html",
            "live": "dschat_lora.addons.report.notebook:shown_in_notebook",
        },
    },
)
