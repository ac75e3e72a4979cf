"""The key/value cache: buffers in the graph's own layout, and how many tokens they hold."""

from ortkv.cache.store import Cache
from ortkv.cache.tensors import Bound

__all__ = ["Bound", "Cache"]
