"""Chat templates: tried once in a process of their own, then rendered in jinja2's sandbox."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import TYPE_CHECKING

from ortkv.errors import TemplateError
from ortkv.text import sandbox

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_TEMPLATE_CHARS = 2**20
_TRIAL_TIMEOUT_S = 20
"""More than the CPU time allowed: a busy machine gives no process all of its time."""


def render_chat(template: str, messages: Sequence[dict[str, str]], specials: dict[str, str]) -> str:
    """The conversation as the model's template writes it, up to the reply.

    specials: what the template may name, such as bos_token.

    Raises: TemplateError where the template refuses the conversation, or is not safe to render.
    """
    import jinja2

    if len(template) > _MAX_TEMPLATE_CHARS:
        raise TemplateError(
            f"the chat template has {len(template)} characters: expected at most "
            f"{_MAX_TEMPLATE_CHARS}. Write a shorter chat_template.jinja beside the model, or use "
            "generate with a whole prompt."
        )
    reason = _fault_in_trial(template, tuple(sorted(specials.items())))
    if reason is not None:
        raise TemplateError(
            f"the chat template {reason} with a conversation of three lines: expected it to take "
            "milliseconds. Write another chat_template.jinja beside the model, or use generate "
            "with a whole prompt."
        )
    try:
        return sandbox.render(template, list(messages), specials)
    except (jinja2.TemplateError, MemoryError, *sandbox.TEMPLATE_FAULTS) as error:
        raise TemplateError(
            f"the chat template refused the conversation: {error}. Give it messages of the roles "
            "and in the order that it expects, or use generate with a whole prompt."
        ) from error


@functools.lru_cache(maxsize=64)
def _fault_in_trial(template: str, specials: tuple[tuple[str, str], ...]) -> str | None:
    """Render the template in a limited process. Returns: what went wrong there, if anything did.

    jinja2's sandbox stops code, not bombs: a short expression can take all memory, or forever.
    """
    job = {"template": template, "specials": dict(specials), "path": sys.path}
    command = [sys.executable, "-I", "-S", sandbox.__file__]
    try:
        trial = subprocess.run(  # noqa: S603 - this interpreter, on a file of ortkv's own
            command, input=json.dumps(job).encode(), capture_output=True, check=False,
            timeout=_TRIAL_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"does not end within {_TRIAL_TIMEOUT_S} s"
    except (OSError, ValueError) as error:
        return f"could not be tried in a process of its own ({error}), and is not used untried"
    if trial.returncode == 0:
        return None
    return (
        f"needs more than {sandbox.CPU_LIMIT_S} s, {sandbox.MEMORY_LIMIT_BYTES // 2**20} MiB or "
        f"{sandbox.OUTPUT_LIMIT_CHARS} characters of text"
    )
