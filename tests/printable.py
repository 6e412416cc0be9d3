"""A tiny model that writes printable ASCII and never stops by itself."""

import torch
from tests.execution.eager import lively_hf

from redknot.models import LoadedModel
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import wrap_model

PRINTABLE = 94  # the first ids of the byte tokenizer: "!" to "~"


def printable_model(**settings: object) -> LoadedModel:
    """The output rows of all other tokens are zero, those of printable ones are large."""
    hf = lively_hf(**settings)
    with torch.no_grad():
        hf.lm_head.weight[PRINTABLE:] = 0
        hf.lm_head.weight[:PRINTABLE] *= 50
    return wrap_model(hf, byte_tokenizer(add_bos=True), "printable")
