"""Measuring a cluster: `rumor probe` calls `measure`, and writes its `Probe` to a file."""

from rumor.probe.measure import measure, stand_in
from rumor.probe.results import Coded, Probe, Timing
from rumor.probe.whole_steps import Step, takes_model

__all__ = ["Coded", "Probe", "Step", "Timing", "measure", "stand_in", "takes_model"]
