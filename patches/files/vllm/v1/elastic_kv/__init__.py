# SPDX-License-Identifier: Apache-2.0
"""Elastic KV cache: physical pages come and go behind one stable virtual range.

The modules, from the memory upwards:

- `page_driver`, `host_driver`, `host_memory`: reserve addresses; create, map, unmap and release pages.
- `arena`: one reservation, and which chunks of it have pages.
- `layout`: how block ids lie in the reservation, and what a chunk is.
- `worker_side`: the arena of one rank, as the engine core calls it.
- `block_pool`: publishes and withdraws block ids in the scheduler.
- `resize`: what a resize may ask, and what it answers.
- `transaction`, `ranks`, `resizer`: what a resize is made of while it runs, how all ranks do a thing or none,
  and the steps.
- `controller`: the one owner of the size; one transaction at a time.
- `start_up`: sizes at start-up, and what is refused.
- `metrics`, `api_router`: Prometheus and HTTP.

`page_driver`, `host_driver`, `host_memory`, `arena` and `layout` import nothing of vLLM.
"""
