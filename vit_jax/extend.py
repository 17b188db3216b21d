"""What a file of yours imports that adds to the package: a model family, positions, an objective, an evaluator, a data
source, an augmentation, an optimizer of matrices, a schedule, an inspected quantity, an action or a callback. These
names are stable (docs/reference.md), the modules that define them are not.

A name is imported when it is used first, and with it only the module that defines it.
"""

# ruff: noqa: F401

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # For editors and type checkers: the same as `_SOURCES`.
    from vit_jax.base.errors import CheckpointError, ConfigError, UserError
    from vit_jax.base.patterns import map_named
    from vit_jax.base.schema import option
    from vit_jax.compute.attend import attend
    from vit_jax.compute.dense import dense
    from vit_jax.compute.dropout import drop_path, dropout
    from vit_jax.compute.dropout import split as split_key
    from vit_jax.compute.stack import scan as scan_layers
    from vit_jax.compute.stack import stack as stack_layers
    from vit_jax.config import default_config
    from vit_jax.data.augmentation.own import Augmentation
    from vit_jax.data.augmentation.own import register as register_augmentation
    from vit_jax.data.options import Data as DataConfig
    from vit_jax.data.record import BadImage, DataError, DataSet, Record, Source
    from vit_jax.data.sources import register as register_data_source
    from vit_jax.evaluation import register as register_evaluator
    from vit_jax.evaluation.contract import (
        EvalContext,
        EvaluatedModel,
        Evaluator,
        EvaluatorOptions,
        Watch,
    )
    from vit_jax.evaluation.features import FeatureEvaluator, Features
    from vit_jax.evaluation.logits import Logits, LogitsEvaluator
    from vit_jax.inspection.contract import InspectionContext, Section
    from vit_jax.inspection.run import register as register_quantity
    from vit_jax.interchange.conversions import flax as flax_rules
    from vit_jax.interchange.conversions import pytorch as pytorch_rules
    from vit_jax.interchange.conversions.contract import (
        Conversion,
        DetectedModel,
        ObjectiveConversion,
    )
    from vit_jax.interchange.conversions.rules import Rule
    from vit_jax.models.attention import Attention
    from vit_jax.models.classifier import Classifier, ClassifierConfig, patch_grid
    from vit_jax.models.classifier import head as make_head
    from vit_jax.models.contract import Capture, Exiting, ModelOutput, captured
    from vit_jax.models.embeddings import PatchEmbedding
    from vit_jax.models.layers import LayerNorm, Linear, Mlp
    from vit_jax.models.layers import norm as make_norm
    from vit_jax.models.positions import ComputedPosition, Position
    from vit_jax.models.positions import register as register_position
    from vit_jax.models.registry import register as register_model
    from vit_jax.models.stacked import StackedConfig, StackedModel
    from vit_jax.models.vit import Block as ViTBlock
    from vit_jax.models.vit import VisionTransformer, VisionTransformerConfig
    from vit_jax.objectives import register as register_objective
    from vit_jax.objectives.contract import (
        Batch,
        FromCheckpoint,
        GramTeacher,
        Learner,
        MovingAverage,
        Objective,
        ObjectiveContext,
        SavedObjective,
        Teacher,
    )
    from vit_jax.objectives.output_term import OutputTerm
    from vit_jax.optim.blocks import one_by_one
    from vit_jax.optim.blocks import product as matmul_float32
    from vit_jax.optim.matrices import Matrices
    from vit_jax.optim.options import Optim as OptimConfig
    from vit_jax.optim.preconditioners import Preconditioner
    from vit_jax.optim.preconditioners import register as register_preconditioner
    from vit_jax.optim.preconditioners.muon import with_norm_of_muon as with_muon_norm
    from vit_jax.optim.schedules import register as register_schedule
    from vit_jax.optim.shapes import Span
    from vit_jax.optim.stacks import Stack, stack_name
    from vit_jax.optim.stacks import apply as apply_to_stacks
    from vit_jax.optim.stacks import apply_with_state as apply_to_stacks_with_state
    from vit_jax.recipes.user_files import load_config
    from vit_jax.recipes.user_files import register as register_file
    from vit_jax.training.actions import register as register_action
    from vit_jax.training.actions.contract import Action, Progress
    from vit_jax.training.run import Run, is_due
    from vit_jax.training.upkeep.callbacks import Callback
    from vit_jax.training.verdicts import EndRun, Restore

