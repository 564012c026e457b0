"""Upload of an adapter or a model to the Hugging Face Hub."""

import os
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from dschat_lora.config.verbs import PushConfig
from dschat_lora.report.terminal import log_once, to_json
from dschat_lora.runtime.saved import saved_directory


def push_directory(config: PushConfig) -> None:
    """Upload what is to be uploaded, or say it where there is no network to be used.

    Raises:
        ValueError: if there is nothing to upload, or the hub refuses the name or the token.
        OSError: if the hub cannot be reached.
    """
    directory = saved_directory(config.path, first="adapter")
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    plan: dict[str, Any] = {
        "directory": str(directory),
        "repo": config.repo,
        "files": {str(path.relative_to(directory)): path.stat().st_size for path in files},
    }
    offline = constants.is_offline_mode() or bool(os.environ.get("HF_HUB_OFFLINE"))
    if config.dry_run or offline:
        reason = "--dry_run" if config.dry_run else "HF_HUB_OFFLINE is set"
        _say(config, plan | {"uploaded": False}, f"nothing was uploaded: {reason}")
        return
    api = HfApi()
    try:
        api.create_repo(config.repo, private=config.private or None, exist_ok=True)
        done = api.upload_folder(repo_id=config.repo, folder_path=directory)
    except (HFValidationError, LocalTokenNotFoundError) as error:
        raise ValueError(f"--repo {config.repo}: {error}") from error
    except HfHubHTTPError as error:
        raise OSError(f"the hub refuses {config.repo}: {error}") from error
    except Exception as error:
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise
        raise OSError(
            f"the hub cannot be reached ({error}); --dry_run says what would be uploaded"
        ) from error
    _say(config, plan | {"uploaded": True, "url": str(done)}, f"uploaded: {done}")


def _say(config: PushConfig, plan: dict[str, Any], last: str) -> None:
    if config.json:
        log_once(to_json(plan))
        return
    log_once(f"{plan['directory']} to {config.repo}:")
    for name, size in plan["files"].items():
        log_once(f"  {size:>14,} bytes  {name}")
    log_once(last)
