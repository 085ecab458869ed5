"""Quick check that a hub repository is reachable; transformers would retry for minutes."""

from typing import Final

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError

from lightseq.utils.formatting import first_line

TIMEOUT_SECONDS: Final = 10.0


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
