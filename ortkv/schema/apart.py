"""New tokens that are never joined with the past: each has a product of its own with the query.

    scores = Concat(query @ past_keys, query @ new_keys);  out = shares_of_past @ past_values
    + shares_of_new @ new_values

as exporters for fixed-size hardware write it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortkv.schema.fused_ops import KEY
from ortkv.schema.moves import is_move
from ortkv.schema.products import PRODUCTS, SCORE_OPS, SOFTMAX

if TYPE_CHECKING:
    from ortkv.schema.spec import Role
    from ortkv.schema.wiring import Op, Wiring


def new_beside(wiring: Wiring, product: Op, past: str, role: Role) -> str | None:
    """The wire of the new tokens' keys or values, where they stand beside the past's own."""
    joining = "Concat" if role == KEY else "Add"
    join = _first_on_the_way(wiring, product.output(), joining)
    if join is None:
        return None
    op, wire = join
    twins = [_product_behind(wiring, name) for name in op.inputs if name != wire]
    if len(twins) != 1 or twins[0] is None:
        return None
    place = list(product.inputs).index(past)
    return twins[0].input(place) or None


def _first_on_the_way(wiring: Wiring, wire: str, kind: str) -> tuple[Op, str] | None:
    """The first op of a kind after a product, and the input of it that the product becomes."""
    front, seen = [wire], {wire}
    while front:
        wire = front.pop()
        for op in wiring.consumers(wire):
            if op.kind == kind:
                return op, wire
            if op.kind in SOFTMAX or not (is_move(op) or op.kind in SCORE_OPS):
                continue
            new = [out for out in op.outputs if out not in seen]
            seen.update(new)
            front.extend(new)
    return None


def _product_behind(wiring: Wiring, wire: str) -> Op | None:
    """The product that a value is, but for scaling and its axes' order."""
    while (op := wiring.makers.get(wire)) is not None and op.kind not in PRODUCTS:
        if not (is_move(op) or op.kind in ("Mul", "Div")):
            return None
        wire = op.input(0)
    return op
