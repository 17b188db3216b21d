"""Encoder-only Mask Transformer: semantic, instance and panoptic segmentation."""
