"""One call of a model as a graph: new tokens and a state in, logits of the last token and the change of the state out."""

import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multilin.errors import InputError
from multilin.layers.base import Layout
from multilin.model import MultilinForCausalLM
from multilin.model.loss import apply_head
from multilin.model.modes import evaluation_mode
from multilin.model.state import named_tensors, with_tensors
from multilin.ops.ring import Ring, map_windows

EXAMPLE_ROWS, EXAMPLE_SLOTS = 3, 70  # sizes that no model's own sizes are likely to equal


class StateTensor(NamedTuple):
    """A tensor of a state as graphs take it.

    name: as `TextState.named_tensors` has it; the graph's input, and with "new." before it the output.
    shape: of a row of an op's own state, slots included.
    slot_axis: axis of the slots in the graph's tensor, rows included; None where the tensor is replaced as a whole.
    slots_are_positions: whether the token at position n has slot n also in the op's own state; else that holds the last
        tokens in their order.
    """

    name: str
    shape: list[int]
    slot_axis: int | None
    slots_are_positions: bool


class Step(nn.Module):
    """A model that reads T new tokens of each row.

    `forward(input_ids, num_read, *tensors)` for one token, `forward(input_ids, num_new, num_read, *tensors)` for up to
    `num_columns`, of which each row has `num_new`, and the logits are those after its last.

    Windows lie in rings of any number of slots, token number n in slot n mod S. Of a ring the new tokens are returned,
    (rows, T, ...), for the caller to write into their slots; all other tensors are returned as they are afterwards.
    """

    def __init__(self, model: MultilinForCausalLM, num_columns: int) -> None:
        super().__init__()
        self.model, self.num_columns = model, num_columns
        self.values = _example_values(model)
        self.tensors = [tensor for index, value in enumerate(self.values) for tensor in _describe(value, index)]

    def forward(self, input_ids: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Logits (B, V), then a tensor for each of `tensors`."""
        has_padding = self.num_columns > 1
        num_new_B = inputs[0] if has_padding else None
        num_read_B, *tensors = inputs[has_padding:]
        index_T = torch.arange(self.num_columns, device=input_ids.device)
        positions_BT, padding_BT = num_read_B[:, None] + index_T, None
        if num_new_B is not None:
            padding_BT = index_T >= num_new_B[:, None]
            positions_BT = positions_BT.minimum(num_read_B[:, None] + num_new_B[:, None] - 1)
        layout = Layout(positions_BT, None, padding_BT)
        body, given = self.model.model, self._given(tensors)
        x_BTD, after = body.embedding(input_ids, layout), []
        for index, (layer, value) in enumerate(zip(body.layers, self.values, strict=True)):
            x_BTD, state = layer(x_BTD, _open(value, f"layers.{index}", given, num_read_B), layout)
            after += [tensor for _, tensor in _close(state, value, f"layers.{index}")]
        if num_new_B is not None:
            last_B11 = (num_new_B - 1).clamp(min=0)[:, None, None]
            x_BTD = x_BTD.gather(1, last_B11.expand(-1, -1, x_BTD.shape[-1]))
        logits_BV = apply_head(self.model.lm_head, body.norm(x_BTD)[:, 0], self.model.config.logit_scale)
        return logits_BV.float(), *after

    def _given(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """The tensors by name, axes in the order of the op."""
        return {
            about.name: tensor.transpose(1, 2) if about.slot_axis == 2 else tensor
            for about, tensor in zip(self.tensors, tensors, strict=True)
        }

    def example(self) -> dict[str, Tensor]:
        """Inputs by name, with `EXAMPLE_ROWS` rows and rings of `EXAMPLE_SLOTS` slots, or as many as they keep."""
        rows = EXAMPLE_ROWS
        inputs = {"input_ids": torch.zeros(rows, self.num_columns, dtype=torch.long)}
        if self.num_columns > 1:
            inputs["num_new"] = torch.ones(rows, dtype=torch.long)
        inputs["num_read"] = torch.full((rows,), 2)
        for about in self.tensors:
            shape = list(about.shape)
            if about.slot_axis is not None:
                shape[0] = min(shape[0], EXAMPLE_SLOTS)
            tensor = torch.zeros(rows, *shape)
            inputs[about.name] = tensor.transpose(1, 2) if about.slot_axis == 2 else tensor
        return inputs

    def dynamic_shapes(self) -> dict[str, Any]:
        """Axes of any size: rows, and the slots of rings of which there are more than one."""
        slots = {about.shape[0]: f"slots_{about.shape[0]}" for about in self.tensors if about.slot_axis is not None}
        dims = {name: torch.export.Dim(name, min=2) for name in slots.values()}
        rows = torch.export.Dim("rows")
        shapes: dict[str, Any] = {name: {0: rows} for name in self.example()}
        for about in self.tensors:
            if about.slot_axis is not None and about.shape[0] > 2:
                shapes[about.name][about.slot_axis] = dims[slots[about.shape[0]]]
        return shapes


def make_graph(model: MultilinForCausalLM, num_columns: int) -> Any:
    """The ONNX program of `Step`, with inputs and outputs by name.

    Raises:
        InputError: the model cannot be exported.
    """
    with torch.no_grad(), evaluation_mode(model), _quiet():
        step = Step(model, num_columns).eval()
        example, shapes = step.example(), step.dynamic_shapes()
        names = list(example)
        inputs = tuple(example.values())
        dims = (shapes["input_ids"], tuple(shapes[name] for name in names[1:]))
        try:
            program = torch.export.export(step, inputs, dynamic_shapes=dims, strict=False)
            return torch.onnx.export(
                program, dynamo=True, optimize=True, verbose=False, input_names=names,
                output_names=["logits", *(f"new.{about.name}" for about in step.tensors)],
            )  # fmt: skip
        except InputError:
            raise
        except Exception as error:  # what a foreign layer does can fail in as many ways as there are operators
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"run: this model cannot be exported as a graph ({type(error).__name__}: {reason})") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on versions and steps."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@torch.no_grad()
def _example_values(model: MultilinForCausalLM) -> list[Any]:
    """The states of the layers after one token, which have the shapes of any other."""
    state = model.new_state()
    with evaluation_mode(model):
        model(torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=state)
    return state.values[1:]


def _describe(value: Any, index: int) -> Iterator[StateTensor]:
    """What a graph takes of a layer's state."""
    described: dict[str, StateTensor] = {}
    marked = map_windows(lambda window: _Marked(window) if _is_ring(window) else window, value)
    for name, part, tensor in _named_parts(marked, f"layers.{index}"):
        shape = list(tensor.shape[1:])
        if part is None:
            described[name] = StateTensor(name, shape, None, False)
        else:
            axis = 2 if part.slots_are_multiplied and tensor.ndim == 4 else 1
            described[name] = StateTensor(name, shape, axis, part.slots_are_positions)
    yield from described.values()


class _Marked(NamedTuple):
    """A window that becomes a ring."""

    window: Any


def _is_ring(window: Any) -> bool:
    return getattr(window, window.slot_fields[0]).shape[1] > 0


def _named_parts(value: Any, name: str) -> Iterator[tuple[str, Any, Tensor]]:
    """Dotted name, window or None, and tensor, of all tensors a graph takes; counts of tokens are no such tensors."""
    if isinstance(value, _Marked):
        for field in value.window.slot_fields:
            yield f"{name}.{field}", value.window, getattr(value.window, field)
    elif isinstance(value, Tensor):
        yield name, None, value
    elif value is not None:
        for field, part in zip(value._fields, value, strict=True):
            yield from _named_parts(part, f"{name}.{field}")


def _open(value: Any, name: str, given: Mapping[str, Tensor], num_read_B: Tensor) -> Any:
    """The layer's state from the graph's inputs, windows as rings."""
    if isinstance(value, Tensor):
        return given[name]
    if value is None:
        return None
    if getattr(value, "slot_fields", ()) and _is_ring(value):
        tokens = value._replace(
            **{
                field: given[f"{name}.{field}"] if field in value.slot_fields else num_read_B
                for field in value._fields
            }
        )
        return Ring(tokens, num_read_B, getattr(value, value.slot_fields[0]).shape[1])
    return type(value)(
        *(_open(part, f"{name}.{field}", given, num_read_B) for field, part in zip(value._fields, value, strict=True))
    )


def _close(state: Any, value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The graph's outputs from the layer's state afterwards."""
    if isinstance(value, Tensor):
        yield name, state
    elif value is not None and getattr(value, "slot_fields", ()) and _is_ring(value):
        for field in value.slot_fields:
            tensor = getattr(state, field)
            yield f"{name}.{field}", tensor.transpose(1, 2) if value.slots_are_multiplied and tensor.ndim == 4 else tensor
    elif value is not None:
        for field, part in zip(value._fields, value, strict=True):
            yield from _close(getattr(state, field), part, f"{name}.{field}")
