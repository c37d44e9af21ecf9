"""The bits per byte that a model reaches, as a law that is fitted to measured runs."""

import dataclasses
import json
from importlib import resources
from pathlib import Path

RUNS = Path(str(resources.files("multilin") / "analysis" / "budget" / "runs.jsonl"))


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """One line of runs.jsonl: a run whose learning rate fell to 0 at its last token.

    text: a name of it. tokens: read in training, those that were read again included. flops_per_token: of training.
    parameters: outside the embeddings and the output projection. train_tokens, train_bytes: of the training text.
    trigram: see `TextMeasure`. bits_per_byte: of the model, on the validation text. commit: of multilin.
    """

    text: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    n_positions: int
    batch_size: int
    learning_rate: float
    tokens: int
    flops_per_token: float
    parameters: int
    train_tokens: int
    train_bytes: int
    trigram: float
    bits_per_byte: float
    commit: str


def load_runs(path: Path = RUNS) -> list[MeasuredRun]:
    """The measured runs of a file."""
    return [MeasuredRun(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
