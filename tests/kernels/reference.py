"""What the kernels compute, in float32 and plain PyTorch."""

import torch


def attention(q, k, v, scale, window=0, soft_cap=0.0, sinks=None, slopes=None, live=True):
    """One sequence. q: [tokens, heads, d], its last tokens; k, v: [positions, kv_heads, d]; live: bool [positions]."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))  # [tokens, positions]
    s = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    s = soft_cap * torch.tanh(s / soft_cap) if soft_cap else s
    s = s if slopes is None else s - slopes[:, None, None] * distance
    seen = (distance >= 0) & (distance < (window or len(k) + 1)) & live
    s = s.masked_fill(~seen, -torch.inf)
    sink = torch.full([q.shape[1]], -torch.inf) if sinks is None else sinks.float()
    p = torch.softmax(torch.cat([s, sink[:, None, None].expand(-1, len(q), 1)], 2), 2)[..., :-1].nan_to_num()
    return torch.einsum("hqk,khd->qhd", p, v)


def quantise(x, dtype):
    """x: [..., d]. A scale for each row, and the row in units of it, as int8 or fp8."""
    is_int = dtype == torch.int8
    scale = x.float().abs().amax(-1, keepdim=True) / (127.0 if is_int else torch.finfo(dtype).max)
    steps = x.float() * torch.where(scale > 0, 1 / scale, 0)
    return scale, (steps.round() if is_int else steps).to(dtype)


def quantise_int4(x):
    """Step and minimum of each row of x, [..., d], and which of the sixteen steps each value is."""
    minimum = x.float().amin(-1, keepdim=True).half().float()
    step = ((x.float().amax(-1, keepdim=True) - minimum) / 15).half().float()
    return step, minimum, ((x.float() - minimum) * torch.where(step > 0, 1 / step, 0)).round().clamp(0, 15)
