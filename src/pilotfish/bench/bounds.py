"""Bounds of an artifact's fields: far beyond what is measured, and all that is derived stays finite and quick."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Name = Annotated[str, Field(max_length=4096)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
NumBytes = Annotated[int, Field(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
DraftLength = Annotated[int, Field(ge=0, le=4096)]
