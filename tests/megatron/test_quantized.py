"""Tensors that are kept quantized: saved as the values they stand for, filled by quantizing."""

import pytest
import torch
from quantized import Quantized

import megatron_uring
from megatron_uring import UnsupportedError

VALUES = torch.linspace(-3, 3, 7 * 5).reshape(7, 5).to(torch.bfloat16)


def test_what_is_saved_are_the_values_in_the_nominal_dtype(save, tmp_path, bytes_of):
    quantized = Quantized.of(VALUES)
    save({"w": quantized}, tmp_path)
    found = megatron_uring.restore(tmp_path)["w"]
    assert type(found) is torch.Tensor and found.dtype == torch.bfloat16
    assert bytes_of(found) == bytes_of(quantized.dequantize())


@pytest.mark.parametrize("parameter", [False, True])
def test_a_load_quantizes_in_place_and_leaves_the_noted_maximum_alone(
    save, tmp_path, bytes_of, parameter
):
    save({"w": VALUES}, tmp_path)
    target = Quantized.of(torch.zeros_like(VALUES))
    target._quantizer.amax.fill_(0.25)
    data, amax = target._data, target._quantizer.amax
    if parameter:
        target = torch.nn.Parameter(target)
        data, amax = target._data, target._quantizer.amax
    megatron_uring.restore(tmp_path, {"w": target})
    assert target._data is data and target._quantizer.amax is amax
    assert bytes_of(data.view(torch.uint8)) == bytes_of(
        Quantized.of(VALUES)._data.view(torch.uint8)
    )
    assert amax.item() == 0.25


def test_a_part_of_a_quantized_tensor_is_filled_and_the_rest_of_it_kept(save, tmp_path):
    shard = megatron_uring.Shard(VALUES[2:5], (7, 5), (2, 0))
    save({"w": megatron_uring.Shard(VALUES, (7, 5), (0, 0))}, tmp_path)
    target = Quantized.of(torch.zeros_like(shard.tensor))
    megatron_uring.restore(tmp_path, {"w": megatron_uring.Shard(target, (7, 5), (2, 0))})
    assert torch.equal(target.dequantize(), Quantized.of(VALUES[2:5]).dequantize())


def test_one_without_elements_is_filled(save, tmp_path):
    save({"w": torch.zeros(0, 5)}, tmp_path)
    megatron_uring.restore(tmp_path, {"w": Quantized.of(torch.zeros(0, 5))})


@pytest.mark.parametrize(
    "target",
    [torch.zeros(7, 5).to_sparse(), torch.zeros(7, 5, device="meta")],
    ids=["sparse", "meta"],
)
def test_a_destination_without_memory_is_refused(save, tmp_path, target):
    save({"w": torch.zeros(7, 5)}, tmp_path)
    with pytest.raises(UnsupportedError, match="'w'"):
        megatron_uring.restore(tmp_path, {"w": target})
