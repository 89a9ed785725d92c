"""Who shares a subfile with whom."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_uring.aggregate import elect, gather


def shared(nodes, aggregators=1):
    return elect(
        np.array(nodes, np.int32),
        aggregation="shared",
        aggregators_per_node=aggregators,
        file_system="ext4",
    )


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 8))
def test_groups_partition_the_ranks_by_node_with_their_lowest_rank_as_aggregator(
    nodes, aggregators
):
    groups = shared(nodes, aggregators)
    members = [groups.members(group).tolist() for group in range(len(groups.aggregator))]
    assert sorted(rank for group in members for rank in group) == list(range(len(nodes)))
    assert all(len({nodes[rank] for rank in group}) == 1 for group in members)
    assert groups.aggregator.tolist() == [min(group) for group in members]
    assert groups.aggregator.tolist() == sorted(groups.aggregator.tolist())
    for node in set(nodes):
        sizes = [len(group) for group in members if nodes[group[0]] == node]
        assert len(sizes) == min(aggregators, nodes.count(node))
        assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_in_rank_mode_every_rank_is_its_own_aggregator(nodes):
    groups = elect(
        np.array(nodes, np.int32), aggregation="rank", aggregators_per_node=3, file_system="lustre"
    )
    assert groups.group_of_rank.tolist() == groups.aggregator.tolist() == list(range(len(nodes)))
    assert groups.group_of_rank.dtype == groups.aggregator.dtype == np.int32


def test_ranks_placed_round_robin_share_with_their_own_node():
    groups = shared([0, 1, 0, 1, 0])
    assert groups.group_of_rank.tolist() == [0, 1, 0, 1, 0]
    assert groups.aggregator.tolist() == [0, 1]


def test_unequal_nodes_and_more_aggregators_than_ranks():
    groups = shared([0, 1, 1, 1, 1], aggregators=2)
    assert groups.group_of_rank.tolist() == [0, 1, 1, 2, 2]
    assert groups.aggregator.tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("file_system", "mode"),
    [("lustre", "shared"), ("gpfs", "shared"), ("ext4", "rank"), ("unknown", "rank")],
)
def test_auto_chooses_by_file_system_and_says_why(file_system, mode):
    groups = elect(
        np.zeros(4, np.int32), aggregation="auto", aggregators_per_node=1, file_system=file_system
    )
    assert groups.mode == mode
    assert file_system in groups.reason


def test_a_wish_wins_over_the_file_system():
    groups = elect(
        np.zeros(2, np.int32), aggregation="rank", aggregators_per_node=1, file_system="lustre"
    )
    assert (groups.mode, groups.reason) == ("rank", "asked for")


def test_gather_leaves_out_ranks_without_rows(world):
    assert gather(world, b"rows") == [b"rows"]
    assert gather(world, None) == []
