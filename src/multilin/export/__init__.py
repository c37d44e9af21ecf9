"""Export of models as ONNX graphs, which run without multilin: on CPUs, in browsers and in other languages."""
