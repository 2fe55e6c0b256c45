"""Compiles the attention kernels ahead of time, without a GPU, and times them where there is one."""
