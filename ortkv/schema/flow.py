"""How a past input goes through the graph: what is told of it, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortkv.schema.moves import Part
    from ortkv.schema.sizes import Size
    from ortkv.schema.spec import Role, RowAlignment, Update
    from ortkv.schema.wiring import Op


@dataclass(frozen=True, kw_only=True)
class Stack:
    """An axis of the past along which the graph takes it apart.

    letter: '2' where the parts are key and value, 'L' where they are layers.
    own_axis: False where the parts lie side by side on an axis that also has another meaning.
    """

    axis: int
    letter: str
    num_parts: int
    own_axis: bool


@dataclass(frozen=True, kw_only=True)
class Flow:
    """How one past input goes through the graph. Axes are those of the past input.

    present: the output it becomes, None where there is none.
    update: None where it is only read.
    sequence, depth: the axes that the graph shows to be S and D.   splits: axes taken apart.
    new_sizes: the dims of the new tokens, by the past's axes.
    window: the most tokens that a present keeps, where it drops older ones and says how many.
    query_len: the one number of new tokens a run may have, where what is dropped fixes it.
    alignment: at which end of a window of fixed size its tokens are.
    fault: what keeps the present from being the past with the new tokens after it; '' if nothing.
    row_lengths: wires with each row's own length, for ops that take one; '' for one that does not.
    kernel: the tokens that a convolution it enters spans; None where it enters none.
    transposed: whether its axes are put in another order before the join.
    path: the ops it goes through to its present.   join: the op that adds the new tokens.
    readers: the ops that told a role.
    """

    past: str
    present: str | None
    update: Update | None
    sequence: Part | None
    depth: Part | None
    splits: tuple[tuple[Part, ...], ...]
    new_sizes: dict[Part, Size]
    stacks: tuple[Stack, ...]
    role: Role | None
    head_dim: int | None
    order: int
    window: int | None
    query_len: int | None
    alignment: RowAlignment
    fault: str
    row_lengths: frozenset[str]
    kernel: int | None
    transposed: bool
    path: tuple[str, ...]
    join: Op | None
    readers: tuple[tuple[Role, Op], ...]
