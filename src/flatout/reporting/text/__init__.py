"""Reports for a terminal: verdict, why, next command. Plain ASCII, no colour needed."""

from flatout.reporting.text.ablation import render_ablation
from flatout.reporting.text.contrast import render_contrast
from flatout.reporting.text.doctor import render_doctor
from flatout.reporting.text.profile import render_profile
from flatout.reporting.text.roofline import render_roofline
from flatout.reporting.text.techniques import render_techniques
from flatout.reporting.text.trial import render_failure

__all__ = [
    "render_ablation",
    "render_contrast",
    "render_doctor",
    "render_failure",
    "render_profile",
    "render_roofline",
    "render_techniques",
]
