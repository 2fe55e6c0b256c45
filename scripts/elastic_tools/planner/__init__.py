"""The planner: more GPUs, a smaller cache, a smaller chunk, or an elastic reserve?"""
