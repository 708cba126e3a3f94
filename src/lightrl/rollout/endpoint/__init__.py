"""An OpenAI-compatible server in the run, for agents outside."""

from lightrl.rollout.endpoint.outside import OutsideAgents, OutsideSession

__all__ = ["OutsideAgents", "OutsideSession"]
