"""What `vit_jax launch ENGINE` runs: an engine for each way to start a run, in `engines/`; their flags, which mean the
same in all of them (`flags`); and the check of the training command before anything is started (`checking`).
Templates and what runs on workers lie beside them. Only `local.py` and `tpu_worker.sh` run where vit_jax is not.
"""
