"""A stand-in for Transformer Engine's Float8Tensor with delayed scaling, which needs a GPU.

Guarantees
----------
- As there, the elements lie in tensors that the wrapper holds, the wrapper itself has no memory,
  ``dequantize`` gives values of its nominal dtype, and ``copy_`` into it quantizes.
- As there, quantizing notes the largest value in ``_quantizer.amax``; the scale is not changed.
"""

from __future__ import annotations

import torch


class Quantizer:
    """Scale, and the largest value that it has seen since the scale was chosen."""

    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor(scale)
        self.amax = torch.zeros(1)

    def quantize(self, values: torch.Tensor) -> torch.Tensor:
        """`values` as float8, noting the largest."""
        if values.numel():
            self.amax.copy_(torch.maximum(self.amax, values.abs().max().float()))
        return (values.float() * self.scale).to(torch.float8_e4m3fn)


class Quantized(torch.Tensor):
    """A tensor of a nominal dtype whose elements are float8."""

    @staticmethod
    def __new__(cls, data, quantizer, dtype):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device
        )

    def __init__(self, data, quantizer, dtype):
        self._data, self._quantizer = data, quantizer

    @classmethod
    def of(cls, values, scale=16.0):
        """`values`, quantized; nothing is noted yet."""
        quantizer = Quantizer(scale)
        made = cls(quantizer.quantize(values), quantizer, values.dtype)
        quantizer.amax.zero_()
        return made

    def dequantize(self):
        return (self._data.float() / self._quantizer.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        name = function.overloadpacket
        if name is torch.ops.aten.detach:
            own = arguments[0]
            return cls(own._data, own._quantizer, own.dtype)
        if name is torch.ops.aten.copy_ and isinstance(arguments[0], cls):
            target, values = arguments[:2]
            values = values.dequantize() if isinstance(values, cls) else values
            target._data.copy_(target._quantizer.quantize(values))
            return target
        plain = [one.dequantize() if isinstance(one, cls) else one for one in arguments]
        return function(*plain, **(keywords or {}))

    def __repr__(self):
        return f"Quantized({tuple(self.shape)}, {self.dtype})"
