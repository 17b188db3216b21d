"""Networks with several exits (Dynamic Vision Transformer, arXiv 2105.15075): easy images leave at a
cheap one.

`thresholds` says how confident an image has to be to leave, for a budget; `inference` lets images
leave, and gathers the others into full batches; `calibration` is what `vit_jax exits` finds and keeps
beside a checkpoint, `report` its table and picture; `evaluator` is accuracy with early exit.
"""
