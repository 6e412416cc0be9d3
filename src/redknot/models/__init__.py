"""What is this model? Adapters describe the layers of a family; loading finds and opens models."""

from redknot.models.adapter import Adapter, Layer, LayerCost, LayerShape, StateKind
from redknot.models.families import adapt
from redknot.models.loading import LoadedModel, load_model

__all__ = [
    "Adapter",
    "Layer",
    "LayerCost",
    "LayerShape",
    "LoadedModel",
    "StateKind",
    "adapt",
    "load_model",
]
