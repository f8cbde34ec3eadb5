"""--hub_model_id OWNER/NAME: upload final_model/ to the Hub at the end of a run, with the token of the environment."""

from __future__ import annotations

import logging
from pathlib import Path

from common.cli import UserError, one_line
from extras.prepare.sources.hub import HUB_NAME, offline

logger = logging.getLogger(__name__)


def check_push(name: str) -> None:
    """UserError, before a run begins, for what would fail at its end."""
    from huggingface_hub import get_token

    if not HUB_NAME.fullmatch(name):
        raise UserError(f"--hub_model_id {name}: expected a name on the Hub: OWNER/NAME")
    if offline():
        raise UserError("--hub_model_id: HF_HUB_OFFLINE is set: unset it, or drop the flag and upload later")
    if not get_token():
        raise UserError("--hub_model_id: no token: set HF_TOKEN to one that may write, or run hf auth login")


def push(directory: Path, name: str) -> None:
    """Upload the files of a directory; a repository that is made for them is private. UserError if it fails."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=directory, commit_message="Upload model")
    except Exception as error:  # the Hub's are many
        raise UserError(
            f"--hub_model_id {name}: {one_line(error)[:160]}: {directory} is complete: hf upload {name} {directory}"
        ) from error
    logger.info("Uploaded: %s", done)
