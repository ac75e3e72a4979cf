"""How fast a model runs here, in numbers that name their machine."""

from ortkv.bench.measure import Workload, bench

__all__ = ["Workload", "bench"]
