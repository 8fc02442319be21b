"""What all settings are made of: the base of their models, and bounds and values that several of them have."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

MAX_DRAFT_TOKENS = 255
"""Most draft tokens of a request in a round, of a chain as of a tree."""

MAX_DEPTH = 64
"""Deepest level of a tree that is expanded level by level."""


class Settings(BaseModel):
    """The base of all settings: frozen, and no key beside the known ones.

    Numbers and truth values are strict: JSON has them, so that `"5"` or `true` in a number's place is a mistake.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


def is_number(value: Any, kind: Any) -> bool:
    """Whether it is a number of this kind, and not a truth value."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _known_schedule(value: Any) -> Any:
    """Two sentences of pydantic's, one for each kind of schedule, become one of ours."""
    if value is None or value == "auto":
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError("schedule", "should be 'auto' or draft tokens by running requests as in {\"1\": 60}")
    for requests, tokens in value.items():
        if not str(requests).isdecimal() or not is_number(tokens, int):
            raise PydanticCustomError(
                "schedule",
                'should be whole draft tokens by running requests as in {"1": 60}; {pair} is not',
                {"pair": f'"{requests}": {json.dumps(tokens, default=repr)}'},
            )
    return value


Schedule = Annotated[Literal["auto"] | dict[int, int], BeforeValidator(_known_schedule)]
"""Draft tokens by running requests, or "auto"."""
