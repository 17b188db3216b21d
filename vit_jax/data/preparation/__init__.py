"""What `vit_jax prepare` does: any source, checked image by image, into ArrayRecord files. Reading
them is in `data/sources/prepared.py`.
"""
