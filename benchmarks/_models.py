"""What a model multiplies with."""

from torch import Tensor, nn


def multiplied(model: nn.Module) -> list[Tensor]:
    """The weights that multiply every token: not embeddings that are only looked up."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    in_products = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    matrices = {id(p): p for p in model.parameters() if p.ndim > 1}
    return [p for key, p in matrices.items() if key not in looked_up or key in in_products]
