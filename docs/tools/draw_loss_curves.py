"""Draw the loss curves of a small transformer with every fused op beside the same in plain torch.

    python docs/tools/draw_loss_curves.py        # writes docs/loss_curves.svg

The model and the text are those of `tests/fused/training.py`, whose test holds the curves together.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS.parent))

from tests.fused.training import Curves, curves  # noqa: E402

STEPS = 50


def draw(named: dict[str, Curves], path: Path) -> None:
    """One panel a precision: both curves above, their distance below."""
    figure, axes = plt.subplots(2, len(named), figsize=(9, 4.5), sharex=True, height_ratios=[3, 1], squeeze=False)
    for column, (name, found) in zip(axes.T, named.items(), strict=True):
        steps = range(1, len(found.plain) + 1)
        column[0].plot(steps, found.plain, linewidth=4, alpha=0.35, color="tab:blue", label="plain torch")
        column[0].plot(steps, found.fused, linewidth=1.2, color="tab:red", label="fused ops")
        column[0].set_title(name)
        column[0].set_ylabel("loss")
        column[0].legend()
        distance = [max(abs(a - b), 1e-9) for a, b in zip(found.plain, found.fused, strict=True)]
        column[1].semilogy(steps, distance, color="black", linewidth=1)
        column[1].set_ylabel("apart")
        column[1].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    precisions = {"float32": curves(STEPS, False), "bfloat16 autocast": curves(STEPS, True)}
    draw(precisions, DOCS / "loss_curves.svg")
    for name, found in precisions.items():
        print(f"{name}: loss {found.plain[0]:.3f} → {found.plain[-1]:.3f}, at most {found.apart():.1e} apart")
