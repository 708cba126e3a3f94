"""Engines on ranks of the job that do not train (`parallel.rollout_ranks`): `client.py` is what training ranks hold,
`service.py` what runs beside an engine, `channel.py` and `messages.py` what is between them."""
