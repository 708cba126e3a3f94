"""An OpenAI-compatible server in the run, for agents outside."""

from lightrl.rollout.endpoint.outside import OutsideAgents, OutsideSession, read_key

__all__ = ["OutsideAgents", "OutsideSession", "read_key"]
