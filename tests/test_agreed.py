"""What is kept between saves: as much as is bounded, and nothing of a communicator that is gone."""

import gc
import weakref

import torch

from megatron_uring import checkpoint
from megatron_uring.agreed import NOTHING, UNKNOWN, AgreedCache
from megatron_uring.comm import SingleCommunicator


def test_values_are_found_again_and_few_are_kept(world):
    cache = AgreedCache()
    assert cache.find(world, b"0", nothing=True) == (NOTHING, None)
    for number in range(5):
        digest = str(number).encode()
        assert cache.find(world, digest) == (UNKNOWN, None)
        assert cache.keep(world, digest, number) == number
        if number:
            assert cache.find(world, b"0") == (1, 0)  # used again and again: it stays
    assert [cache.find(world, str(n).encode())[1] for n in range(5)] == [0, None, 2, 3, 4]
    assert cache.find(SingleCommunicator(9.0, "test", "host"), b"0") == (UNKNOWN, None)


def test_saves_over_a_communicator_keep_nothing_of_it(tmp_path, posix):
    alone = SingleCommunicator(9.0, "test", "host")
    checkpoint.save({"a": torch.ones(3)}, tmp_path, config=posix, communicator=alone)
    gone = weakref.ref(alone)
    del alone
    gc.collect()
    assert gone() is None
