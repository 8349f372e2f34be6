"""Steps recorded once for each bucket of shapes and replayed: on a GPU, CUDA graphs.

A step of a small model is hundreds of launches that cost more than their work. A recording is
launched at once, but is fixed: to addresses, shapes and the path taken through the code. So inputs
are copied into buffers that belong to the recording, shapes are rounded up to buckets, and whatever
chooses a path is part of the key. An axis that is empty stays empty, so a step without layer detail
is a recording without that part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

#: The names of a tensor's leading axes; axes that go by one name have one size.
Axes = Mapping[str, tuple[str, ...]]


class Key(NamedTuple):
    """What a recording is good for: the bucket of each axis, and the `condition` of its path."""

    buckets: tuple[tuple[str, int], ...]
    condition: Hashable


class Recorder(Protocol):
    """Records what a function does with tensors."""

    def record(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Return a replay of `run` and the tensors that each replay fills.

        `run` may be called more than once, and need not have taken effect before the first replay.
        """
        ...


class CudaRecorder:
    """CUDA graphs. All share one memory pool: what a replay returns lasts until the next of any."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Warm up on a side stream (kernels compile, libraries take their workspaces), then capture."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = run()
        return graph.replay, outputs


def bucket(size: int) -> int:
    """Round up to 0, a power of two or three quarters of one: at most half as much again."""
    if size <= 2:
        return size
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if size <= power * 3 // 4 else power


@dataclass(frozen=True, slots=True)
class _Recording:
    inputs: Tensors
    outputs: Tensors
    replay: Callable[[], None]


class Graphs:
    """A step function through recordings, the least recently used of which make room for new ones.

    `run(inputs, condition)` computes outputs from inputs; it must depend on nothing else that changes
    but the contents of tensors that stay where they are (weights, KV pages). `inputs` and `outputs`
    name each tensor's leading axes. Rows that pad an axis repeat its first entry: they compute what
    that entry computes and write what it writes, so `run` must treat equal rows equally.

    Invariant: at most `bound` recordings exist. Raises ValueError unless `bound` is positive.
    """

    def __init__(
        self,
        run: Callable[[Tensors, Hashable], Tensors],
        recorder: Recorder,
        *,
        inputs: Axes,
        outputs: Axes,
        bound: int = 32,
    ) -> None:
        if bound < 1:
            raise ValueError(f"the bound is {bound}; there must be room for at least one recording")
        self._run = run
        self._recorder = recorder
        self._inputs = inputs
        self._outputs = outputs
        self._bound = bound
        self._recordings: OrderedDict[Key, _Recording] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recordings)

    def __contains__(self, key: Key) -> bool:
        return key in self._recordings

    def key(self, inputs: Tensors, condition: Hashable = None) -> Key:
        """The key of these inputs. Raises ValueError where axes of one name differ in size."""
        sizes = self._sizes(inputs)
        return Key(tuple(sorted((name, bucket(size)) for name, size in sizes.items())), condition)

    def __call__(self, inputs: Tensors, condition: Hashable = None) -> Tensors:
        """Return the outputs for `inputs`, recording first where no recording fits. The caller owns them."""
        sizes = self._sizes(inputs)
        key = self.key(inputs, condition)
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._record(key, inputs)
        else:
            self._recordings.move_to_end(key)
            for name, tensor in inputs.items():
                _fill(recording.inputs[name], tensor)
        recording.replay()
        return {
            name: _cut(tensor, [sizes[axis] for axis in self._outputs[name]]).clone()
            for name, tensor in recording.outputs.items()
        }

    def _record(self, key: Key, inputs: Tensors) -> _Recording:
        """Make room, then record at the sizes of `key` with these inputs in place."""
        while len(self._recordings) >= self._bound:
            self._recordings.popitem(last=False)
        buckets = dict(key.buckets)
        held = {}
        for name, tensor in inputs.items():
            axes = self._inputs[name]
            shape = [buckets[axis] for axis in axes] + list(tensor.shape[len(axes) :])
            held[name] = tensor.new_empty(shape)
            _fill(held[name], tensor)
        replay, outputs = self._recorder.record(lambda: self._run(held, key.condition))
        recording = self._recordings[key] = _Recording(held, outputs, replay)
        return recording

    def _sizes(self, inputs: Tensors) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, tensor in inputs.items():
            for axis, size in zip(self._inputs[name], tensor.shape, strict=False):
                if sizes.setdefault(axis, size) != size:
                    raise ValueError(f"{name} has {size} along {axis}, others have {sizes[axis]}")
        return sizes


def _cut(tensor: Tensor, sizes: list[int]) -> Tensor:
    """The leading corner of `tensor` with these sizes of its first axes."""
    return tensor[tuple(slice(size) for size in sizes)]


def _fill(buffer: Tensor, values: Tensor) -> None:
    """Copy `values` to the leading corner of `buffer` and repeat its first entries along the rest."""
    if values.numel() == 0:
        return
    _cut(buffer, list(values.shape)).copy_(values)
    for axis, size in enumerate(values.shape):
        rest = buffer.shape[axis] - size
        if rest:
            buffer.narrow(axis, size, rest).copy_(buffer.narrow(axis, 0, 1))
