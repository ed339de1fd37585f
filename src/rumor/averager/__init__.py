"""The Averager: one node among real processes."""

from rumor.averager.averager import Averager

__all__ = ["Averager"]
