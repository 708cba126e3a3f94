"""Only its name: SGLang imports it for output in notebooks."""
