"""Tensors as columns: what torch says of many tensors, gathered without an object for each.

Guarantees
----------
- Each fact (address, shape, strides, dtype) is read once for each tensor, by a C function mapped
  over all of them: about 2 microseconds a tensor in all, so that 200,000 take less than half a
  second.
- No element is copied but those of a tensor that has no plain storage of its own (`plain_tensor`).
- Leading dimensions that a tensor lacks are of size 1, with stride 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from megatron_uring.columns import (
    BoolArray,
    Int32Array,
    Int64Array,
    Uint8Array,
    Uint64Array,
    join,
)
from megatron_uring.errors import CheckpointError, StateMismatchError, UnsupportedError
from megatron_uring.layout import DTYPE_BYTES, DTYPE_NAMES, MAXIMUM_DIMENSIONS
from megatron_uring.shards import ShardTable

DTYPE_CODE = {
    getattr(torch, name): code for code, name in enumerate(DTYPE_NAMES) if hasattr(torch, name)
}
_UNKNOWN_DTYPE = 255
_CHUNK = 4096
_PLAIN_CLASSES = {torch.Tensor, torch.nn.Parameter}


def describe(
    keys: Sequence[str],
    tensors: Sequence[torch.Tensor],
    global_shapes: Sequence[Sequence[int]],
    offsets: Sequence[Sequence[int]],
    *,
    operation: str = "save",
) -> tuple[ShardTable, Int64Array]:
    """Columns over N tensors, each a piece of a global tensor; and byte strides, int64 [N, D].

    Raises
    ------
    StateMismatchError
        If shape, global shape and offset of one do not have fitting numbers of dimensions.
    UnsupportedError
        For a dtype that the format does not know.
    """
    count = len(keys)
    ndim = _lengths(keys, global_shapes, "global shape", operation)
    offset_ndim = _lengths(keys, offsets, "offset", operation)
    own_ndim, codes, shapes, strides = _measure(tensors)
    odd = (offset_ndim != ndim) | (own_ndim > ndim) | (ndim > MAXIMUM_DIMENSIONS)
    if odd.any():
        row = int(np.argmax(odd))
        raise StateMismatchError(
            f"{operation} tensor {keys[row]!r}",
            expected="a global shape and an offset of as many numbers, "
            f"{own_ndim[row]} to {MAXIMUM_DIMENSIONS} of them",
            found=f"global shape {tuple(global_shapes[row])}, offset {tuple(offsets[row])}",
            cause=f"the tensor has the shape {tuple(tensors[row].shape)}",
        )
    _check_dtypes(keys, tensors, codes, operation)
    width = int(ndim.max()) if count else 0
    whole, own = _filled(ndim, own_ndim, width)
    names, tensor = _number(keys)
    table = ShardTable(
        names,
        tensor,
        codes,
        ndim.astype(np.uint8),
        _spread(_flat(global_shapes), whole, 1),
        _spread(_flat(offsets), whole, 0),
        _spread(shapes, own, 1),
    )
    return table, _spread(strides, own, 0) * DTYPE_BYTES[codes][:, None]


def _lengths(
    keys: Sequence[str], rows: Sequence[Sequence[int]], name: str, operation: str
) -> Int64Array:
    """How many numbers each global shape or offset has, int64 [N]."""
    try:
        return np.fromiter(map(len, rows), np.int64, len(rows))
    except TypeError as error:
        (row, found), *_ = [(n, one) for n, one in enumerate(rows) if not hasattr(one, "__len__")]
        raise StateMismatchError(
            f"{operation} tensor {keys[row]!r}",
            expected=f"as its {name} a tuple with a number for each dimension",
            found=repr(found),
        ) from error


def _measure(
    tensors: Sequence[torch.Tensor],
) -> tuple[Int64Array, Uint8Array, Int64Array, Int64Array]:
    """Dimensions int64 [N] and dtype codes uint8 [N]; shapes and strides, row after row.

    A few thousand at a time: what one pass over them brought into the cache the next one finds
    there. Measured: half the time of passes over 100,000.
    """
    ndim, codes, shapes, strides = [], [], [], []
    for chunk in _chunks(tensors):
        ndim.append(np.fromiter(map(torch.Tensor.dim, chunk), np.int64, len(chunk)))
        dtypes = map(attrgetter("dtype"), chunk)
        codes.append(np.array([DTYPE_CODE.get(d, _UNKNOWN_DTYPE) for d in dtypes], np.uint8))
        shapes.append(_flat(map(attrgetter("shape"), chunk)))
        strides.append(_flat(map(torch.Tensor.stride, chunk)))
    return (
        join(ndim, np.int64),
        join(codes, np.uint8),
        join(shapes, np.int64),
        join(strides, np.int64),
    )


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    return (tensors[at : at + _CHUNK] for at in range(0, len(tensors), _CHUNK))


def _flat(rows: Iterable[Iterable[int]]) -> Int64Array:
    return np.fromiter(chain.from_iterable(rows), np.int64)


def _filled(ndim: Int64Array, own_ndim: Int64Array, width: int) -> tuple[BoolArray, BoolArray]:
    """Columns that hold dimensions of the global tensor, and those of the tensor, its last ones:
    bool [N, width] each.
    """
    dimension = np.arange(width)
    whole = dimension < ndim[:, None]
    return whole, whole & (dimension >= (ndim - own_ndim)[:, None])


def _spread(values: Int64Array, where: BoolArray, fill: int) -> Int64Array:
    """[N, D]: the values in order `where` it is true, `fill` elsewhere."""
    column = np.full(where.shape, fill, np.int64)
    column[where] = values
    return column


def _number(keys: Sequence[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    """Distinct keys in order of their first use, and the place of each of `keys` among them."""
    position = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    if len(position) == len(keys):
        return tuple(position), np.arange(len(keys), dtype=np.int32)
    numbers = np.fromiter(map(position.__getitem__, keys), np.int32, len(keys))
    return tuple(position), numbers


def byte_strides(tensors: Sequence[torch.Tensor], ndim: Uint8Array, width: int) -> Int64Array:
    """Strides of tensors in bytes, int64 [N, width], right-aligned to `ndim` dimensions of each
    row.
    """
    count = len(tensors)
    own_ndim = np.fromiter(map(torch.Tensor.dim, tensors), np.int64, count)
    _, own = _filled(ndim.astype(np.int64), own_ndim, width)
    item_bytes = np.fromiter(map(torch.Tensor.element_size, tensors), np.int64, count)
    return _spread(_flat(map(torch.Tensor.stride, tensors)), own, 0) * item_bytes[:, None]


def addresses(tensors: Sequence[torch.Tensor]) -> Uint64Array:
    """First byte of each tensor, uint64 [N]."""
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))


def on_host(tensors: Sequence[torch.Tensor]) -> BoolArray:
    """Which of them are in host memory, bool [N]."""
    return np.fromiter(map(attrgetter("is_cpu"), tensors), np.bool_, len(tensors))


def device_numbers(tensors: Sequence[torch.Tensor]) -> Int32Array:
    """Device of each tensor, int32 [N]; -1: the host."""
    return np.fromiter(map(torch.Tensor.get_device, tensors), np.int32, len(tensors))


def with_memory(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Those of any tensors whose elements lie at ``data_ptr()``."""
    if set(map(type, tensors)) <= _PLAIN_CLASSES:
        return tensors
    return [one for one in tensors if type(one) in _PLAIN_CLASSES or has_memory(one)]


