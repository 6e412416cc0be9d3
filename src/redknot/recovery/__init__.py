"""What must be redone? Layout, signals, plans, policies and their cost."""

from redknot.recovery.flops import Flops, plan_flops
from redknot.recovery.layout import Layout
from redknot.recovery.plan import LayerPlan, Plan
from redknot.recovery.policy import Policy, Stage, Windows
from redknot.recovery.signals import Signals

__all__ = [
    "Flops",
    "LayerPlan",
    "Layout",
    "Plan",
    "Policy",
    "Signals",
    "Stage",
    "Windows",
    "plan_flops",
]
