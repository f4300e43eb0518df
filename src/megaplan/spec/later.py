"""Sections whose models are loaded only if a spec has them."""

from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError, core_schema

SECTION_ERROR = "section"
"""Type of the error that has all errors of a section whose model is imported later: `ctx["errors"]`, as pydantic lists them."""


class LaterSection:
    """Annotation of a section whose model is imported later; a subclass names its model."""

    @classmethod
    def model(cls) -> type[BaseModel]:
        """The section's model, loaded now."""
        raise NotImplementedError

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Validation by the model, which is loaded with the first value."""
        return core_schema.no_info_plain_validator_function(cls._validated)

    @classmethod
    def __get_pydantic_json_schema__(cls, _schema: core_schema.CoreSchema, _handler: Any) -> dict[str, Any]:
        """A name for the model's definition, in whose place `megaplan.spec.schema` puts a reference to it."""
        return {"title": cls.model().__name__}

    @classmethod
    def _validated(cls, value: Any) -> BaseModel:
        try:
            return cls.model().model_validate(value)
        except ValidationError as error:
            raise PydanticCustomError(SECTION_ERROR, "errors of the section", {"errors": error.errors(include_url=False)}) from None


class LaterPostTraining(LaterSection):
    """The section `post_training`."""

    @classmethod
    def model(cls) -> type[BaseModel]:
        """`PostTraining`."""
        from megaplan.spec.post_training import PostTraining  # noqa: PLC0415  (few specs have the section)

        return PostTraining
