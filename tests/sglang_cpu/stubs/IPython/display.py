"""What `sglang.utils` imports."""

HTML = display = print
