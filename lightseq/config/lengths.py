"""Token counts with units: 128K is 131,072."""

import argparse
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

UNITS: Final[Mapping[str, int]] = {"M": 2**20, "K": 2**10}
DECIMAL: Final = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?")
MAX_TOKENS: Final = 1 << 40


def parse_tokens(text: str, flag: str = "") -> int:
    """Parses 131072, 128K or 1.5M. Raises ValueError, with the flag's name, for anything else."""
    digits, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1)
    length = Fraction(digits) * unit if DECIMAL.fullmatch(digits) else Fraction(0)
    if unit > 1 and length > 1 and length.denominator > 1:
        raise ValueError(
            f"{flag} {text} is {float(length):,.1f} tokens, not a whole number; write {int(length)}".lstrip()
        )
    if length < 1 or length.denominator > 1:
        raise ValueError(f"{flag} {text:.80} is not a number of tokens; write it like 131072, 128K or 1.5M".lstrip())
    return _bounded(int(length), f"{flag} {text}".lstrip())


def _bounded(length: int, given: str) -> int:
    if length > MAX_TOKENS:
        raise ValueError(f"{given} is too long; give at most {MAX_TOKENS:,} tokens")
    return length


def length_flag(text: str) -> int:
    """Parses a length for argparse. Accepts numbers below 1, which `checks` refuses with a remedy."""
    try:
        if text[-1:].upper() not in UNITS and re.fullmatch(r"[+-]?[0-9]{1,20}", text):
            return _bounded(int(text), text)
        return parse_tokens(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def format_tokens(length: int) -> str:
    """Formats 131072 as 128K. A length that is not a multiple of 1,024 stays a plain number."""
    unit = next((unit for unit, size in UNITS.items() if length and length % size == 0), "")
    return f"{length // UNITS.get(unit, 1)}{unit}"
