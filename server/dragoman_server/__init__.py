"""Serves bundles over gRPC: in-flight batching on ONNX Runtime."""
