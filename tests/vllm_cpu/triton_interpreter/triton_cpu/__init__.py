"""A Triton backend "cpu" that generates no code: with it, and Triton's own interpreter, vLLM's second model runner, which serves
DSpark, runs on a CPU. Kernels are interpreted one element block at a time in NumPy: right, and far too slow to time.

Not installed. A process that is to have it is started with this folder's parent on PYTHONPATH, TRITON_INTERPRET=1 and
VLLM_USE_V2_MODEL_RUNNER=1; where it is seen without these, vLLM would try to compile and fail.
"""


def register() -> None:
    """For vLLM's plugins: two things that the interpreter lacks and vLLM's kernels use."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import InterpreterBuilder

    def with_bool_mask(method, mask_at):
        """A mask computed by arithmetic is an integer there, which NumPy takes for indices."""

        def call(self, *args, **kwargs):
            mask = args[mask_at] if len(args) > mask_at else kwargs.get("mask")
            if mask is not None and mask.data.dtype != np.bool_:
                mask.data = mask.data.astype(np.bool_)
            return method(self, *args, **kwargs)

        return call

    InterpreterBuilder.create_masked_load = with_bool_mask(InterpreterBuilder.create_masked_load, 1)
    InterpreterBuilder.create_masked_store = with_bool_mask(InterpreterBuilder.create_masked_store, 2)
    libdevice.log1p = lambda x: tl.where(tl.abs(x) < 1e-4, x - 0.5 * x * x, tl.log(1.0 + x))
