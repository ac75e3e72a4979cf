"""What is known on a walk from a past input through the graph, and what it came upon."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ortkv.schema.moves import Part

if TYPE_CHECKING:
    from ortkv.schema.moves import Axes, Axis
    from ortkv.schema.sizes import GraphSizes, Size
    from ortkv.schema.spec import Role, Update
    from ortkv.schema.wiring import Op, Wiring


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What every walk of one graph shares."""

    wiring: Wiring
    sizes: GraphSizes
    pasts: frozenset[str]
    outputs: frozenset[str]

    @cached_property
    def measured(self) -> bool:
        """Whether the graph takes a past's shape, for positions say: it would see the capacity."""
        takers = (op for past in self.pasts for op in self.wiring.consumers(past))
        return any(op.kind == "Shape" for op in takers)

    @cached_property
    def of_pasts(self) -> set[str]:
        """The pasts, and every wire that is computed from one."""
        found = set(self.pasts)
        for op in self.wiring.ops:
            if not found.isdisjoint(op.inputs):
                found.update(out for out in op.outputs if out)
        return found


@dataclass(frozen=True, kw_only=True)
class Join:
    """Where past meets new."""

    update: Update
    axis: Axis | None
    op: Op
    head_dim: int | None = None
    row_lengths: str = ""
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A walk's front: the wire reached and what is known of it."""

    wire: str
    axes: Axes | None
    path: tuple[str, ...]
    join: Join | None = None
    picks: tuple[tuple[Part, int], ...] = ()
    """(past's axis, part taken) for every time one part of the past was taken."""
    window: int | None = None
    query_len: int | None = None
    fault: str = ""
    placed: bool = False
    """Whether the new tokens were written at a place of their own after they were joined."""
    computed: bool = False
    """Whether arithmetic has been done on it: still good to tell a role, no present any more."""


@dataclass(frozen=True)
class Findings:
    """What one input's walk came upon."""

    arrivals: dict[str, Step] = field(default_factory=dict[str, Step])
    roles: set[Role] = field(default_factory=set["Role"])
    orders: list[int] = field(default_factory=list[int])
    readers: list[tuple[Role, Op]] = field(default_factory=list["tuple[Role, Op]"])
    sequences: list[Axis] = field(default_factory=list["Axis"])
    depths: list[Axis] = field(default_factory=list["Axis"])
    parts: dict[Part, dict[int, set[Role]]] = field(
        default_factory=dict[Part, "dict[int, set[Role]]"]
    )
    """past's axis -> part taken -> what that part is used as."""
    dropped: set[Part] = field(default_factory=set[Part])
    """Axes of the past that are gone once a part is taken."""
    partners: list[tuple[str, Step]] = field(default_factory=list["tuple[str, Step]"])
    """What the past was joined with, and the step after the join."""
    new_sizes: dict[Part, Size] = field(default_factory=dict[Part, "Size"])
    joins: list[Join] = field(default_factory=list["Join"])
    row_lengths: set[str] = field(default_factory=set[str])
    kernels: list[int] = field(default_factory=list[int])
    transposes: list[Op] = field(default_factory=list["Op"])

    def axes_used(self, sequence: Axis | None, depth: Axis | None) -> None:
        """Note which of the past's axes an op takes as S and D, where it shows both."""
        if sequence is not None and depth is not None:
            self.sequences.append(sequence)
            self.depths.append(depth)

    def used_as(self, role: Role, step: Step, op: Op) -> None:
        """Note that an op takes what a walk has come to as keys or values."""
        self.roles.add(role)
        self.orders.append(op.order)
        self.readers.append((role, op))
        for axis, part in step.picks:
            self.parts.setdefault(axis, {}).setdefault(part, set()).add(role)
