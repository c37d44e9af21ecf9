"""The train files: whole optimisation steps, forward, backward and update, from given weights and batches."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multilin.model import MultilinForCausalLM
from multilin.training.optimizers import MatrixMoment, NormalizedSGD, parameter_groups
from multilin.training.optimizers.normalized_sgd import ROW_ORDERS
from multilin.training.schedules import rate_factor
from multilin.training.settings import ScheduleRecipe
from tests.golden import threelin, tscale

Triples = Iterator[tuple[str, np.ndarray, np.ndarray]]


def check_threelin(file: Any) -> Triples:
    """(array, ours, expected): loss and logits before every step, weights after it, in both orders for rows."""
    for order in ROW_ORDERS:
        prefix = next((p for p in (f"{order}.", f"train.{order}.") if f"{p}w1.embed" in file.files), None)
        if prefix is not None:
            yield from _threelin_run(file, prefix, order)


def _threelin_run(file: Any, prefix: str, order: Any) -> Triples:
    meta, batches = json.loads(str(file["meta_json"])), torch.from_numpy(file["token_ids"]).long()
    model = threelin.build_model(file, meta, batches.shape[-1], prefix="w0")
    groups = parameter_groups(model, decayed=(), weight_decay=0.0, by_rows=True)
    optimizer = NormalizedSGD(groups, lr=meta.get("lr", 0.05), row_order=order)
    for step, ids in enumerate(batches):
        result = model(ids, labels=ids)
        optimizer.zero_grad()
        result.loss.backward()
        ours = {f"{prefix}loss{step}": result.loss, f"{prefix}logits{step}": result.logits}
        if step == 0:
            gradients = threelin.in_their_names({name: weight.grad for name, weight in model.named_parameters()})
            ours |= {f"grad0.{name}": gradient for name, gradient in gradients.items()}
        optimizer.step()
        weights = threelin.in_their_names(dict(model.named_parameters()))
        ours |= {f"{prefix}w{step + 1}.{name}": weight for name, weight in weights.items()}
        yield from _present(file, ours)


def check_tscale(file: Any) -> Triples:
    """(array, ours, expected): probabilities before every step, the first gradients, and weights after every step."""
    meta = json.loads(str(file["meta_json"]))
    prefix = next(n for n in sorted(file.files, key=len) if n.endswith("MP_MODEL_EMBED")).removesuffix("MP_MODEL_EMBED")
    model = tscale.build_model(file, meta, prefix)
    model.lm_head.bias.requires_grad_(False)
    tscale.follow_the_source(model)
    names = tscale.weight_names(len(model.model.layers))
    optimizer = MatrixMoment(parameter_groups(model, decayed=names, weight_decay=1.0, by_rows=True))
    step = 0
    while f"train.step{step}.prob" in file.files:
        ids, targets = _batch(file, "tokens", step), _batch(file, "targets", step)
        logits = model(ids, document_ids=tscale.documents(ids, meta.get("doc_start"))).logits
        log_prob = torch.log_softmax(logits, dim=-1)
        scores = log_prob.gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets >= 0]
        optimizer.zero_grad()
        (-scores.sum()).backward()
        yield from _present(file, {f"train.step{step}.prob": log_prob.exp(), f"train.step{step}.score": scores.mean()})
        yield from tscale.deltas(file, f"train.step{step}.", model, meta["heads"])
        if f"train.step{step}.W.MP_MODEL_FINAL" not in file.files:
            return
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = _rate_and_decay(file, meta, step)
        optimizer.step()
        yield from _tscale_weights(file, model, names, meta["heads"], step)
        step += 1


def _tscale_weights(file: Any, model: MultilinForCausalLM, names: dict[str, str], heads: int, step: int) -> Triples:
    for ours, theirs in names.items():
        expected = f"train.step{step}.W.{theirs}"
        if expected in file.files:
            yield expected, *tscale.in_their_layout(theirs, model.get_parameter(ours), file[expected], heads)


def _rate_and_decay(file: Any, meta: dict[str, Any], step: int) -> tuple[float, float]:
    """As the file says for every step, or by the source's defaults."""
    rates = next((file[name] for name in file.files if name.endswith("step_rate")), None)
    decays = next((file[name] for name in file.files if name.endswith("step_l2reg")), None)
    recipe = ScheduleRecipe(name="constant", warmup_steps=int(meta.get("slow_start", 1000)))
    rate = meta.get("rate", 0.01) * rate_factor(recipe, step, max_steps=1) if rates is None else rates[step]
    return float(rate), float(meta.get("l2reg", 0.0) if decays is None else decays[step])


def _batch(file: Any, name: str, step: int) -> Tensor:
    """One array for each batch, or all of them in one."""
    for single in (f"train.step{step}.{name}", f"step{step}.{name}", f"batch{step}.{name}", f"{name}{step}"):
        if single in file.files:
            return torch.from_numpy(file[single]).long()
    together = next(owner for owner in (name, f"train.{name}") if owner in file.files)
    return torch.from_numpy(file[together][step]).long()


def _present(file: Any, ours: dict[str, Tensor]) -> Triples:
    for name, tensor in ours.items():
        if name in file.files:
            yield name, tensor.detach().numpy().copy(), file[name]
