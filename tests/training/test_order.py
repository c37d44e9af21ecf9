import torch
from torch.utils.data import default_collate

from multilin.training.order import BlockOrder

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
