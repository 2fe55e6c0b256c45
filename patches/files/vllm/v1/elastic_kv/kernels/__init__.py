# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that read and write a paged KV cache whose blocks come and go."""
