"""Who has which bytes of a segment, as Mooncake's offset allocator hands them out.

Sizes fall into classes of three significant bits after the leading one (1000 bytes take 1024, 1025 take 1152). A free
run counts for the largest class it can hold, so one of 16 MiB + 123 bytes serves no request above 16 MiB.
"""

from __future__ import annotations

MANTISSA_BITS = 3
MAX_UNITS = 15 << 28
"""The largest class (3.75 Gi units); larger segments are counted in units of several bytes."""


def class_below(size: int) -> int:
    """Number of the largest class that is no larger than `size` (>= 1)."""
    shift = max(0, size.bit_length() - 1 - MANTISSA_BITS)
    mantissa = size >> shift
    # Small numbers are classes of their own, and the leading one of larger ones is implied.
    return mantissa if shift == 0 else (shift << MANTISSA_BITS) + mantissa


def class_size(number: int) -> int:
    """Size of a class."""
    shift = max(0, (number >> MANTISSA_BITS) - 1)
    return (number - (shift << MANTISSA_BITS)) << shift


def class_above(size: int) -> int:
    """Number of the smallest class that is no smaller than `size` (>= 1)."""
    below = class_below(size)
    return below if class_size(below) == size else below + 1


class Space:
    """The free and taken runs of one segment."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        """Bytes asked for and not given back; what they take is more."""
        self._unit = 1
        while capacity // self._unit > MAX_UNITS:
            self._unit *= 2
        self._free: dict[int, dict[int, int]] = {}
        """By class: offset and size of its free runs; the last one that came is taken first."""
        self._classes = 0
        """One bit a class that has free runs."""
        self._ends: dict[int, tuple[int, int]] = {}
        """Of each free run: its end, and its class and offset."""
        self._starts: dict[int, int] = {}
        """Of each free run: its offset, and its class."""
        self._taken: dict[int, int] = {}
        self._add(0, capacity // self._unit)

    @property
    def empty(self) -> bool:
        """Whether nothing lies in it."""
        return not self._taken

    def allocate(self, num_bytes: int) -> int | None:
        """Offset of a run, or None when no free run is large enough."""
        number = class_above(-(-num_bytes // self._unit))
        larger = self._classes >> number
        if not larger:
            return None
        number += (larger & -larger).bit_length() - 1
        wanted = class_size(class_above(-(-num_bytes // self._unit)))
        offset, size = next(reversed(self._free[number].items()))
        self._remove(number, offset)
        if size > wanted:
            self._add(offset + wanted, size - wanted)
        self._taken[offset] = wanted
        self.used += num_bytes
        return offset * self._unit

    def free(self, offset: int, num_bytes: int) -> None:
        """Give back the run at `offset`, that was asked for with `num_bytes`; it joins its free neighbours."""
        start = offset // self._unit
        size = self._taken.pop(start)
        self.used -= num_bytes
        if before := self._ends.get(start):
            number, first = before
            size += start - first
            start = first
            self._remove(number, first)
        if (after := self._starts.get(start + size)) is not None:
            neighbour = start + size
            size += self._free[after][neighbour]
            self._remove(after, neighbour)
        self._add(start, size)

    def _add(self, offset: int, size: int) -> None:
        number = class_below(size)
        self._free.setdefault(number, {})[offset] = size
        self._classes |= 1 << number
        self._starts[offset] = number
        self._ends[offset + size] = (number, offset)

    def _remove(self, number: int, offset: int) -> None:
        runs = self._free[number]
        size = runs.pop(offset)
        if not runs:
            self._classes &= ~(1 << number)
        del self._starts[offset], self._ends[offset + size]
