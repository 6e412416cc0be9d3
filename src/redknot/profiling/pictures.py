"""Pictures of a profile: scores by layer and group, and important tokens by depth."""

from pathlib import Path

import numpy as np

from redknot.heads import HeadMap
from redknot.profiling.run import ProfileReport


def heat_map(report: ProfileReport, head_map: HeadMap, path: Path) -> None:
    """Scores of all groups, on a logarithmic scale; dots mark groups that the map keeps global."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    scores = np.maximum(np.asarray(report.scores).T, 1e-6)
    figure = Figure(figsize=(0.28 * scores.shape[1] + 2, 0.3 * scores.shape[0] + 1.6))
    axes = figure.subplots()
    image = axes.imshow(scores, aspect="auto", cmap="magma", norm=LogNorm())
    kept = [
        (layer, group)
        for layer, rules in enumerate(head_map.prefill)
        for group, rule in enumerate(rules)
        if rule.window is None
    ]
    axes.plot(*zip(*kept, strict=True), "o", color="white", markersize=2.5)
    axes.set(
        xlabel="layer", ylabel="KV head", title=f"{report.model}: {report.method} (dots: global)"
    )
    axes.set_yticks(range(scores.shape[0]))
    figure.colorbar(image, label="score")
    figure.savefig(path, bbox_inches="tight", dpi=150)


def important_tokens(report: ProfileReport, path: Path) -> None:
    """Tokens that carry 90 % of the question's attention: of one head, and the union over heads."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2))
    axes = figure.subplots()
    layers = range(len(report.important_tokens))
    axes.plot(layers, report.important_tokens, "o-", label="union over query heads")
    axes.plot(layers, report.important_tokens_per_head, "s--", label="one query head, mean")
    axes.set(xlabel="layer", ylabel="share of context tokens", ylim=(0, 1), title=report.model)
    axes.legend()
    figure.savefig(path, bbox_inches="tight", dpi=150)
