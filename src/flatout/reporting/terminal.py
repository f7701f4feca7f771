"""Reports for a terminal: verdict, why, next command. Plain ASCII, no colour needed."""

from flatout.reporting.doctor import render_doctor, render_history, render_techniques
from flatout.reporting.profile.text import MOST_LINES, render_partial, render_profile
from flatout.reporting.roofline import render_roofline
from flatout.reporting.tuning.text import render_ablation, render_contrast
from flatout.reporting.tuning.trial import render_failure

__all__ = [
    "MOST_LINES",
    "render_ablation",
    "render_contrast",
    "render_doctor",
    "render_failure",
    "render_history",
    "render_partial",
    "render_profile",
    "render_roofline",
    "render_techniques",
]
