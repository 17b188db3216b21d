"""What a run will need on accelerators that are not here: the real train step is compiled for them.

`target.py` devices that are not there, `compiling.py` the step compiled for them, `hlo.py` reads
the program, `collectives.py`, `cycles.py` (TPUs), `roofline.py` (GPUs) and `compute/flops.py`
count in it, `estimate.py` turns counts into time, `plan.py` puts a plan together, `fit.py` looks for one that
fits, `report.py` prints it.
"""
