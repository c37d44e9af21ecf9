"""The order of blocks: each pass holds every block once, and each window of a mixture each text by its weight."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset, default_collate

from multilin.data.prepared import MixedBlocks
from multilin.data.settings import ShardSettings
from multilin.data.sharding import prepare_shards
from multilin.training.loop import train
from multilin.training.order import WINDOW, BlockOrder, MixedOrder, shares
from tests.training.conftest import Stopped, Tiny, assert_same_run

BLOCKS = [{"input_ids": torch.tensor([n, n + 1]), "extra": torch.tensor(n)} for n in range(7)]


def order(seed: int = 1, length: int = 30) -> BlockOrder:
    return BlockOrder(BLOCKS, seed=seed, length=length, fields=["input_ids"])


def test_each_pass_reads_every_block_once_in_a_new_order() -> None:
    indices = [order().block_index(position) for position in range(28)]
    passes = [indices[start : start + 7] for start in range(0, 28, 7)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert len({tuple(one) for one in passes}) == 4


def test_a_position_holds_the_same_block_whatever_was_read_before() -> None:
    straight, resumed = order(), order()
    expected = [straight.block_index(position) for position in range(30)]
    assert [resumed.block_index(position) for position in range(20, 30)] == expected[20:]
    assert resumed.block_index(0) == expected[0]
    assert [order(seed=2).block_index(position) for position in range(30)] != expected


def test_batches_hold_the_fields_the_model_reads() -> None:
    batch = default_collate([order()[position] for position in range(5)])
    assert list(batch) == ["input_ids"]
    assert batch["input_ids"].shape == (5, 2)
    assert len(order()) == 30


def test_describe_names_the_blocks() -> None:
    assert order().describe(3, 4) == f"block {order().block_index(3)} of the training text"
    assert order().describe(0, 20).endswith(", ... of the training text")


def mixed(sizes: list[int], weights: list[float], seed: int = 0) -> MixedOrder:
    return MixedOrder(MixedBlocks([_blocks(size) for size in sizes], weights), seed=seed, length=10**6, fields=())


def _blocks(size: int) -> torch.utils.data.ConcatDataset:  # type: ignore[type-arg]
    return torch.utils.data.ConcatDataset([TensorDataset(torch.arange(size))])


@settings(deadline=None, max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
    window=st.integers(0, 50),
)
def test_every_window_holds_each_text_by_its_weight(
    sizes: list[int], data: st.DataObject, seed: int, window: int
) -> None:
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=len(sizes), max_size=len(sizes)))
    order, ends = mixed(sizes, weights, seed), np.cumsum(sizes)
    total = int(shares(weights, WINDOW).sum())
    positions = range(window * total, (window + 1) * total)
    found = [order.block_index(position) for position in positions]
    counts = Counter(np.searchsorted(ends, found, side="right").tolist())
    for text, weight in enumerate(weights):
        exact = weight / sum(weights) * WINDOW
        assert abs(counts[text] - exact) <= 1 or counts[text] == 1
    again = mixed(sizes, weights, seed)
    assert [again.block_index(position) for position in reversed(positions)] == found[::-1]


def test_the_blocks_of_a_text_come_in_its_own_order() -> None:
    sizes, weights = [700, 40], [3.0, 1.0]
    order = mixed(sizes, weights, seed=3)
    found = [order.block_index(position) for position in range(4 * WINDOW)]
    for offset, size, blocks in ((0, 700, _blocks(700)), (700, 40, _blocks(40))):
        own = BlockOrder(blocks, seed=3, length=10**6, fields=())
        mine = [index - offset for index in found if 0 <= index - offset < size]
        assert mine == [own.block_index(position) for position in range(len(mine))]


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_run_on_shards_stops_and_goes_on_exactly(
    tiny: Tiny, text_file: Path, tmp_path: Path, is_mixed: bool, stopped: Stopped
) -> None:
    prepared = tmp_path / "prepared"
    prepare_shards(ShardSettings(str(text_file), str(prepared), kind="byte", validation_fraction=0.2))
    changes = (
        {"data.mix": {str(prepared): 2.0, f"file://{prepared}": 1.0}} if is_mixed else {"data.source": str(prepared)}
    )
    whole = train(tiny(tmp_path / "whole", **changes))
    train(stopped(tiny(tmp_path / "stopped", **changes), 6), resume=True)
    assert_same_run(tmp_path / "stopped", whole.output)
