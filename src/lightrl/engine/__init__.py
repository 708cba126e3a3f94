"""Engines that sample from the policy: the protocol, and one module an engine."""
