"""Draws models/loss.png from models/shakespeare/loss.csv; needs matplotlib."""

import csv
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def main() -> None:
    """Plots both losses over the tokens seen and marks the best validation loss."""
    with (HERE / "shakespeare" / "loss.csv").open(newline="", encoding="utf-8") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    millions = [row["tokens"] / 1e6 for row in rows]
    best = min(rows, key=lambda row: row["val_loss"])
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(millions, [row["train_loss"] for row in rows], label="training, with dropout")
    axes.plot(millions, [row["val_loss"] for row in rows], label="validation")
    axes.plot(best["tokens"] / 1e6, best["val_loss"], "o", label=f"best: {best['val_loss']:.3f}")
    axes.set(xlabel="tokens seen, millions", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(HERE / "loss.png", dpi=110)


if __name__ == "__main__":
    main()
