"""Paper A's experiments on this engine: what each policy of the prefill reserve gains, and what it costs."""
