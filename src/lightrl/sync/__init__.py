"""New policy weights into engines."""
