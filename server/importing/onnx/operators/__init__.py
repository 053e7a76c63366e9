"""The operators of ONNX as functions of torch, by their names."""
