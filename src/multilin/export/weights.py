"""One file for the weights of both graphs, which stores equal tensors once; and rounding of weights to 8 or 4 bits."""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import set_external_data
from onnxscript.optimizer import fold_constants

from multilin.errors import InputError

WEIGHTS = "weights.bin"
SMALLEST = 1024  # bytes of a tensor outside the graph's file
_ALIGNMENT = 64
_ANY_SIZE = 2**62
BLOCK = 32  # weights that share a scale

Precision = Literal["float32", "8bit", "4bit"]


class WeightFile:
    """A writer of the large tensors of graphs into one file beside the graphs.

    Args:
        folder: the folder of the graphs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._places = folder, dict[str, tuple[int, int]]()
        (folder / WEIGHTS).write_bytes(b"")

    def save(self, graph: onnx.ModelProto, name: str) -> None:
        """Write a graph; write its tensors of at least SMALLEST bytes into the file of weights."""
        with (self.folder / WEIGHTS).open("ab") as file:
            for tensor in graph.graph.initializer:
                content = numpy_helper.to_array(tensor).tobytes() if not tensor.raw_data else tensor.raw_data
                if len(content) < SMALLEST:
                    continue
                digest = hashlib.sha256(content).hexdigest()
                if digest not in self._places:
                    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                    self._places[digest] = file.tell(), len(content)
                    file.write(content)
                offset, length = self._places[digest]
                tensor.raw_data = content
                set_external_data(tensor, location=WEIGHTS, offset=offset, length=length)
                for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                    tensor.ClearField(field)
                tensor.data_location = TensorProto.EXTERNAL
        (self.folder / name).write_bytes(graph.SerializeToString())


def rounded(graph: onnx.ModelProto, precision: Precision) -> onnx.ModelProto:
    """Round the constant matrices of products to 8 or 4 bits, with a scale for every BLOCK weights.

    Raises:
        InputError: no matrix could be rounded.
    """
    if precision == "float32":
        return graph
    fold_constants(graph, input_size_limit=_ANY_SIZE, output_size_limit=_ANY_SIZE)  # transposed weights
    with _logging_as_it_is():
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer: Any = MatMulNBitsQuantizer(
        graph, bits=8 if precision == "8bit" else 4, block_size=BLOCK, is_symmetric=True, accuracy_level=4
    )
    logging.getLogger("onnxruntime.quantization.matmul_nbits_quantizer").setLevel(logging.ERROR)
    quantizer.process()
    result: onnx.ModelProto = quantizer.model.model
    if not any(node.op_type == "MatMulNBits" for node in result.graph.node):
        raise InputError(f"precision: {precision} given, but the graph has no matrix of weights to round")
    return result


@contextmanager
def _logging_as_it_is() -> Iterator[None]:
    """Restore the root logger after the block: importing ONNX Runtime's tools makes the logger print all messages."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
