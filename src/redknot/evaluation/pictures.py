"""The Pareto picture: fidelity against FLOPs."""

from pathlib import Path

from redknot.evaluation.report import EvalReport


def pareto(report: EvalReport, path: Path) -> None:
    """Agreement with dense over FLOPs share, one point a policy, with 95 % intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5))
    axes = figure.subplots()
    for policy in report.policies:
        if policy.agreement is None:
            continue
        mean, low, high = policy.agreement.mean, policy.agreement.low, policy.agreement.high
        axes.errorbar(policy.flops_share, mean, [[mean - low], [high - mean]], fmt="o", capsize=2)
        axes.annotate(
            policy.name,
            (policy.flops_share, mean),
            xytext=(5, -9),
            textcoords="offset points",
            fontsize=7,
        )
    axes.set(
        xlabel="FLOPs, share of dense",
        ylabel="token agreement with dense",
        title=f"{report.model}, {report.n} prompts",
        xlim=(0, 1.12),
    )
    axes.grid(alpha=0.3)
    figure.savefig(path, bbox_inches="tight", dpi=150)
