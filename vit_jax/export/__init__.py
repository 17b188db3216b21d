"""Trained models as files that run without this package.

`run` is the command; `programs` makes a program of a model, which `stablehlo` and `onnx` write; `onnx_graph` builds a
graph from a jaxpr, by the rules of `onnx_rules`; `precision` says in how many bits weights are stored.
"""
