"""The mode of a model, training or evaluation, changed for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and into the mode it was in when the block ends, also by an error."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
