"""``Reduction``: the exchange of arrays over links, in one hop or two. ``World`` turns its errors into public ones.

The *place* of a member is its index in the world, in the order of the members' numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, final

import numpy as np

from replicax._src.collectives.host_sums.exchange import Content, Exchange, head_of
from replicax._src.collectives.host_sums.links import Links
from replicax._src.collectives.host_sums.ordered_addition import combine
from replicax._src.collectives.host_sums.windows import WINDOW_BYTES, Window, part_bytes, windows_of
from replicax._src.wire.buffers import Buffers, aligned_empty

_NUM_SLOTS: Final = 3
"""The windows that lie in shared memory at a time: one is sent ahead, one is added, and others still read one."""
_IN_HEAD_BYTES: Final = 32 * 1024
"""The most bytes of a member that travel in the head of its frame."""
_WHOLE_BYTES: Final = 32 * 1024
_WHOLE_BYTES_OF_TWO: Final = 512 * 1024
"""The most bytes of a member that it sends to all others whole, in one hop, which takes less time up to here. Two
members send as many bytes in one hop as in two.
"""
_NUM_WHOLE: Final = 2
"""The whole arrays of a member that lie in shared memory at a time: one is written while others still read one. It is
written again two exchanges later, when all have answered the one between.
"""
_NOTHING: Final = memoryview(b"")


def shared_bytes(num_replicas: int, num_members: int) -> int:
    """Returns the bytes that a member with so many replicas shares with others of its host."""
    in_windows = _NUM_SLOTS * (num_replicas * WINDOW_BYTES + part_bytes(num_members))
    return in_windows + _NUM_WHOLE * _most_whole(num_members)


def _most_whole(num_members: int) -> int:
    return _WHOLE_BYTES_OF_TWO if num_members == 2 else _WHOLE_BYTES


@final
class Reduction:
    """Combines arrays, one exchange after the other, and reuses its memory. One thread uses it.

    Args:
      links: The links with the other members, by place.
      place: The place of this process.
      replicas: The numbers of the replicas of each member, by place.
      memory: The memory of this process that others of its host read; None if none does.
    """

    def __init__(
        self, links: Links, place: int, replicas: Sequence[Sequence[int]], memory: np.ndarray | None
    ):
        self.links, self.place, self.memory = links, place, memory
        self.num_replicas = [len(held) for held in replicas]
        holders = {
            replica: (holder, index)
            for holder, held in enumerate(replicas)
            for index, replica in enumerate(held)
        }
        self.holders = [holders[replica] for replica in sorted(holders)]
        self.buffers = Buffers()
        self._num_whole = 0
        self._received: dict[int, np.ndarray] = {}

    def all_reduce(self, exchange: Exchange, arrays: Sequence[np.ndarray], deadline: float) -> np.ndarray:
        """Returns the combination [n] of the arrays [n] of all replicas.

        Args:
          exchange: The exchange.
          arrays: Those of this process's replicas, in the order of the replicas' numbers.
          deadline: The deadline on the clock of ``time.monotonic``.

        Raises:
          LinkLost: A member is lost, or did not take part in time.
          OtherExchange: A member exchanges something else.
        """
        num_bytes = arrays[0].nbytes
        most_bytes = num_bytes * max(self.num_replicas)  # the same on all members
        if len(self.num_replicas) == 1 or most_bytes <= _IN_HEAD_BYTES:
            return self._of_heads(exchange, arrays, deadline)
        memory = self.buffers.take(num_bytes)[:num_bytes]
        result = self.buffers.lend(memory).view(exchange.dtype)
        run = _Run(self, exchange, arrays, memory.view(exchange.dtype), result, deadline)
        if most_bytes <= _most_whole(len(self.num_replicas)):
            self._num_whole += 1
            run.one_hop(self._num_whole % _NUM_WHOLE)
        else:
            run.two_hops()
        return result

    def _of_heads(self, exchange: Exchange, arrays: Sequence[np.ndarray], deadline: float) -> np.ndarray:
        """Sends this member's small arrays to all others, in the heads of frames, and combines all. Steps of small
        models spend most of their exchanges here.
        """
        links, dtype, length = self.links, exchange.dtype, len(arrays[0])
        head = head_of(exchange.packed(), Content.WHOLE)
        frame = b"".join([head, *(array.tobytes() for array in arrays)])
        for place, _ in links.items():
            links.send(place, frame, (), deadline)
        of_members: list[Sequence[np.ndarray]] = [arrays] * len(self.num_replicas)
        for place, _ in links.items():
            content = np.frombuffer(links.receive(place, head, _NOTHING, deadline), dtype)
            of_members[place] = list(content.reshape(self.num_replicas[place], length))
        result = aligned_empty(length * dtype.itemsize).view(dtype)
        combine(exchange.op, [of_members[place][index] for place, index in self.holders], result)
        result.flags.writeable = False
        return result

    def received(self, place: int, num_bytes: int) -> np.ndarray:
        """Returns memory for slices that a member sends. It keeps them until the next call for the member."""
        memory = self._received.get(place)
        if memory is None or len(memory) < num_bytes:
            memory = self._received[place] = np.empty(num_bytes, np.uint8)
        return memory[:num_bytes]


@final
class _Run:
    """One exchange. ``target`` and ``result`` are the same memory, to write and to hand out."""

    def __init__(
        self,
        reduction: Reduction,
        exchange: Exchange,
        arrays: Sequence[np.ndarray],
        target: np.ndarray,
        result: np.ndarray,
        deadline: float,
    ):
        self._reduction, self._links = reduction, reduction.links
        self._op, self._dtype, self._packed = exchange.op, exchange.dtype, exchange.packed()
        self._arrays, self._target, self._result = arrays, target, result
        self._deadline = deadline
        self._num_members = len(reduction.num_replicas)

    def one_hop(self, slot: int) -> None:
        """Hands this member's arrays to all others, in shared memory or as bodies of frames, and combines all."""
        head, links, arrays = head_of(self._packed, Content.WHOLE), self._links.items(), self._arrays
        if any(link.is_read for _, link in links):
            for shared, array in zip(self._whole(self._reduction.memory, self._own, slot), arrays):
                shared[...] = array
        for place, link in links:
            body = () if link.is_read else [_bytes_of(array) for array in arrays]
            self._links.send(place, head, body, self._deadline)
        whole: dict[int, Sequence[np.ndarray]] = {self._own: arrays}
        for place, link in links:
            if link.memory is not None:
                self._links.receive(place, head, _NOTHING, self._deadline)
                whole[place] = self._whole(link.memory, place, slot)
            else:
                whole[place] = self._received(place, head, len(self._target))
        self._combine(whole, self._target)

    def two_hops(self) -> None:
        """Combines this member's part of each window. Slices are sent one window ahead, and sums are taken one late,
        so that no member waits for the answer to what it has just sent.
        """
        windows = windows_of(len(self._target), self._dtype.itemsize, self._num_members)
        self._send_slices(windows[0])
        for window in windows:
            if window.index + 1 < len(windows):
                self._send_slices(windows[window.index + 1])
            self._combine_part(window)
            if window.index:
                self._take_sums(windows[window.index - 1])
        self._take_sums(windows[-1])

    def _send_slices(self, window: Window) -> None:
        """Hands each other member the slices that it combines."""
        head = head_of(self._packed, Content.SLICES, window.index)
        for place, link in self._links.items():
            part = window.parts[place]
            if link.is_read:
                memory = self._reduction.memory
                for shared, array in zip(self._slices(memory, self._own, window, part), self._arrays):
                    shared[...] = array[part]
                self._links.send(place, head, (), self._deadline)
            else:
                body = [_bytes_of(array[part]) for array in self._arrays]
                self._links.send(place, head, body, self._deadline)

    def _combine_part(self, window: Window) -> None:
        """Combines this member's part, and hands it to all."""
        own_part = window.parts[self._own]
        head = head_of(self._packed, Content.SLICES, window.index)
        slices: dict[int, Sequence[np.ndarray]] = {self._own: [array[own_part] for array in self._arrays]}
        for place, link in self._links.items():
            if link.memory is not None:
                self._links.receive(place, head, _NOTHING, self._deadline)
                slices[place] = self._slices(link.memory, place, window, own_part)
                continue
            slices[place] = self._received(place, head, own_part.stop - own_part.start)
        self._combine(slices, self._target[own_part])
        head = head_of(self._packed, Content.RESULT, window.index)
        links = self._links.items()
        if any(link.is_read for _, link in links):
            self._sum_of(self._reduction.memory, self._own, window)[...] = self._result[own_part]
        for place, link in links:
            body = () if link.is_read else (_bytes_of(self._result[own_part]),)
            self._links.send(place, head, body, self._deadline)

    def _take_sums(self, window: Window) -> None:
        """Takes the parts that the others have combined."""
        head = head_of(self._packed, Content.RESULT, window.index)
        for place, link in self._links.items():
            part = window.parts[place]
            if link.memory is None:
                self._links.receive(place, head, _bytes_of(self._target[part]), self._deadline)
            else:
                self._links.receive(place, head, _NOTHING, self._deadline)
                self._target[part] = self._sum_of(link.memory, place, window)

    def _received(self, place: int, head: bytes, length: int) -> list[np.ndarray]:
        """Waits for an array of each replica of a member, in the body of a frame."""
        num_replicas = self._reduction.num_replicas[place]
        memory = self._reduction.received(place, num_replicas * length * self._dtype.itemsize)
        self._links.receive(place, head, memory.data, self._deadline)
        return list(memory.view(self._dtype).reshape(num_replicas, length))

    def _combine(self, arrays: Mapping[int, Sequence[np.ndarray]], target: np.ndarray) -> None:
        """Combines the arrays of the replicas of each member, given by place."""
        combine(self._op, [arrays[place][index] for place, index in self._reduction.holders], target)

    @property
    def _own(self) -> int:
        return self._reduction.place

    def _slices(self, memory: np.ndarray | None, place: int, window: Window, part: slice) -> list[np.ndarray]:
        """Returns the slices of each replica of a member in its shared memory."""
        assert memory is not None
        item_bytes, num_replicas = self._dtype.itemsize, self._reduction.num_replicas[place]
        first = (window.index % _NUM_SLOTS) * num_replicas * WINDOW_BYTES
        first += (part.start - window.start) * item_bytes
        num_bytes = (part.stop - part.start) * item_bytes
        starts = range(first, first + num_replicas * WINDOW_BYTES, WINDOW_BYTES)
        return [memory[start : start + num_bytes].view(self._dtype) for start in starts]

    def _whole(self, memory: np.ndarray | None, place: int, slot: int) -> list[np.ndarray]:
        """Returns the whole array of each replica of a member in its shared memory."""
        assert memory is not None
        num_replicas, num_bytes = self._reduction.num_replicas[place], self._target.nbytes
        start = len(memory) - (slot + 1) * _most_whole(self._num_members)
        part = memory[start : start + num_replicas * num_bytes]
        return list(part.view(self._dtype).reshape(num_replicas, -1))

    def _sum_of(self, memory: np.ndarray | None, place: int, window: Window) -> np.ndarray:
        """Returns the part that a member has combined, in its shared memory."""
        assert memory is not None
        start = _NUM_SLOTS * self._reduction.num_replicas[place] * WINDOW_BYTES
        start += (window.index % _NUM_SLOTS) * part_bytes(self._num_members)
        part = window.parts[place]
        num_bytes = (part.stop - part.start) * self._dtype.itemsize
        return memory[start : start + num_bytes].view(self._dtype)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data
