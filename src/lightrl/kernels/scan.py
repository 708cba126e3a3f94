"""The linear recurrence of returns and of GAE, y_t = x_t + a_t y_{t+1}, as a parallel scan."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_CHUNK = 16  # log2(16) passes over all elements, then the scan of a sixteenth of them


def reverse_scan_reference(decay: Tensor, inputs: Tensor) -> Tensor:
    """As `reverse_scan`, one step of the last axis after the other."""
    outputs = torch.empty_like(inputs)
    running = inputs.new_zeros(inputs.shape[:-1])
    for t in reversed(range(inputs.shape[-1])):
        running = inputs[..., t] + decay[..., t] * running
        outputs[..., t] = running
    return outputs


def reverse_scan(decay: Tensor, inputs: Tensor) -> Tensor:
    """y_t = inputs_t + decay_t * y_{t+1} along the last axis, 0 behind its end; both [..., T], and so is y.

    Where `decay` is 0 a sequence ends, so packed rows of any lengths go through together. Chunks of 16 by doubling
    (Hillis and Steele 1986), then the same over the chunks' first elements, and what lies behind each chunk is carried
    in (Blelloch 1990): about 2 log2(T) steps and 5 passes over the data. Nothing is divided by a power of `decay`, so
    long rows neither under- nor overflow.

    >>> reverse_scan(torch.tensor([0.5, 0.0, 0.5]), torch.tensor([1.0, 2.0, 4.0])).tolist()
    [2.0, 2.0, 4.0]
    """
    length = inputs.shape[-1]
    if length <= 1:
        return inputs.clone()
    chunks = -(-length // _CHUNK)
    spare = chunks * _CHUNK - length
    shape = (*inputs.shape[:-1], chunks, _CHUNK)
    y, a = pad(inputs, (0, spare)).reshape(shape), pad(decay, (0, spare)).reshape(shape)
    step = 1
    while step < _CHUNK:  # y_t: the sum of 2 step inputs from t on; a_t: what the next y is worth at t
        y = torch.cat([torch.addcmul(y[..., :-step], a[..., :-step], y[..., step:]), y[..., -step:]], -1)
        a = torch.cat([a[..., :-step] * a[..., step:], a[..., -step:]], -1)
        step *= 2
    if chunks > 1:
        heads = reverse_scan(a[..., 0], y[..., 0])
        y[..., :-1, :].addcmul_(a[..., :-1, :], heads[..., 1:, None])
    return y.reshape(*inputs.shape[:-1], chunks * _CHUNK)[..., :length]
