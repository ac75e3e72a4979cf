"""The table of docs/results/conformance.md: each real export, resolved, verified and decoded.

python tests/exports/conformance_table.py > docs/results/conformance.md
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
from typing import TYPE_CHECKING

import ortkv
from recorded import FOLDERS, error, greedy, rows, tolerance

if TYPE_CHECKING:
    from pathlib import Path

    from ortkv.schema import CacheSchema

COMMAND = "python tests/exports/conformance_table.py > docs/results/conformance.md"
PRODUCERS = {
    "optimum": "optimum-onnx 0.1.0",
    "legacy": "optimum 1.13.3",
    "genai": "GenAI builder 0.18.0",
    "merged": "optimum's merge",
    "two-files": "optimum 1.13.3, two files",
    "ort": "onnxruntime.transformers' GPT-2 tool",
    "ort-fused": "the same tool, `--optimize_onnx`",
    "tf5": "transformers 5.23",
    "tf5-pair": "transformers 5.23, prefill and decode",
    "tf5-fused": "transformers 5.23, ort_fusions",
    "tf5-static": "transformers 5.23, static cache",
    "tf5-static-fused": "transformers 5.23, static, ort_fusions",
    "dynamo": "torch 2.13 dynamo by hand",
    "mobius": "mobius-onnx 0.1.0",
    "mobius-cpu": "mobius-onnx 0.1.0 `--ep cpu`",
    "mobius-static": "mobius-onnx 0.1.0 `--static-cache`",
}
HEADINGS = (
    "producer",
    "architecture",
    "helpers",
    "layouts",
    "update rules",
    "resolves",
    "logits: error of largest",
    "verifies: error / tolerance",
    "greedy rows equal",
    "together as alone",
)


def producer(folder: Path) -> str:
    """Who made a folder, by the end of its name."""
    ending = folder.name.partition("-")[2]
    return PRODUCERS.get(ending, ending)


def architecture(folder: Path) -> str:
    """transformers' model type where the export says it, else the folder's name for it."""
    path = folder / "config.json"
    kind = json.loads(path.read_text()).get("model_type") if path.exists() else None
    return kind or folder.name.partition("-")[0].removesuffix("_s")


def described(schema: CacheSchema) -> list[str]:
    """The cells that the schema alone fills."""
    helpers = [f"{helper.name}: {helper.kind}" for helper in schema.helpers]
    layouts = sorted({entry.layout for entry in schema.entries})
    updates = sorted({entry.update for entry in schema.entries})
    return ["<br>".join(helpers) or "none", ", ".join(layouts), ", ".join(updates), "yes"]


def message(found: Exception, folder: Path) -> str:
    """An error as one table cell, without the place where the folder lies."""
    code = getattr(found, "code", type(found).__name__)
    text = " ".join(str(found).replace(str(folder), folder.name).split()).replace("|", "\\|")
    return f"{code}: {text[:160]}"


def proof(folder: Path) -> list[str]:
    """The cells that only running fills; an error ends them."""
    cells: list[str] = []
    try:
        generator = ortkv.Generator(folder)
        some = rows(folder)
        worst = max(error(generator, row) for row in some)
        cells.append(f"{worst:.0e}{'' if worst < tolerance(folder) else ' **wrong**'}")
        cells.append(verified(folder))
        alone = [greedy(generator, [row], folder)[0] for row in some]
        equal = sum(got == row.greedy for got, row in zip(alone, some, strict=True))
        cells.append(f"{equal} of {len(some)}")
        cells.append("yes" if greedy(generator, some, folder) == alone else "**no**")
    except Exception as found:  # noqa: BLE001 - a refusal is a row of the table
        cells.append(message(found, folder))
    return cells


def verified(folder: Path) -> str:
    """verify's figures; a graph of one token a run has no full run to be held against."""
    try:
        report = ortkv.verify(folder)
    except ortkv.OrtkvError as found:
        if "no full run to compare" in str(found):
            return "one token a run: no full run"
        raise
    figures = f"{report.max_abs_error:.0e} / {report.tolerance:.0e}"
    return figures if report.ok else f"{figures} **no**"


def row_cells(folder: Path) -> list[str]:
    """One folder's row."""
    cells = [producer(folder), architecture(folder)]
    try:
        cells += described(ortkv.inspect(folder))
    except Exception as found:  # noqa: BLE001 - a refusal is a row of the table
        return [*cells, *[""] * 3, message(found, folder)]
    return cells + proof(folder)


def versions() -> str:
    """What ran, and what computed the answers."""
    parts = [f"{x} {importlib.metadata.version(x)}" for x in ("onnxruntime", "numpy", "onnx")]
    return ", ".join([f"ortkv {ortkv.__version__}", *parts, "references: transformers 4.57.6"])


def line(cells: tuple[str, ...] | list[str]) -> str:
    """One line of the table, empty cells to its width."""
    padded = [*cells, *[""] * (len(HEADINGS) - len(cells))]
    return f"| {' | '.join(padded)} |"


def main() -> None:
    """Prints the page."""
    table = [row_cells(folder) for folder in FOLDERS]
    whole = sum(len(cells) == len(HEADINGS) and "**" not in "".join(cells) for cells in table)
    print("# Real exports\n")
    print(f"`{COMMAND}`, {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}: {versions()}.\n")
    print(f"{whole} of {len(table)} exports resolve, verify and give transformers' own logits")
    print(
        "(at every step: a prompt of 7 tokens, then one by one) and greedy tokens. What exporters"
    )
    print("refuse or get wrong by themselves is in tests/exports/README.md.\n")
    print(line(HEADINGS))
    print(f"|{'---|' * len(HEADINGS)}")
    for cells in table:
        print(line(cells))


if __name__ == "__main__":
    main()
