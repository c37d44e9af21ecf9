"""What a model with the layer can do: learn, be exported and compiled, read packed and padded texts."""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from multilin.errors import InputError
from multilin.model import MultilinForCausalLM
from multilin.testing.laws import Finding, brief

MakeModel = Callable[[], MultilinForCausalLM]
TASKS = {"64 tokens by heart": 0.1, "to copy the token before": 0.5}
"""Tasks, and the loss that solves them; chance is 2.6 and 1.4."""


def learns(make_model: MakeModel, seconds: float = 8.0) -> Finding:
    """Whether a small model learns 64 tokens by heart, and to name the token before the current one."""
    results = {task: _train(make_model(), task, seconds / 2) for task in TASKS}
    told = "; ".join(f"{task}: loss {loss:.2f} after {steps} steps" for task, (loss, steps) in results.items())
    if failed := [task for task, (loss, _) in results.items() if not loss < TASKS[task]]:
        what = f"It does not learn {' or '.join(failed)} in {seconds / 2:.0f} s or 500 steps ({told})"
        cause = "vanishing gradients, a scale that is too small, or no way to tell which token came before"
        return Finding("learns", "warning", f"{what}. Likely cause: {cause}.")
    return Finding("learns", "ok", f"It learns {told}.")


def _train(model: MultilinForCausalLM, task: str, seconds: float) -> tuple[float, int]:
    """The last loss and the number of steps."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
    end, draw = time.perf_counter() + seconds, torch.Generator().manual_seed(2)
    ids = torch.randint(2, 16, (1, 65), generator=draw)
    given, targets = ids[:, :-1], ids[:, 1:]
    for step in range(501):
        if "copy" in task:
            given = torch.randint(2, 6, (16, 12), generator=draw)
            targets = given[:, :-1]
        logits = model(given, use_cache=False).logits[:, given.shape[1] - targets.shape[1] :]
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        if loss < TASKS[task] or time.perf_counter() > end:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach()), step


@torch.no_grad()
def exports(make_model: MakeModel) -> Finding:
    """Whether `multilin export` will work."""
    try:
        from multilin.export.graph import make_graph
        from multilin.inference.snapshot import state_tensors
        from multilin.inference.state_file import GROWS

        model = make_model().eval()
        if any(GROWS in about.shape for about in state_tensors(model)):
            return Finding(
                "exports", "says", "`multilin export` refuses a state that grows; generate and serve run it."
            )
        make_graph(model, 1)
    except Exception as error:
        return Finding("exports", "says", f"`multilin export` will not work ({brief(error)}); generate and serve will.")
    return Finding("exports", "says", "`multilin export` will work.")


@torch.no_grad()
def compiles(make_model: MakeModel) -> Finding:
    """Whether `training.compile` will work."""
    model, ids = make_model().eval(), _ids(8)
    try:
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, use_cache=False).logits
    except Exception as error:
        return Finding("compiles", "says", f"`--training.compile true` will not work ({brief(error)}).")
    good = "`--training.compile true` will work."
    return _compared("compiles", found, model(ids, use_cache=False).logits, good, "Compiled, logits differ")


@torch.no_grad()
def packs(make_model: MakeModel) -> Finding:
    """Whether texts in one row are read as if each stood alone."""
    model, ids = make_model().double().eval(), _ids(12)
    try:
        found = model(ids, document_ids=(torch.arange(12) >= 5)[None].long()).logits
    except InputError:
        return Finding(
            "packs", "says", "In training, layers read across document borders inside a block (no `starts`)."
        )
    alone = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], dim=1)
    good, bad = (
        "Texts in one row are read as if each stood alone.",
        "A text after another in its row (see `starts`) differs",
    )
    return _compared("packs", found, alone, good, bad)


@torch.no_grad()
def left_padding(make_model: MakeModel) -> Finding:
    """Whether a batch of prompts of different lengths gives what each gives alone."""
    model, ids = make_model().double().eval(), _ids(9)
    found = model(pad(ids, (4, 0)), attention_mask=pad(torch.ones_like(ids), (4, 0))).logits[:, 4:]
    good = "Prompts of different lengths can be generated from and served together."
    return _compared("padding", found, model(ids).logits, good, "A prompt beside a longer one differs")


def _ids(length: int) -> Tensor:
    return torch.arange(length)[None] % 7 + 2


def _compared(name: str, found: Tensor, expected: Tensor, good: str, bad: str) -> Finding:
    change = float((found - expected).abs().max() / expected.abs().max())
    return Finding(name, "says", good) if change <= 1e-4 else Finding(name, "warning", f"{bad} by {change:.1e}.")
