"""Masking of secrets in records. Secrets are found by field name, by format, or by comparison with known values."""

import re
from collections.abc import Collection
from typing import Any, Final

MASK: Final = "***"
MIN_SECRET_LENGTH: Final = 6  # shorter values would mask ordinary words

# Secret names end like this. So do names of special tokens (`eos_token`), which SPECIAL_TOKEN_NAMES excludes.
SECRET_ENDINGS: Final = (
    r"(?:token|secret|password|passwd|passphrase|(?<![a-z])pass|credentials?|(?:api|access|private|[_-])key)"
)
SECRET_NAMES: Final = re.compile(rf"(?i){SECRET_ENDINGS}$")
SPECIAL_TOKEN_NAMES: Final = re.compile(r"(?i)(?:bos|eos|pad|unk|sep|cls|mask|image)_token$")
SECRET_FORMS: Final = (
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),  # user:password@host
    re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abp]-|sk-|wandb_)[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]+"),  # JSON web token
    re.compile(r"(?i)(?<=bearer )[\w.~+/-]+"),
)
SECRET_FLAGS: Final = re.compile(rf"(?i)(--?[\w-]*{SECRET_ENDINGS}[ =]+)[^\s'\"]+")


def is_secret_name(name: str) -> bool:
    """Returns whether a field of this name holds a secret, such as `hf_token` or `api_key`."""
    return SECRET_NAMES.search(name) is not None and SPECIAL_TOKEN_NAMES.search(name) is None


def mask_secrets(value: Any, known: Collection[str] = ()) -> Any:
    """Returns a copy of a plain value with secrets masked. `known`: secrets found in the environment."""
    if isinstance(value, dict):
        return {
            mask_secrets(name, known): MASK
            if isinstance(x, str) and x and is_secret_name(str(name))
            else mask_secrets(x, known)
            for name, x in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_secrets(x, known) for x in value]
    if not isinstance(value, str):
        return value
    for secret in sorted(known, key=len, reverse=True):
        if len(secret) >= MIN_SECRET_LENGTH:
            value = value.replace(secret, MASK)
    for form in SECRET_FORMS:
        value = form.sub(MASK, value)
    return SECRET_FLAGS.sub(rf"\1{MASK}", value)
