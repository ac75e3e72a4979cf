"""What goes wrong, by name: every error a user can meet, each with a stable ``code``.

A message says what was found, what was expected, and what to do. Exit codes and HTTP
statuses are chosen from the class at the edges, never from the text.
"""

from __future__ import annotations

from typing import ClassVar


class OrtkvError(Exception):
    """Base of every error ortkv raises on purpose. ``code`` is its stable name."""

    code: ClassVar[str] = "ortkv_error"


class ModelFileError(OrtkvError):
    """A file of the model is missing, truncated or not what its name says."""

    code = "model_file_error"


class UnsafeModel(OrtkvError):
    """A file of the model points outside its own folder."""

    code = "unsafe_model"


class UnsupportedModel(OrtkvError):
    """The graph is sound but ortkv cannot run it, or cannot be sure how."""

    code = "unsupported_model"


class ConfigError(OrtkvError):
    """A JSON file of the model is malformed or contradicts itself."""

    code = "config_error"


class TokenizerMissing(OrtkvError):
    """Text was asked for, and the folder has no tokenizer that can be read."""

    code = "tokenizer_missing"


class TemplateError(OrtkvError):
    """The chat template is missing, malformed, or refused by the sandbox."""

    code = "template_error"


class ProviderUnavailable(OrtkvError):
    """The execution provider asked for is not in this installation or this machine."""

    code = "provider_unavailable"


class RuntimeMissing(OrtkvError):
    """No onnxruntime is installed."""

    code = "runtime_missing"


class ExecutionFailed(OrtkvError):
    """onnxruntime stopped in the middle of a run; the cache is as it was before."""

    code = "execution_failed"


class InvalidRequest(OrtkvError):
    """An argument is out of range, of the wrong type, or unknown."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """The tokens asked for do not fit in the model's context."""

    code = "context_length_exceeded"


class NumericalError(OrtkvError):
    """The model's scores are not numbers, so that no token can be chosen."""

    code = "numerical_error"


class OutOfMemory(OrtkvError):
    """The cache could not be made as large as the request needs."""

    code = "out_of_memory"
