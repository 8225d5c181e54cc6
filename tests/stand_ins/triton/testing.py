"""Benchmarks."""


def do_bench(fn, **kwargs): ...


def do_bench_cudagraph(fn, **kwargs): ...
