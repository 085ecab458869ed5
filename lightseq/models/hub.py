"""Downloads from hub repositories, and a quick check that one is reachable; transformers would retry for minutes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError

from lightseq.models.tokenizer_files import MORE_TEMPLATES, TOKENIZER_FILES, named_files
from lightseq.utils.formatting import first_line

TIMEOUT_SECONDS: Final = 10.0
DOWNLOAD_REMEDY: Final = "give a local directory, or add --random_init to train from random weights"


def hub_error(hub_id: str, file: str) -> str | None:
    """Returns the reason why a hub repository is unreachable; None if it is reachable or the file is cached."""
    try:
        if try_to_load_from_cache(hub_id, file) is not None:  # cached file, or cached absence of it
            return None
        get_hf_file_metadata(hf_hub_url(hub_id, file), timeout=TIMEOUT_SECONDS)
    except EntryNotFoundError:
        return None  # the hub answers; the caller reports the missing file
    except GatedRepoError:
        return f"it is gated: accept its terms at https://huggingface.co/{hub_id}, then run `hf auth login`"
    except Exception as error:  # OSError, ValueError, or an error of the HTTP client, which differs between versions
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def download(hub_id: str, remedy: str = DOWNLOAD_REMEDY) -> Path:
    """Downloads a hub repository's safetensors and tokenizer and returns their directory.

    Raises ValueError if the download fails.
    """
    return _download(hub_id, ("*.safetensors", "*.json", *TOKENIZER_FILES), hub_id, remedy)


def download_tokenizer(hub_id: str) -> Path:
    """Downloads a hub repository's tokenizer and returns its directory. Raises ValueError if the download fails."""
    return _download(
        hub_id, ("config.json", *TOKENIZER_FILES), f"tokenizer {hub_id}", "give a local directory, or byte"
    )


def _download(hub_id: str, patterns: Sequence[str], what: str, remedy: str) -> Path:
    def fetch(*patterns: str, ignored: str | None = None) -> Path:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns), ignore_patterns=ignored))

    try:
        directory = fetch(*patterns, ignored="*/*")  # folders hold the same weights in the formats of other programs
        fetch(f"{MORE_TEMPLATES}/*.jinja", *sorted(named_files(directory)))
        return directory
    except Exception as error:  # OSError, ValueError, or an error of the HTTP client, which differs between versions
        raise ValueError(f"{what} cannot be fetched ({type(error).__name__}); {remedy}") from error
