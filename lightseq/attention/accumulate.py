"""Brings results home: parts of gradients add up, parts of the output merge, wherever they were computed."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightseq.attention.buffers import Bundle, Form
from lightseq.attention.passes import Place
from lightseq.attention.program import Parts, Taking
from lightseq.kernels import Launches, addresses, merge_into


class Home(ABC):
    """The final tensors of an item on its home rank, (B, S, N, D) and perhaps the lse (B, N, S).

    Memory is taken when the first part comes: until then a pass holds most of its operands. Parts that come at once are
    taken in where they will stay, others in float32 or wider.
    """

    def __init__(self, form: Form, device: torch.device, at_once: bool) -> None:
        self._form, self._device, self._at_once = form, device, at_once
        self.finals: Bundle = ()
        self._totals: Bundle = ()
        self._begun: set[Place] = set()

    def begin(self) -> None:
        """Nothing has been taken in."""
        self._begun.clear()

    def open(self) -> None:
        """To be called before parts are taken in, or finals written to, on the stream that they are later read on."""
        if not self._totals:
            dtype = self._form.dtype
            self._totals = self._form.whole(self._device, dtype if self._at_once else wide(dtype))
            self.finals = self._totals if self._at_once else ()

    @abstractmethod
    def take(self, taking: Taking, launches: Launches) -> None:
        """Takes in the parts."""

    def finish(self) -> None:
        """The final tensors hold everything that was taken in."""
        if not self._at_once:
            count = self._form.tensors  # what follows them is the lse
            self.finals = (*(x.to(self._form.dtype) for x in self._totals[:count]), *self._totals[count:])


class Sum(Home):
    """Gradients of tensors: parts add up."""

    def take(self, taking: Taking, launches: Launches) -> None:
        parts = taking.parts
        for fresh in (True, False):
            some = {place: bundles for place, bundles in parts.items() if (place not in self._begun) == fresh}
            if some:
                of_all = (Sum, addresses(self._totals), taking.key, tuple(some))
                launches.add(of_all, lambda some=some: self._lines(some), fresh)  # type: ignore[misc]
        self._begun |= parts.keys()

    def _lines(self, parts: Parts) -> tuple[list[Tensor], list[list[Tensor]]]:
        totals = [self._form.local(self._totals, start, 1, group) for start, group in parts]
        pieces = [[bundle[i] for bundle in bundles] for bundles in parts.values() for i in range(self._form.tensors)]
        return [x for total in totals for x in total], pieces


class Merge(Home):
    """The output and its lse: parts over different keys merge, if there are several."""

    def take(self, taking: Taking, launches: Launches) -> None:
        parts = taking.parts
        first = {place: bundles[:1] for place, bundles in parts.items() if place not in self._begun}
        if first:
            self._begin(first, taking, launches)
        for place, bundles in parts.items():
            for part, part_lse in bundles[place in first :]:
                out, lse = self._form.local(self._totals, place[0], 1, place[1])
                merge_into(out, lse, part, part_lse)
        self._begun |= parts.keys()

    def _begin(self, parts: Parts, taking: Taking, launches: Launches) -> None:
        """The first part of a place is taken as it is."""

        def pairs() -> list[tuple[Tensor, Tensor]]:
            homes = [
                (self._form.local(self._totals, start, 1, group), parts[start, group][0]) for start, group in parts
            ]
            return [pair for home, part in homes for pair in zip(home, part, strict=True)]

        if self._at_once:
            launches.copy((Merge, addresses(self._totals), taking.key, tuple(parts)), pairs)
        else:  # into float32
            for total, part in pairs():
                total.copy_(part)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What partial results add up in."""
    return torch.promote_types(dtype, torch.float32)
