"""DINO, iBOT, DINOv2 and DINOv3: self-distillation."""
