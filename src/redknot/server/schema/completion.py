"""The body of /v1/completions."""

from typing import Annotated, Any

from pydantic import Field

from redknot.server.schema.common import Common, Only, TokenId

MAX_PROMPTS = 32
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Several = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)


class CompletionRequest(Common):
    """Texts to be continued."""

    prompt: str | Ids | Annotated[list[str], _Several] | Annotated[list[Ids], _Several]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: int | None = None
    suffix: Annotated[Any, Only()] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [part for part in self.prompt if not isinstance(part, int)]
