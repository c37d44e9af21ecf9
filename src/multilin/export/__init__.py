"""Export of models as ONNX graphs, which run without multilin: in ONNX Runtime on a CPU, in browsers, in other languages."""
