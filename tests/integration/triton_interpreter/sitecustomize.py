"""Lets vLLM's V2 model runner, whose kernels are Triton's, run on a machine without a GPU.

Python imports a module of this name at start, in every process whose PYTHONPATH holds this folder: the test's script and
vLLM's subprocesses. With TRITON_INTERPRET=1 Triton runs kernels in Python, but it and vLLM still ask for an active driver;
this registers one that says "cpu" to all they ask.
"""

import os
import types


def register_cpu_driver() -> None:
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class InterpreterDriver(DriverBase):
        def __init__(self) -> None:
            """The base class looks for a device here; there is none."""

        @staticmethod
        def is_active() -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 1)

        def get_active_torch_device(self):
            import torch

            return torch.device("cpu")

        def get_benchmarker(self):
            return lambda *args, **kwargs: [0.0, 0.0, 0.0]

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: object = None) -> int:
            return 0

    backends["cpu"] = types.SimpleNamespace(driver=InterpreterDriver, compiler=None)
    driver.set_active(InterpreterDriver())


if os.environ.get("TRITON_INTERPRET") == "1":
    register_cpu_driver()
