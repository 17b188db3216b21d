"""How the formulas of models are computed.

`dense`, `attend`, `norms`, `activations`, `convolution` and `dropout` are plain formulas; `stack` is
the loop over layers; `recompute` names the activations that the backward pass may store;
`partitioning` places activations on the mesh. `cpu`, `gpu` and `tpu` implement some formulas for one
platform, `cudnn`, `splash` and `tpu_attention` have fused attention. `platform` picks the implementation
of a formula, and imports it when a program for its platform is traced; `choices` picks what the config
leaves open.
"""
