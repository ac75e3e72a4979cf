"""The key/value cache: buffers in the graph's own layout, and how many tokens they hold."""

from ortkv.cache.slots import Bound
from ortkv.cache.store import Cache

__all__ = ["Bound", "Cache"]
