"""How what models say is computed: products, attention, norms, dropout, the loop over layers, what
the backward pass stores, and which of all this a platform does its own way.
"""
