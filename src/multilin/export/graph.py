"""A model's call as a graph: it maps new tokens and a state to the last token's logits and the state's changes."""

import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from multilin.errors import as_input_error
from multilin.inference.manifest import MATCH_INPUTS, graph_tensors
from multilin.inference.snapshot import describe_state, example_state
from multilin.inference.state_file import StateTensor
from multilin.layers.base import Layout
from multilin.model import MultilinForCausalLM
from multilin.model.factory import evaluation_mode
from multilin.model.match import Matches
from multilin.model.state import like, named_tensors, parts_of
from multilin.ops.ring import Ring, slots_of

OPSET = 23  # the first with RMSNormalization
EXAMPLE_ROWS, EXAMPLE_SLOTS = 3, 70  # sizes that no model's own sizes are likely to equal


class Step(nn.Module):
    """A model that reads T new tokens of each row.

    With one column, call `forward(input_ids, num_read, *tensors)`; with several, `forward(input_ids, num_new, num_read,
    *tensors)`, where `num_new` is each row's number of new tokens. Logits are computed after each row's last token. In
    a model with the longest match, two inputs follow `input_ids`: the predicted ids and the lengths, (rows, T) each.

    Windows are rings with any number S of slots; token number n is in slot n mod S. For a ring, the result is the new
    tokens, (rows, T, ...), which the caller writes into their slots. For other tensors, the result is the new values.
    """

    def __init__(self, model: MultilinForCausalLM, num_columns: int) -> None:
        super().__init__()
        self.model, self.num_columns = model, num_columns
        state = example_state(model)
        self.values = state.values[1:]
        self.tensors = graph_tensors(describe_state(state))

    def forward(self, input_ids: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Logits (B, V), then a tensor for each of `tensors`."""
        has_padding, matches = self.num_columns > 1, None
        if self.model.config.match is not None:
            matches, inputs = Matches(*inputs[:2]), inputs[2:]
        num_new_B = inputs[0] if has_padding else None
        num_read_B, *tensors = inputs[has_padding:]
        index_T = torch.arange(self.num_columns, device=input_ids.device)
        positions_BT, padding_BT = num_read_B[:, None] + index_T, None
        if num_new_B is not None:
            padding_BT = index_T >= num_new_B[:, None]
            positions_BT = positions_BT.minimum(num_read_B[:, None] + num_new_B[:, None] - 1)
        layout = Layout(positions_BT, None, padding_BT)
        body, after = self.model.model, dict[str, Tensor]()
        given = {about.name: _turn(tensor, about) for about, tensor in zip(self.tensors, tensors, strict=True)}
        x_BTD = body.embedding(input_ids, layout, matches)
        for index, (layer, value) in enumerate(zip(body.layers, self.values, strict=True)):
            name = f"layers.{index}"
            x_BTD, state = layer(x_BTD, _open(value, name, given, num_read_B), layout)
            after |= dict(named_tensors(state, name))
        if num_new_B is not None:
            last_B11 = (num_new_B - 1).clamp(min=0)[:, None, None]
            x_BTD = x_BTD.gather(1, last_B11.expand(-1, -1, x_BTD.shape[-1]))
        # With three axes the product has a constant matrix on its right, which can be rounded.
        logits_B1V = self.model.lm_head(body.finish(x_BTD)[:, :1])
        return logits_B1V[:, 0].float(), *(_turn(after[about.name], about) for about in self.tensors)

    def example(self) -> dict[str, Tensor]:
        """Inputs by name, with `EXAMPLE_ROWS` rows; rings have at most `EXAMPLE_SLOTS` slots."""
        rows = EXAMPLE_ROWS
        names = ["input_ids", *(MATCH_INPUTS if self.model.config.match is not None else ())]
        inputs = {name: torch.zeros(rows, self.num_columns, dtype=torch.long) for name in names}
        if self.num_columns > 1:
            inputs["num_new"] = torch.ones(rows, dtype=torch.long)
        inputs["num_read"] = torch.full((rows,), 2)
        for about in self.tensors:
            shape = list(about.shape)
            if about.is_ring:
                shape[0] = min(shape[0], EXAMPLE_SLOTS)
            inputs[about.name] = _turn(torch.zeros(rows, *shape, dtype=getattr(torch, about.dtype)), about)
        return inputs

    def dynamic_shapes(self) -> dict[str, Any]:
        """The axes of variable size: rows, and the slots of rings with more than two."""
        names = {about.shape[0]: f"slots_{about.shape[0]}" for about in self.tensors if about.is_ring}
        slots = {size: torch.export.Dim(name, min=2) for size, name in names.items()}
        rows = torch.export.Dim("rows")
        shapes: dict[str, Any] = {name: {0: rows} for name in self.example()}
        for about in self.tensors:
            if about.is_ring and about.shape[0] > 2:
                shapes[about.name][2 if about.is_multiplied else 1] = slots[about.shape[0]]
        return shapes


def _turn(tensor: Tensor, about: StateTensor) -> Tensor:
    """Swap the axes of heads and slots, whose order differs between graphs and ops."""
    return tensor.transpose(1, 2) if about.is_multiplied else tensor


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
        with as_input_error(lambda reason: f"run: this model cannot be exported as a graph ({reason})"):
            program = torch.export.export(step, inputs, dynamic_shapes=dims, strict=False)
            return torch.onnx.export(
                program, dynamo=True, optimize=True, verbose=False, opset_version=OPSET, input_names=names,
                output_names=["logits", *(f"new.{about.name}" for about in step.tensors)],
            )  # fmt: skip


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which prints remarks on versions and steps, and a graph if it fails."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _open(value: Any, name: str, given: Mapping[str, Tensor], num_read_B: Tensor) -> Any:
    """Make a layer's state from the inputs of the graph, with windows as rings; `value` is an example of the state."""
    if isinstance(value, Tensor):
        return given.get(name, num_read_B)
    parts = parts_of(value)
    if parts is None:
        return value
    opened = [_open(part, f"{name}.{field}", given, num_read_B) for field, part in parts.items()]
    state = like(value, opened)
    slots = slots_of(value)
    return state if slots is None else Ring(state, num_read_B, getattr(value, slots.fields[0]).shape[1])
