"""Networks with several exits (Dynamic Vision Transformer, arXiv 2105.15075): easy images leave at a
cheap one.

thresholds: how confident an image has to be to leave, solved for a budget. inference: images really
leave, the others are gathered into full batches. calibration: what `vit_jax
exits` finds and keeps beside a checkpoint; report: as a table and a picture. evaluator: accuracy
with early exit.
"""