# Name -> MODULE, or MODULE:NAME where it has another name there.
_SOURCES = {
    # All guests.
    "default_config": "config",
    "load_config": "recipes.user_files",
    "option": "base.schema",
    "register_file": "recipes.user_files:register",
    "BadImage": "data.record",
    "CheckpointError": "base.errors",
    "ConfigError": "base.errors",
    "DataError": "data.record",
    "UserError": "base.errors",
    # A model family.
    "register_model": "models.registry:register",
    "ClassifierConfig": "models.classifier",
    "Classifier": "models.classifier",
    "StackedConfig": "models.stacked",
    "StackedModel": "models.stacked",
    "VisionTransformerConfig": "models.vit",
    "VisionTransformer": "models.vit",
    "ViTBlock": "models.vit:Block",
    "ModelOutput": "models.contract",
    "Exiting": "models.contract",
    "Capture": "models.contract",
    "captured": "models.contract",
    "patch_grid": "models.classifier",
    "make_head": "models.classifier:head",
    "make_norm": "models.layers:norm",
    "PatchEmbedding": "models.embeddings",
    "Attention": "models.attention",
    "LayerNorm": "models.layers",
    "Linear": "models.layers",
    "Mlp": "models.layers",
    "stack_layers": "compute.stack:stack",
    "scan_layers": "compute.stack:scan",
    "dense": "compute.dense",
    "attend": "compute.attend",
    "dropout": "compute.dropout",
    "drop_path": "compute.dropout",
    "split_key": "compute.dropout:split",
    # A kind of positions.
    "register_position": "models.positions:register",
    "Position": "models.positions",
    "ComputedPosition": "models.positions",
    # Their files in other formats.
    "Conversion": "interchange.conversions.contract",
    "DetectedModel": "interchange.conversions.contract",
    "Rule": "interchange.conversions.rules",
    "flax_rules": "interchange.conversions.flax:",
    "pytorch_rules": "interchange.conversions.pytorch:",
    # An objective.
    "register_objective": "objectives:register",
    "Objective": "objectives.contract",
    "ObjectiveContext": "objectives.contract",
    "OutputTerm": "objectives.output_term",
    "Learner": "objectives.contract",
    "Batch": "objectives.contract",
    "Teacher": "objectives.contract",
    "FromCheckpoint": "objectives.contract",
    "MovingAverage": "objectives.contract",
    "GramTeacher": "objectives.contract",
    "SavedObjective": "objectives.contract",
    "ObjectiveConversion": "interchange.conversions.contract",
    # An evaluator.
    "register_evaluator": "evaluation:register",
    "Evaluator": "evaluation.contract",
    "EvaluatorOptions": "evaluation.contract",
    "EvalContext": "evaluation.contract",
    "EvaluatedModel": "evaluation.contract",
    "Watch": "evaluation.contract",
    "LogitsEvaluator": "evaluation.logits",
    "Logits": "evaluation.logits",
    "FeatureEvaluator": "evaluation.features",
    "Features": "evaluation.features",
    # A data source.
    "register_data_source": "data.sources:register",
    "DataConfig": "data.options:Data",
    "DataSet": "data.record",
    "Record": "data.record",
    "Source": "data.record",
    # An augmentation.
    "register_augmentation": "data.augmentation.own:register",
    "Augmentation": "data.augmentation.own",
    # An optimizer of matrices.
    "register_preconditioner": "optim.preconditioners:register",
    "OptimConfig": "optim.options:Optim",
    "Matrices": "optim.matrices",
    "Preconditioner": "optim.preconditioners",
    "Stack": "optim.stacks",
    "stack_name": "optim.stacks",
    "apply_to_stacks": "optim.stacks:apply",
    "apply_to_stacks_with_state": "optim.stacks:apply_with_state",
    "map_named": "base.patterns",
    "matmul_float32": "optim.blocks:product",
    "one_by_one": "optim.blocks",
    "with_muon_norm": "optim.preconditioners.muon:with_norm_of_muon",
    # A schedule of the learning rate.
    "register_schedule": "optim.schedules:register",
    "Span": "optim.shapes",
    # An inspected quantity.
    "register_quantity": "inspection.run:register",
    "InspectionContext": "inspection.contract",
    "Section": "inspection.contract",
    # An action.
    "register_action": "training.actions:register",
    "Action": "training.actions.contract",
    "Progress": "training.actions.contract",
    "Run": "training.run",
    "is_due": "training.run",
    "EndRun": "training.verdicts",
    "Restore": "training.verdicts",
    # A callback.
    "Callback": "training.upkeep.callbacks",
}
__all__ = list(_SOURCES)  # pyrefly: ignore


def __getattr__(name: str):
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    source, is_renamed, new_name = _SOURCES[name].partition(":")
    module = importlib.import_module(f"vit_jax.{source}")
    if is_renamed and not new_name:  # a module of functions
        return module
    return getattr(module, new_name or name)


def __dir__() -> list[str]:
    return __all__
