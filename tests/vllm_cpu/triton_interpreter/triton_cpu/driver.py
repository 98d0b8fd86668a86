"""Triton looks for a driver here: the CPU as its one device."""

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class Driver(DriverBase):
    def __init__(self):
        pass

    @staticmethod
    def is_active():
        return True

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device=None):
        return 0

    def get_device_interface(self):
        return torch.cpu

    def get_benchmarker(self):
        raise NotImplementedError

    def get_empty_cache_for_benchmark(self):
        raise NotImplementedError

    def clear_cache(self, cache):
        raise NotImplementedError
