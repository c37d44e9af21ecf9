"""The rule that picks a model for a text and a number of operations."""

import dataclasses
from typing import Any

from multilin.analysis.compare.sweep import builtin_sweep, merge, nested

N_POSITIONS, BATCH_SIZE = 256, 4  # blocks of these tokens, in every measured run
WARMUP_SHARE, LONGEST_WARMUP = 0.04, 100


@dataclasses.dataclass(frozen=True)
class Size:
    """What the rule picks."""

    hidden_size: int
    num_layers: int
    vocab_size: int


def recipe_values(architecture: str, size: Size, steps: float) -> dict[str, Any]:
    """The recipe of a run of about so many steps: dotted fields to values.

    Options, optimizer and learning rate of the architecture are those of `multilin compare`, which were found alike.
    """
    sweep = builtin_sweep()
    row = nested(sweep.rows.get(architecture) or {}, f"rows.{architecture}")
    values = merge(merge({"model": {"architecture": architecture}}, nested(sweep.base, "base")), row)
    return {
        "model.architecture": architecture,
        "model.hidden_size": size.hidden_size,
        "model.num_layers": size.num_layers,
        "model.n_positions": N_POSITIONS,
        "model.options": values["model"].get("options", {}),
        "model.config": values["model"].get("config", {}),
        "tokenizer.kind": "bpe",
        "tokenizer.vocab_size": size.vocab_size,
        **{f"optimizer.{name}": value for name, value in values["optimizer"].items()},
        "schedule.name": "linear",
        "schedule.warmup_steps": round(min(LONGEST_WARMUP, WARMUP_SHARE * steps)),
        "training.batch_size": BATCH_SIZE,
    }
