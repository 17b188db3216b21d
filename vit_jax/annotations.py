"""Types for annotations in code of your own: the config of a run and of its sections, and options of functions.

    def get_config() -> RunConfig: ...

A type checker and an editor read `annotations.pyi`, which has every field and option with what it does, and which
`tools/generated.py` makes of the schema. When a program runs, the schema checks, and these are plain names.
"""

from ml_collections import ConfigDict

RunConfig = ConfigDict
ModelSection = ObjectiveSection = DataSection = PseudoSection = AugmentSection = ConfigDict
OptimSection = LoraSection = MeshSection = EvalSection = CheckpointSection = ConfigDict
LogSection = HostsSection = SpikeSection = AuditSection = ReferenceSection = ConfigDict
ModelOptions = LoadOptions = ComputeOptions = EvaluateFields = dict
PreprocessingOptions = ExportOptions = PushOptions = dict
ModelName = CheckpointFormat = str
