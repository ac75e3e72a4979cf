"""jinja2's sandbox as transformers sets it up, and the trial of a template in a limited process.

The trial runs this file by itself: it imports nothing of ortkv's.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

CPU_LIMIT_S = 2
MEMORY_LIMIT_BYTES = 512 * 2**20
OUTPUT_LIMIT_CHARS = 2**20
TEMPLATE_FAULTS = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip
"""What a template's own expressions raise, beside jinja2's errors."""
_USER = {"role": "user", "content": "Hello"}
_SYSTEM = {"role": "system", "content": "Be brief."}
_REPLY = {"role": "assistant", "content": "Hello."}
_TALKS = ([_USER], [_USER, _REPLY, _USER], [_SYSTEM, _USER, _REPLY, _USER])


def render(template: str, messages: list[dict[str, str]], specials: dict[str, str]) -> str:
    """A conversation through a template, up to the reply.

    specials: what the template may name, such as bos_token.
    Raises: jinja2.TemplateError; TEMPLATE_FAULTS; MemoryError.

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

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(template).render(
        messages=messages, add_generation_prompt=True, **specials
    )


def _limit_this_process() -> None:
    """CPU time and memory; where the system has no such limits, the parent's clock is left."""
    try:
        import resource
    except ImportError:
        return
    for kind, most in (
        (resource.RLIMIT_CPU, CPU_LIMIT_S),
        (resource.RLIMIT_AS, MEMORY_LIMIT_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        # Refused where the process has a stricter limit already, or the system none of this kind.
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))


def _try() -> None:
    """Render short conversations with the template on stdin; exit code 0 if that ends well.

    A template that refuses one of them ends well too: it says so again when it is used.
    """
    given = json.load(sys.stdin)
    sys.path[:] = given["path"]
    import jinja2

    _limit_this_process()
    for messages in _TALKS:
        try:
            rendered = render(given["template"], messages, given["specials"])
        except (jinja2.TemplateError, *TEMPLATE_FAULTS):
            continue
        if len(rendered) > OUTPUT_LIMIT_CHARS:
            sys.exit(1)


if __name__ == "__main__":
    _try()
