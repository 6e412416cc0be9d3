"""Which adapter claims a model: one row for each family."""

from transformers import PreTrainedModel

from redknot.errors import InputError
from redknot.models.adapter import Adapter
from redknot.models.gqa import Gqa

FAMILIES = (Gqa,)


def adapt(model: PreTrainedModel) -> Adapter:
    """The adapter that claims ``model``; `InputError` names the type where none does."""
    for family in FAMILIES:
        if model.config.model_type in family.model_types:
            return family(model)
    raise InputError(
        f"model type {model.config.model_type!r} is not supported"
        f" (supported: {', '.join(supported_types())})"
    )


def supported_types() -> tuple[str, ...]:
    """Model types that some adapter claims."""
    return tuple(kind for family in FAMILIES for kind in family.model_types)
