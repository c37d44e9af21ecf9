"""Models as ONNX graphs, which run without multilin: on a CPU by ONNX Runtime, in the browser, in other languages."""
