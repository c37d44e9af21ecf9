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
SECONDS = 8.0


def learns(make_model: MakeModel, seconds: float = SECONDS) -> Finding:
    """Whether a small model learns 64 tokens by heart, and to name the token before the current one."""
    ids = torch.randint(2, 16, (1, 64), generator=torch.Generator().manual_seed(1))
    slow, missing, sentences = False, [], []
    for task, goal in (("64 tokens by heart", 0.1), ("to copy the token before", 0.3)):
        loss, steps, is_over = _train(make_model(), ids if goal == 0.1 else None, goal, seconds / 2)
        sentences.append(f"{task}: loss {loss:.2f} after {steps} steps")
        slow |= is_over
        missing += [] if loss < goal else [task]
    told = "; ".join(sentences)
    if not missing:
        return Finding("learns", "ok", f"It learns {told}.")
    cause = "time was short, so train it longer yourself" if slow else (
        "gradients that vanish, a scale that is too small, or no way to tell which token came before"
    )  # fmt: skip
    return Finding("learns", "warning", f"It does not learn {' or '.join(missing)} ({told}). Likely cause: {cause}.")


def _train(model: MultilinForCausalLM, ids: Tensor | None, goal: float, seconds: float) -> tuple[float, int, bool]:
    """The last loss, the number of steps, and whether time ended them; without ids, new texts have to be copied."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
    end, loss, draw = time.perf_counter() + seconds, torch.inf, torch.Generator().manual_seed(2)
    for step in range(400):
        given = torch.randint(2, 6, (16, 12), generator=draw) if ids is None else ids[:, :-1]
        targets, logits = given[:, :-1] if ids is None else ids[:, 1:], model(given, use_cache=False).logits
        loss_now = cross_entropy(logits[:, given.shape[1] - targets.shape[1] :].flatten(0, 1), targets.flatten())
        loss = float(loss_now.detach())
        if loss < goal or time.perf_counter() > end:
            return loss, step, loss >= goal
        optimizer.zero_grad()
        loss_now.backward()
        optimizer.step()
    return loss, step, False


@torch.no_grad()
def exports(make_model: MakeModel) -> Finding:
    """Whether `multilin export` will work."""
    try:
        from multilin.export.graph import make_graph
        from multilin.inference.snapshot import state_tensors
        from multilin.inference.state_file import GROWS

        model = make_model().eval()
        if any(GROWS in about.shape for about in state_tensors(model)):
            return Finding("exports", "says", "`multilin export` refuses a state that grows; generate and serve run it.")
        make_graph(model, 1)
    except Exception as error:
        return Finding("exports", "says", f"`multilin export` will not work ({brief(error)}); generate and serve will.")
    return Finding("exports", "says", "`multilin export` will work.")


@torch.no_grad()
def compiles(make_model: MakeModel) -> Finding:
    """Whether `training.compile` will work."""
    model, ids = make_model().eval(), torch.arange(2, 10)[None]
    try:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found, expected = (each(ids, use_cache=False).logits for each in (compiled, model))
    except Exception as error:
        return Finding("compiles", "says", f"`--training.compile true` will not work ({brief(error)}).")
    change = float((found - expected).abs().max())
    if not change <= 1e-4 * float(expected.abs().max()):
        return Finding("compiles", "warning", f"Compiled, the model gives logits that differ by {change:.1e}.")
    return Finding("compiles", "says", "`--training.compile true` will work.")


@torch.no_grad()
def packs(make_model: MakeModel) -> Finding:
    """Whether texts in one row are read as if each stood alone."""
    model, ids = make_model().double().eval(), torch.arange(12)[None] % 7 + 2
    try:
        found = model(ids, document_ids=(torch.arange(12) >= 5)[None].long()).logits
    except InputError:
        return Finding("packs", "says", "In training, layers read across document borders inside a block (no `starts`).")
    expected = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], dim=1)
    change = float((found - expected).abs().max() / expected.abs().max())
    if not change <= 1e-4:
        return Finding("packs", "warning", f"A text changes by {change:.1e} after another one in its row: see `starts`.")
    return Finding("packs", "says", "Texts in one row are read as if each stood alone.")


@torch.no_grad()
def left_padding(make_model: MakeModel) -> Finding:
    """Whether a batch of prompts of different lengths gives what each gives alone."""
    model, ids = make_model().double().eval(), torch.arange(9)[None] % 7 + 2
    found = model(pad(ids, (4, 0)), attention_mask=pad(torch.ones_like(ids), (4, 0))).logits[:, 4:]
    change = float((found - model(ids).logits).abs().max() / found.abs().max())
    if not change <= 1e-4:
        return Finding("padding", "warning", f"Prompts of different lengths change each other by {change:.1e}.")
    return Finding("padding", "says", "Prompts of different lengths can be generated from and served together.")
