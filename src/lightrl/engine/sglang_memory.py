"""What SGLang says when memory runs out, and which of our settings to change then."""

from __future__ import annotations

from lightrl.config.schema import EngineConfig

# In SGLang 0.5.17 to 0.5.23: model_executor/pool_configurator.py, mem_cache/kv_cache_configurator.py
_SHARE_TOO_SMALL = ("increase --mem-fraction-static", "raise --mem-fraction-static")
# mem_cache/allocation.py, managers/schedule_batch.py
_CACHE_FULL = (
    "out of memory. try to lower your batch size",
    "alloc_req_slots runs out of memory",
    "out of memory even after retracting",
)
# torch, CUDA, cuBLAS and torch_memory_saver
_DEVICE_FULL = ("out of memory", "outofmemoryerror", "cublas_status_alloc_failed", "cuda_error_out_of_memory")
# the same, with "out of memory" cut off by SGLang: engine.py, watchdog.py; torch on CPU
_MACHINE_FULL = ("exit code: -9", "with exit code -9", "can't allocate memory", "cannot allocate memory")


def memory_hint(log: str, config: EngineConfig) -> str | None:
    """What to change if the log speaks of memory, else None.

    SGLang's own advice names its arguments, and comes with tracebacks of every process that the first one takes along.
    """
    text = log.lower()
    fraction = f"engine.memory_fraction (now {config.memory_fraction})"
    batch = f"engine.max_batch (now {config.max_batch})"
    prefill = f"engine.max_prefill_tokens (now {config.max_prefill_tokens})"
    if any(sign in text for sign in _SHARE_TOO_SMALL):
        return f"its share of the GPU's memory is too small: raise {fraction} or lower {batch}"
    if any(sign in text for sign in _CACHE_FULL):
        return f"its KV cache is full: lower {batch} or raise {fraction}"
    if any(sign in text for sign in _DEVICE_FULL):
        return f"no memory beside its weights and KV cache: lower {fraction}, {batch} or {prefill}"
    if any(sign in text for sign in _MACHINE_FULL):
        return "killed from outside, often because the machine (not the GPU) is out of memory: give the job more"
    return None
