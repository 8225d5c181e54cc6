"""Tuning and heuristics."""

from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface


class Config:
    def __init__(self, kwargs, num_warps=4):
        self.kwargs = kwargs
        self.num_warps = num_warps

    def all_kwargs(self):
        return {**self.kwargs, "num_warps": self.num_warps}


class Autotuner(KernelInterface):
    def __init__(self, fn, configs, key, restore_value):
        self.fn, self.configs, self.keys, self.restore_value = fn, configs, key, restore_value
        self.arg_names = fn.arg_names
        self.cache = {}

    def _bench(self, args, config, kwargs):
        def kernel_call():
            copies = {name: self.nargs[name].clone() for name in self.restore_value}
            self.fn.run(*args, **kwargs, **config.all_kwargs())
            for name, copy in copies.items():
                self.nargs[name].copy_(copy)

        return driver.active.get_benchmarker()(kernel_call, quantiles=(0.5, 0.2, 0.8))

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        key = tuple(self.nargs[name] for name in self.keys)
        if key not in self.cache:
            timings = {config: self._bench(args, config, kwargs) for config in self.configs}
            self.cache[key] = min(timings, key=timings.get)
        self.best_config = self.cache[key]
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())


class Heuristics(KernelInterface):
    def __init__(self, fn, values):
        self.fn, self.values, self.arg_names = fn, values, fn.arg_names

    def run(self, *args, **kwargs):
        for name, value in self.values.items():
            kwargs[name] = value({**dict(zip(self.arg_names, args, strict=False)), **kwargs})
        return self.fn.run(*args, **kwargs)


def autotune(configs, key, restore_value=()):
    return lambda fn: Autotuner(fn, configs, key, restore_value)


def heuristics(values):
    return lambda fn: Heuristics(fn, values)
