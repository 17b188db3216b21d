"""How the formulas of models are computed.

In front are plain formulas: `dense`, `attend`, `norms`, `activations`, `dropout`; `stack`, the
loop over layers; `recompute`, which activations are stored for the backward pass; `partitioning`,
where activations lie on the mesh. Behind them `cpu`, `gpu` and `tpu` compute some of these their own
way, under the same names, and `tpu_attention` has a kernel; `choices` says which of them is used.
"""
