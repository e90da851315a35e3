"""Train an encoder-decoder Transformer with PyTorch and export it as a bundle for ONNX Runtime."""

from importlib.metadata import version

__version__ = version("dragoman")