# -------------------------------------------------------------------------------------------------
# plain storage


def plain_tensors(
    keys: Sequence[str], tensors: Sequence[torch.Tensor], owner: Sequence[bool]
) -> list[torch.Tensor]:
    """Each owned tensor as `plain_tensor` gives it; the others as they are."""
    if all(map(_all_plain, _chunks(list(compress(tensors, owner))))):
        return list(tensors)
    return [
        plain_tensor(key, tensor) if owned else tensor
        for key, tensor, owned in zip(keys, tensors, owner, strict=True)
    ]


def _all_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether nothing has to be done for any of them; looked at fact by fact, which is fast."""
    return (
        set(map(type, tensors)) <= _PLAIN_CLASSES
        and set(map(attrgetter("layout"), tensors)) <= {torch.strided}
        and not any(map(torch.Tensor.is_neg, tensors))
        and not any(map(torch.Tensor.is_conj, tensors))
        and not any(map(attrgetter("is_nested"), tensors))
        and not any(map(attrgetter("is_meta"), tensors))
        and all(tensor.data_ptr() or not tensor.numel() for tensor in tensors)
    )


def plain_tensor(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, or a plain strided one with the same values where it has no plain storage.

    Raises
    ------
    UnsupportedError
        For sparse, meta and nested tensors.
    """
    if is_quantized(tensor):
        tensor = tensor.dequantize()
    tensor = tensor.detach()
    if not has_memory(tensor):
        raise UnsupportedError(
            f"save tensor {key!r}",
            expected="a dense tensor with data",
            found=f"{tensor.layout} on {tensor.device}",
        )
    return tensor.resolve_conj().resolve_neg()


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether its class has values of higher precision to give and to take (Transformer Engine's
    Float8Tensor and its like).
    """
    # every tensor has a dequantize() that makes float32 of it; quantized classes have their own
    return type(tensor).dequantize is not torch.Tensor.dequantize


def overwrite(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values` into `target`, quantizing them where it is quantized; needs ``no_grad``.

    A quantizer with delayed scaling notes the largest value of all that it quantizes, in
    ``_quantizer.amax``. A load is no training step and must not leave a trace there: the note is
    put back, as Megatron does from 0.19 on.
    """
    if not is_quantized(target):
        target.detach().copy_(values)
        return
    amax = getattr(getattr(target, "_quantizer", None), "amax", None)
    kept = amax.detach().clone() if isinstance(amax, torch.Tensor) else None
    target.copy_(values)
    if kept is not None:
        amax.copy_(kept)  # type: ignore[union-attr]


