"""The Pareto picture: fidelity against FLOPs."""

from pathlib import Path

from redknot.evaluation.report import EvalReport


def pareto(report: EvalReport, path: Path) -> None:
    """Agreement with dense over FLOPs share, one point a policy, with 95 % intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2))
    axes = figure.subplots()
    for policy in report.policies:
        if policy.agreement is None:
            continue
        mean, low, high = policy.agreement.mean, policy.agreement.low, policy.agreement.high
        bars = [[mean - low], [high - mean]]
        axes.errorbar(policy.flops_share, mean, bars, fmt="o", capsize=2, label=policy.name)
    axes.set(
        xlabel="FLOPs, share of dense",
        ylabel="token agreement with dense",
        title=f"{report.model}, {report.n} prompts",
        xlim=(0, 1.05),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    figure.savefig(path, bbox_inches="tight", dpi=150)
