"""Upload of a finished run's checkpoint to a hub repository (--push_to_hub)."""

import sys
from pathlib import Path

from huggingface_hub import HfApi, constants

from lightseq.checkpoint import checkpoints, manifest
from lightseq.config.train_config import TrainConfig
from lightseq.utils.formatting import first_line

NOT_UPLOADED = (f"{checkpoints.STATE}/*", checkpoints.TRAINER_STATE, manifest.MANIFEST)  # what only a resume needs


def create_repository(config: TrainConfig) -> str | None:
    """Creates the repository that the run will upload to, and returns its id; None without --push_to_hub.

    Raises ValueError if the hub refuses it, before hours of training.
    """
    if not config.push_to_hub:
        if config.hub_model_id is not None:
            raise ValueError(f"--hub_model_id {config.hub_model_id} names where to upload; add --push_to_hub True")
        if config.hub_private_repo:
            raise ValueError("--hub_private_repo True is for an upload; add --push_to_hub True")
        return None
    if config.save_strategy == "no":
        raise ValueError("--push_to_hub uploads a checkpoint, and --save_strategy no writes none; leave one out")
    name = config.hub_model_id or Path(config.output_dir).absolute().name
    try:
        return str(HfApi().create_repo(name, private=config.hub_private_repo or None, exist_ok=True).repo_id)
    except Exception as error:  # OSError, ValueError, or an error of the HTTP client, which differs between versions
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(
            f"--push_to_hub: repository {name} cannot be created ({reason}); run `hf auth login`, or leave it out"
        ) from error


def upload(config: TrainConfig, repository: str) -> None:
    """Uploads the best checkpoint if the run retains it, else the newest. Exits with status 1 if the upload fails."""
    directory = Path(config.output_dir)
    best = checkpoints.best_checkpoint(directory) if config.retains_best else None
    checkpoint = best or checkpoints.list_checkpoints(directory)[-1]
    try:
        HfApi().upload_folder(
            repo_id=repository,
            folder_path=str(checkpoint),
            ignore_patterns=list(NOT_UPLOADED),
            commit_message=f"Upload step {checkpoints.step_of(checkpoint)}",
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        command = f"hf upload {repository} {checkpoint} --exclude '{checkpoints.STATE}/*'"
        print(f"error: --push_to_hub: {checkpoint} was not uploaded ({reason}); type {command}", file=sys.stderr)
        raise SystemExit(1) from error
    print(f"uploaded    {checkpoint} to {constants.ENDPOINT}/{repository}", flush=True)