def shape_of(key: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor; raises `UnsupportedError` for nested ones and those of lazy modules,
    which have none.
    """
    try:
        return tuple(tensor.shape)
    except RuntimeError as error:
        raise UnsupportedError(
            f"save tensor {key!r}",
            expected="a dense tensor with data",
            found=type(tensor).__name__,
            cause=str(error).partition(".")[0],
        ) from error


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements lie at ``data_ptr()``.

    Not so for sparse, meta and nested tensors, and for subclasses that wrap others (DTensor).
    """
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:  # what FakeTensor and its like answer
        return False


def shares_elements(tensor: torch.Tensor) -> bool:
    """Whether two elements may lie at one address (an expanded tensor)."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def writable_in_place(
    tensors: Sequence[torch.Tensor], table: ShardTable, strides: Int64Array
) -> BoolArray:
    """Which tensors native code may fill directly, but for their dtype: bool [N].

    `table` and `strides` are those of `describe`; a tensor with two elements at one address is not.
    """
    facts = [
        kind in _PLAIN_CLASSES
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_neg() or tensor.is_conj() or tensor.is_nested)
        for kind, tensor in zip(map(type, tensors), tensors, strict=True)
    ]
    shared: BoolArray = np.any((strides == 0) & (table.shape > 1), axis=1)
    return np.array(facts, np.bool_) & ~shared


def with_dimensions(key: str, tensor: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """`tensor`, or a view of it, with dimensions of size 1 at these `places`, ascending.

    Leading ones may be missing (`describe`), so that a tensor that lacks only these stays itself.

    Raises
    ------
    UnsupportedError
        For a subclass that lacks others: a view of it need not be one of its elements.
    """
    if list(places) == list(range(len(places))):
        return tensor
    if type(tensor) not in _PLAIN_CLASSES:
        raise UnsupportedError(
            f"read tensor {key!r}",
            expected="a plain tensor to read into, where an inner dimension is dropped",
            found=type(tensor).__name__,
        )
    view = tensor.detach()
    for place in places:
        view = view.unsqueeze(place)
    return view


# -------------------------------------------------------------------------------------------------
# dtypes


def _check_dtypes(
    keys: Sequence[str], tensors: Sequence[torch.Tensor], codes: Uint8Array, operation: str
) -> None:
    unknown = np.flatnonzero(codes == _UNKNOWN_DTYPE)
    if len(unknown):
        row = int(unknown[0])
        raise UnsupportedError(
            f"{operation} tensor {keys[row]!r}",
            expected=f"a dtype of {', '.join(DTYPE_NAMES)}",
            found=tensors[row].dtype,
        )


def torch_dtype(code: int) -> torch.dtype:
    """Dtype of an on-disk code; raises `UnsupportedError` where this torch lacks the dtype."""
    dtype = getattr(torch, DTYPE_NAMES[code], None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            "restore tensor", expected=f"a torch with {DTYPE_NAMES[code]}", found=torch.__version__
        )
    return dtype


def is_tensor(value: object) -> bool:
    """Whether `value` is a torch tensor."""
    return isinstance(value, torch.Tensor)


def new_tensor(code: int, shape: Sequence[int]) -> torch.Tensor:
    """An uninitialised tensor on the CPU of an on-disk dtype.

    Raises
    ------
    CheckpointError
        If there is no memory for it.
    """
    try:
        return torch.empty(list(shape), dtype=torch_dtype(code), device="cpu")
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise CheckpointError(
            "allocate tensor",
            expected=f"memory for shape {list(shape)} of {DTYPE_NAMES[code]}",
            cause=str(error).partition("\n")[0],
        ) from error
