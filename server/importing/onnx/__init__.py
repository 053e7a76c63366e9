"""Converts ONNX models to modules that torch.export takes. Only this folder imports the package onnx."""
