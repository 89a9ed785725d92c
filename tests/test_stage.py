"""Staging: the engines that are kept, and what native code may write to in place."""

import numpy as np
import pytest
import torch

from megatron_uring import Config, StorageError, stage, tensors
from megatron_uring.providers import Shard, TensorProvider


def prepare(tensor, dtype=torch.float32):
    shape = tuple(tensor.shape)
    table, strides = tensors.describe(["k"], [tensor], [shape], [(0,) * len(shape)])
    code = np.array([tensors.DTYPE_CODE[dtype]], np.uint8)
    in_place = tensors.writable_in_place([tensor], table, strides) & (table.dtype == code)
    return stage.prepare_destinations([tensor], in_place, code, strides, table.ndim)


def test_one_engine_is_kept_for_each_set_of_options(config):
    assert stage.open_engine(config) is stage.open_engine(config)
    other = Config(**{**vars(config), "slab_count": 3})
    assert stage.open_engine(other) is not stage.open_engine(config)


def test_options_that_do_not_concern_the_engine_share_it(config):
    other = Config(**{**vars(config), "verify_first": True, "gap_bytes": 0})
    assert stage.open_engine(other) is stage.open_engine(config)


def test_the_engine_asked_for_is_the_one_that_runs(config):
    assert stage.open_engine(config).kind == config.engine
    assert any(text.startswith(f"{config.engine}: ") for text in stage.running_engines())


def test_slabs_that_cannot_be_had_are_a_storage_error_that_says_what_to_lower():
    greedy = Config(engine="posix", slab_bytes=1 << 30, slab_count=1 << 16)
    with pytest.raises(StorageError, match="MEGATRON_URING_SLAB_COUNT"):
        stage.open_engine(greedy)


def test_host_tensors_are_the_owned_ones_where_they_are():
    owned = [torch.arange(6).reshape(2, 3).t(), torch.ones(2), torch.ones(3)]
    provided = TensorProvider(
        (str(n), Shard(tensor, tuple(tensor.shape), (0,) * tensor.ndim, owner=n != 1))
        for n, tensor in enumerate(owned)
    ).collect()
    host = stage.host_tensors(provided)
    assert host.address.tolist() == [owned[0].data_ptr(), owned[2].data_ptr()]
    assert host.strides.tolist() == [[8, 24], [4, 0]]
    assert [tensor.data_ptr() for tensor in host.alive] == host.address.tolist()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4),
        torch.zeros(4, 3).t(),
        torch.zeros(40)[::5],
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(()),
        torch.zeros(1).expand(1),
    ],
)
def test_plain_destinations_are_written_in_place(tensor):
    destinations = prepare(tensor)
    assert tensors.addresses(destinations.written).tolist() == [tensor.data_ptr()]
    assert destinations.given[0] is destinations.written[0]


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        (torch.zeros(4, dtype=torch.bfloat16), torch.float32),
        (torch.zeros(4, dtype=torch.complex64).conj(), torch.complex64),
        (torch.zeros(4, dtype=torch.complex64).conj().imag, torch.float32),
        (torch.zeros(4).as_subclass(Subclass), torch.float32),
    ],
    ids=["dtype", "conj", "neg", "subclass"],
)
def test_other_destinations_are_written_through_a_scratch_tensor(tensor, dtype):
    destinations = prepare(tensor, dtype)
    scratch = destinations.written[0]
    assert scratch.data_ptr() != tensor.data_ptr()
    assert scratch.dtype == dtype and scratch.is_contiguous()
    scratch.copy_(torch.arange(4))
    assert not tensor.any()
    destinations.finish()
    assert torch.equal(tensor.resolve_conj().real.float(), torch.arange(4.0))


def test_a_scratch_tensor_starts_with_the_values_of_its_destination():
    tensor = torch.arange(4, dtype=torch.bfloat16)
    assert prepare(tensor).written[0].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("tensor", "shared"),
    [
        (torch.zeros(1).expand(4), True),
        (torch.zeros(3, 1).expand(3, 2), True),
        (torch.zeros(1, 3).expand(1, 3), False),
        (torch.zeros(3)[::2], False),
    ],
)
def test_expanded_tensors_are_told_from_others(tensor, shared):
    assert tensors.shares_elements(tensor) == shared


def test_objects_without_bytes_are_left_out():
    import numpy as np

    staged = stage.stage_objects([b"ab", b"", b"c"], np.array([64, 0, 0], np.int64))
    assert len(staged.pieces) == 2
    assert len(stage.stage_nothing().pieces) == 0
