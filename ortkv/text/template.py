"""Chat templates, rendered as transformers renders them, in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ortkv.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_TEMPLATE_CHARS = 2**20
_TEMPLATE_FAULTS = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip
"""What a template's own expressions raise, beside jinja2's errors."""


def render_chat(template: str, messages: Sequence[dict[str, str]], specials: dict[str, str]) -> str:
    """The conversation as the model's template writes it, up to the reply.

    specials: what the template may name, such as bos_token.   Raises: TemplateError.

    Source of the environment and its names: transformers 5, utils/chat_template_utils.py.
    """
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().astimezone().strftime(form)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    if len(template) > _MAX_TEMPLATE_CHARS:
        raise TemplateError(
            f"the chat template has {len(template)} characters: expected at most "
            f"{_MAX_TEMPLATE_CHARS}."
        )
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, **specials
        )
    except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
        raise TemplateError(f"the chat template refused the conversation: {error}.") from error
