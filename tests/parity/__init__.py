"""Statistical parity with other engines: another library and vit_jax train the same small recipe on the same images,
each from initialisations, orders and random draws of its own; the two samples of curves must be indistinguishable.

`python -m tests.parity` lists the rows and `python -m tests.parity ROW` runs one. `docs/fidelity.md` has what they
gave.
"""
