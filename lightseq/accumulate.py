"""Brings results home: parts of gradients add up, parts of the output merge, wherever they were computed."""

from collections.abc import Mapping
from typing import Protocol

import torch

from lightseq.bundles import Bundle, Form
from lightseq.kernels import add_into, merge_into
from lightseq.program import Place


class Home(Protocol):
    """The final tensors of an item on its home rank, (B, S, N, D) and perhaps the lse (B, N, S)."""

    finals: Bundle

    def take(self, parts: Mapping[Place, list[Bundle]]) -> None:
        """Takes in the parts, of each place in order."""
        ...

    def finish(self) -> None:
        """The final tensors hold everything that was taken in."""
        ...


class Sum:
    """Gradients: parts add up in float32 or wider, without memory of its own where all come at once."""

    def __init__(self, form: Form, finals: Bundle, at_once: bool) -> None:
        self.finals = finals
        self._form = form
        self._totals = finals if at_once else tuple(x.new_empty(x.shape, dtype=wide(x.dtype)) for x in finals)
        self._begun: set[Place] = set()

    def take(self, parts: Mapping[Place, list[Bundle]]) -> None:
        for fresh in (True, False):
            places = [place for place in parts if (place not in self._begun) == fresh]
            totals = [self._form.local(self._totals, start, 1, group) for start, group in places]
            if places:
                into = [x for total in totals for x in total]
                add_into(into, [[p[i] for p in parts[at]] for at in places for i in range(len(self.finals))], fresh)
        self._begun |= parts.keys()

    def finish(self) -> None:
        if self._totals is not self.finals:
            for final, total in zip(self.finals, self._totals, strict=True):
                final.copy_(total)


class Merge:
    """The output and its lse: parts over different keys merge in float32 or wider, if there are several."""

    def __init__(self, form: Form, finals: Bundle, at_once: bool) -> None:
        self.finals = finals
        self._form = form
        out, lse = finals
        self._totals = finals if at_once else (out.new_empty(out.shape, dtype=wide(out.dtype)), lse)
        self._begun: set[Place] = set()

    def take(self, parts: Mapping[Place, list[Bundle]]) -> None:
        fresh = [place for place in parts if place not in self._begun]
        homes = {place: self._form.local(self._totals, place[0], 1, place[1]) for place in parts}
        for i in range(2 if fresh else 0):  # the first part of a place is taken as it is
            add_into([homes[place][i] for place in fresh], [[parts[place][0][i]] for place in fresh], fresh=True)
        for place, bundles in parts.items():
            out_home, lse_home = homes[place]
            for part, part_lse in bundles[place in fresh :]:
                merge_into(out_home, lse_home, part, part_lse)
        self._begun |= parts.keys()

    def finish(self) -> None:
        if self._totals is not self.finals:
            self.finals[0].copy_(self._totals[0])


def wide(dtype: torch.dtype) -> torch.dtype:
    """What partial results add up in."""
    return torch.promote_types(dtype, torch.float32)
