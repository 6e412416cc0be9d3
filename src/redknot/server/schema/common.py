"""Fields that chat and completion requests share."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_ITEMS = 4096
"Of lists that have no limit of their own."
INT64 = 1 << 63

Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=1)]


class Only:
    """A field that is accepted with these values and null alone: nothing else is done here."""

    def __init__(self, *values: Any) -> None:
        self._values = (*values, None)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Hook of pydantic."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Hook of pydantic."""
        return {"enum": list(self._values)}

    def _check(self, value: Any) -> Any:
        for one in self._values:
            if value == one and isinstance(value, bool) == isinstance(one, bool):
                return value
        allowed = " or ".join(json.dumps(one) for one in self._values)
        raise PydanticCustomError(
            "unsupported_value", "not supported, except as {allowed}", {"allowed": allowed}
        )


class Strict(BaseModel):
    """No coercion, no unknown field.

    A complaint costs far more than what it is about, and a client is told of one only: lists are
    ``fail_fast``, mappings are short, and of unknown fields the first alone is looked at.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in value if name not in known]
        if len(unknown) < 2:
            return value
        return {name: value[name] for name in value if name in known or name == unknown[0]}


class StreamOptions(Strict):
    """What a stream tells besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    "As vLLM: with include_usage, every chunk tells the usage so far."
    include_obfuscation: Annotated[Any, Only(False)] = None


class RedknotOptions(Strict):
    """How reuse is done for this request; the neutral values are the server's own."""

    policy: Text | None = None
    "`NAME` or `NAME:OPTION=VALUE:...`."
    exact: bool = False
    "Bit-equal to an engine without reuse."
    report: bool = True
    "Say in the answer what was reused."
    question: Literal["auto", "first", "last"] = "auto"
    "Where the question stands that decides what is recomputed."


class Common(Strict):
    """Fields of both endpoints."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    redknot: RedknotOptions | None = None

    user: str | None = None

    presence_penalty: Annotated[Any, Only(0)] = None
    frequency_penalty: Annotated[Any, Only(0)] = None
    repetition_penalty: Annotated[Any, Only(1)] = None
    logit_bias: Annotated[Any, Only({})] = None
    top_k: Annotated[Any, Only(-1, 0)] = None
    min_p: Annotated[Any, Only(0)] = None
    min_tokens: Annotated[Any, Only(0)] = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Whether every chunk of a stream tells the usage so far."""
        options = self.stream_options
        return self.wants_usage and bool(options and options.continuous_usage_stats)
